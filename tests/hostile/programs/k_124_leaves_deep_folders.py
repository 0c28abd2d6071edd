# K 124: leaves folders so deep that whoever removes them runs out of descriptors or of stack
# expect: status=ok
# limits: wall_s=20 cpu_s=30
import os

depth = 0
try:
    for depth in range(4500):
        os.mkdir("d")
        os.chdir("d")
except OSError:
    pass
print("contained")
