# K 140: all the output that it may leave, in bytes that are no text and take three times the room as such
# expect: status=ok exit=0 stdout_has="\ufffd\ufffd" stderr_has="\ufffd\ufffd"
# limits: output_kb=4096 memory_mb=128 file_mb=64
import os

block = b"\xff\xc0\xe2\x82" * (1 << 18)
for fd in 1, 2:
    for _ in range(4):
        os.write(fd, block)
