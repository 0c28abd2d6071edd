# B 16: a fork bomb of many sessions and threads that reaps nobody and wakes what was stopped; main ends well
# expect: status=ok max_wall_s=2
# without uid: status=ok|error
import os
import signal
import threading
import time


def burst():
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
            os.kill(-1, signal.SIGCONT)
        except OSError:
            pass


if os.fork() == 0:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        threading.Thread(target=burst).start()
    except RuntimeError:
        pass
    burst()
time.sleep(0.1)
print("contained")
