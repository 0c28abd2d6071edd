# K 124: leaves folders so deep that whoever removes them runs out of descriptors or of stack
# expect: status=ok
# limits: wall_s=10
import os

depth = 0
try:
    for depth in range(7000):
        os.mkdir("d")
        os.chdir("d")
except OSError:
    pass
print("contained")
