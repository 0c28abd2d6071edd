# G 86: system calls by their x32 numbers
# expect: status=ok
# needs: seccomp x86_64
import errno

from attack import attempt, syscall, tell

for number in (39, 41, 56, 57, 59, 101, 165, 272, 512, 520, 521, 545, 547):
    attempt(number, syscall, 0x40000000 | number, 0, 0, 0, 0, 0, 0, by=[errno.ENOSYS])
tell()
