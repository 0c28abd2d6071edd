# G 83: clone3, whose flags no filter can see
# expect: status=ok
# needs: seccomp x86_64
import ctypes
import errno
import os

from attack import attempt, syscall, tell


def clone3(flags):
    arguments = (ctypes.c_uint64 * 11)(flags, 0, 0, 0, 17)
    if syscall(435, arguments, ctypes.sizeof(arguments)) == 0:
        os._exit(0)


attempt("plain", clone3, 0, by=[errno.ENOSYS])
attempt("user namespace", clone3, 0x10000000, by=[errno.ENOSYS])
tell()
