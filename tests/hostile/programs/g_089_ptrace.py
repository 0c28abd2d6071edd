# G 89: traces its child, its parent and process 1, and reads and writes their memory
# expect: status=ok
# needs: seccomp x86_64
import ctypes
import os
import time

from attack import attempt, buffer, syscall, tell

attempt("TRACEME", syscall, 101, 0, 0, 0, 0)
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
room = buffer()
local = (ctypes.c_uint64 * 2)(ctypes.addressof(room), 8)
for pid in {child, os.getppid(), 1} - {0}:
    attempt(f"ATTACH {pid}", syscall, 101, 16, pid, 0, 0)
    attempt(f"SEIZE {pid}", syscall, 101, 0x4206, pid, 0, 0)
    attempt(f"read {pid}", syscall, 310, pid, local, 1, local, 1, 0)
    attempt(f"write {pid}", syscall, 311, pid, local, 1, local, 1, 0)
for pid in {os.getppid(), 1} - {0}:
    attempt(f"mem of {pid}", open, f"/proc/{pid}/mem", "r+b")
os.kill(child, 9)
tell()
