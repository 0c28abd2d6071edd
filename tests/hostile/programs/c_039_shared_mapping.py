# C 39: shared memory that children fill
# expect: status=memory_limit blame=model
# without cgroup: status=memory_limit|ok
# limits: wall_s=10
import mmap
import os

try:
    shared = mmap.mmap(-1, 1 << 30)
except OSError:
    print("contained")
    os._exit(0)
for part in range(4):
    if os.fork() == 0:
        for at in range(part << 28, (part + 1) << 28, 4096):
            shared[at] = 1
        os._exit(0)
for _ in range(4):
    os.wait()
print("escaped: 1 GB")
