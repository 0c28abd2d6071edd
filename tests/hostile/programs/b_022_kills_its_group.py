# B 22: a signal to its own process group ends it and nobody else; the kernel reports it like a kill of the machine's
# expect: status=signal signal=9 blame=infra
import os
import signal

os.kill(0, signal.SIGKILL)
