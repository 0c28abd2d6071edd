# B 27: as many zombies as it may have
# expect: status=ok
import os

made = 0
try:
    while made < 2000:
        if os.fork() == 0:
            os._exit(0)
        made += 1
except OSError:
    pass
print("contained" if made <= 32 else f"escaped: {made} processes")
