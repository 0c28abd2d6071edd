# K 109: makes siblings instead of children, whose parent is the zygote
# expect: status=ok max_wall_s=3
# needs: x86_64
import time

from attack import syscall, tell

for _ in range(20):
    if syscall(56, 0x8000 | 17, 0, 0, 0, 0) == 0:
        time.sleep(60)
tell()
