# D 51: reads its stdin twice and writes to it
# expect: status=ok
# stdin: one\ntwo\n
import mmap
import os

from attack import attempt, escaped, tell

first = os.read(0, 100)
os.lseek(0, 0, os.SEEK_SET)
if not first == os.read(0, 100) == b"one\ntwo\n":
    escaped("stdin is not what was sent")
attempt("write", os.write, 0, b"x")
attempt("truncate", os.ftruncate, 0, 0)
attempt("grow", os.ftruncate, 0, 100)
attempt("map", mmap.mmap, 0, 8, mmap.MAP_SHARED, mmap.PROT_WRITE)
attempt("again", lambda: os.write(os.open("/proc/self/fd/0", os.O_RDWR), b"x"))
tell()
