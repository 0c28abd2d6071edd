# C 31: memory in files without a name, which no limit of a process counts
# expect: status=memory_limit blame=model
# without cgroup: status=ok
import os

held = []
try:
    for _ in range(64):
        held.append(os.memfd_create("x"))
        os.write(held[-1], bytes(8 << 20))
except OSError:
    print("contained")
else:
    print("escaped: 512 MB")
