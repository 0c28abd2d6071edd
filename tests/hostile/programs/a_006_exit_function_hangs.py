# A 6: ends well, but for an exit function that sleeps
# expect: status=timeout blame=model stdout="main\n"
# expect-cell: status=ok blame=none
# limits: wall_s=0.5
import atexit
import time

atexit.register(time.sleep, 100)
print("main")
