# B 25: a vforked child that never starts anything holds its parent
# expect: status=timeout
# limits: wall_s=0.5
import ctypes

libc = ctypes.CDLL(None)
if libc.vfork() == 0:
    while True:
        libc.pause()
