# G 80: takes another identity
# expect: status=ok
# needs: no_new_privs
import ctypes
import os

from attack import attempt, escaped, libc, tell

before = os.getresuid(), os.getresgid(), os.getgroups()
for uid in 0, 1, 1000, 20001, 65534:
    for change in os.setuid, os.setgid, os.seteuid, os.setegid:
        try:
            change(uid)
        except OSError:
            pass
    libc.setfsuid(uid)
    for change in os.setresuid, os.setresgid:
        try:
            change(uid, uid, uid)
        except OSError:
            pass
attempt("setgroups", os.setgroups, [0])
if before != (os.getresuid(), os.getresgid(), os.getgroups()):
    escaped(f"{before} became {os.getresuid(), os.getresgid(), os.getgroups()}")
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
if libc.capget(header, sets) != 0 or any(sets):
    escaped(f"capabilities {list(sets)}")
sets[0] = sets[1] = 0xFFFFFFFF
if libc.capset(header, sets) == 0:
    escaped("capset")
tell()
