# K 111: overwrites all memory that it shares with anybody; `completed` and `value` are its own word, the rest is not
# expect: status=error exit=3 blame=model
import ctypes
import os

try:
    maps = open("/proc/self/maps").readlines()
except OSError:
    maps = []
for line in maps:
    where, rights = line.split()[:2]
    if rights == "rw-s":
        start, end = (int(number, 16) for number in where.split("-"))
        for fill in 0xFF, 0x01, 0x00, 0xFF:
            ctypes.memset(start, fill, end - start)
        if end - start > 65536:
            print("escaped: more than its own page is shared")
os._exit(3)
