# B 20: a signal to every process there is reaches its own only
# expect: status=ok
# needs: landlock|pidns
import os
import signal
import time

child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
try:
    os.kill(-1, signal.SIGKILL)
except OSError:
    pass
print("contained" if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL else "the child lives")
