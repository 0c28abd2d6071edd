# A 9: stops itself; a stopped process still has a deadline
# expect: status=timeout blame=model
# limits: wall_s=0.5
import os
import signal

os.kill(os.getpid(), signal.SIGSTOP)
