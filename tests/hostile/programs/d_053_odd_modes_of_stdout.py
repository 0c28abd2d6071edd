# D 53: what it does to its stdout concerns nobody else
# expect: status=ok
import fcntl
import os

from attack import attempt, tell

os.set_blocking(1, False)
attempt("size of a pipe", fcntl.fcntl, 1, fcntl.F_SETPIPE_SZ, 1 << 20)
attempt("seals", fcntl.fcntl, 1, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW)
fcntl.fcntl(1, fcntl.F_SETFL, 0)  # not to append any more
os.write(1, b"written over\n")
os.lseek(1, 0, os.SEEK_SET)
os.ftruncate(1, 0)
fcntl.flock(1, fcntl.LOCK_EX)
tell()
