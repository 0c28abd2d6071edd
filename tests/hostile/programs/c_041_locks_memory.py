# C 41: memory that cannot be moved out
# expect: status=ok
# needs: seccomp x86_64
import ctypes
import mmap

from attack import attempt, syscall, tell

held = mmap.mmap(-1, 8 << 20)
start = ctypes.addressof(ctypes.c_char.from_buffer(held))
attempt("mlockall", syscall, 151, 3)
attempt("mlock2", syscall, 325, start, 8 << 20, 0)
attempt("mlock", syscall, 149, start, 8 << 20)
tell()
