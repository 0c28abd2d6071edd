# K 146: moves pages of a shared file out of the page cache and into it, for a later program to see
# expect: status=ok
# needs: seccomp x86_64
import ctypes
import errno
import os

from attack import attempt, libc, syscall, tell

MADVISE, READAHEAD = 28, 187
COLD, PAGEOUT, COLLAPSE = 20, 21, 25
fd = os.open(os.path.dirname(os.__file__) + "/pydoc_data/topics.py", os.O_RDONLY)
size = os.fstat(fd).st_size
libc.mmap.restype = ctypes.c_void_p
shown = libc.mmap(None, ctypes.c_size_t(size), 1, 1, fd, ctypes.c_long(0))
for advice in os.POSIX_FADV_DONTNEED, os.POSIX_FADV_WILLNEED:
    os.posix_fadvise(fd, 0, size, advice)  # succeeds, and does nothing: test_channels.py looks from outside
attempt("readahead", syscall, READAHEAD, fd, 0, size, by=[errno.EPERM])
for advice in COLD, PAGEOUT, COLLAPSE:
    attempt(f"advice {advice}", syscall, MADVISE, shown, size, advice, by=[errno.EPERM])
tell()
