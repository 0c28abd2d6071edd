# K 146: asks which pages of a shared file are in the page cache, and which paths the kernel has in mind
# expect: status=ok
# needs: seccomp x86_64
# after: k_146_marks_the_page_cache.py
import ctypes
import errno
import os

from attack import attempt, buffer, libc, syscall, tell

MINCORE, CACHESTAT, OPENAT2, IO_SETUP, IO_URING_SETUP = 27, 451, 437, 206, 425
RWF_DONTCACHE, RESOLVE_CACHED, AT_FDCWD = 0x80, 0x20, -100
fd = os.open(os.path.dirname(os.__file__) + "/pydoc_data/topics.py", os.O_RDONLY)
libc.mmap.restype = ctypes.c_void_p
shown = libc.mmap(None, ctypes.c_size_t(4096), 1, 1, fd, ctypes.c_long(0))
attempt("RWF_NOWAIT", os.preadv, fd, [bytearray(1)], 0, os.RWF_NOWAIT, by=[errno.EOPNOTSUPP])
attempt("RWF_DONTCACHE", os.preadv, fd, [bytearray(1)], 0, RWF_DONTCACHE, by=[errno.EOPNOTSUPP])
attempt("mincore", syscall, MINCORE, shown, 4096, buffer(), by=[errno.EPERM])
attempt("cachestat", syscall, CACHESTAT, fd, (ctypes.c_uint64 * 2)(0, 4096), buffer(), 0, by=[errno.EPERM, errno.ENOSYS])
attempt("paths", syscall, OPENAT2, AT_FDCWD, b"/usr", (ctypes.c_uint64 * 3)(0, 0, RESOLVE_CACHED), 24, by=[errno.ENOSYS])
attempt("requests in a queue", syscall, IO_SETUP, 1, buffer(), by=[errno.ENOSYS])
attempt("requests in a ring", syscall, IO_URING_SETUP, 1, buffer(), by=[errno.EPERM])
tell()
