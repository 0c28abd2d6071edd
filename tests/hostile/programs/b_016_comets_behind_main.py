# B 16: processes that fork and end at once, each in a session of its own, so that no process id stays; main ends well
# expect: status=ok max_wall_s=2
# without uid: status=ok|error
import os
import time


def fly():
    while True:
        try:
            if os.fork():
                os._exit(0)
            os.setsid()
        except OSError:
            pass


for _ in range(4):
    if os.fork() == 0:
        fly()
time.sleep(0.1)
print("contained")
