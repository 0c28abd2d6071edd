# B 21: signals to process 1 and to its parent have no effect
# expect: status=ok
# needs: landlock|pidns
import os
import signal
import time

for pid in {1, os.getppid()} - {0}:
    for number in signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGSEGV, signal.SIGCHLD:
        try:
            os.kill(pid, number)
        except OSError:
            pass
time.sleep(0.1)
print("contained")
