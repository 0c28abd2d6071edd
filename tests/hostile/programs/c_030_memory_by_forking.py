# C 30: children hold what one process may not
# expect: status=memory_limit blame=model
# without cgroup: status=memory_limit|ok stdout_has=""
# limits: wall_s=10
import os
import time

read, write = os.pipe()
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(100 << 20)
        os.write(write, b"x")
        time.sleep(60)
held = 0
while held < 4:
    held += len(os.read(read, 4))
print("each of four held 100 MB")
