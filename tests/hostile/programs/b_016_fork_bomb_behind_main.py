# B 16: a fork bomb whose main process ends well
# expect: status=ok max_wall_s=2
import os
import time

if os.fork() == 0:
    while True:
        try:
            os.fork()
        except OSError:
            pass
time.sleep(0.1)
print("contained")
