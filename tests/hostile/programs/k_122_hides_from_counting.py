# K 122: names, titles and flags that a careless reader of /proc takes for something else
# expect: status=timeout
# limits: wall_s=0.5
import ctypes

libc = ctypes.CDLL(None)
libc.prctl(15, b") R 1 (", 0, 0, 0)  # its name
libc.prctl(1, 0, 0, 0, 0)  # no signal when its parent dies
libc.prctl(4, 0, 0, 0, 0)  # not dumpable
libc.prctl(36, 1, 0, 0, 0)  # adopts orphans
while True:
    pass
