# K 145: all the output that it may leave, in characters that JSON writes with six bytes each
# expect: status=ok exit=0 stdout_has="\x00\x00"
# limits: output_kb=4096 memory_mb=128 file_mb=64
import os

for fd in 1, 2:
    for _ in range(4):
        os.write(fd, bytes(1 << 20))
