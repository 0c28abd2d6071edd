# B 17: a daemon in a session of its own holds stdout open
# expect: status=ok max_wall_s=2
import os
import time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
print("contained")
