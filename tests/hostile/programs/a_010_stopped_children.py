# A 10: leaves five stopped children
# expect: status=ok max_wall_s=2
# without uid: status=ok|error
import os
import signal
import time

for _ in range(5):
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)
print("contained")
