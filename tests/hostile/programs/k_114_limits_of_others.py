# K 114: sets the limits of processes that are not its own: the host's, its parent, a child
# expect: status=ok
# bait
# needs: seccomp
import os
import resource
import subprocess

from attack import attempt, tell

child = subprocess.Popen(["sleep", "60"])
for pid in {int(os.environ["BAIT_PID"]), os.getppid(), child.pid} - {0, os.getpid()}:
    for number in resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE:
        # As it is, so that it does no harm where it succeeds; a limit of CPU time of 0 would be a kill.
        attempt(f"limit {number} of {pid}", lambda p, n: resource.prlimit(p, n, resource.prlimit(p, n)), pid, number)
for number in range(10):
    limits = resource.getrlimit(number)
    resource.setrlimit(number, limits)  # its own it may
    if resource.prlimit(0, number, limits) != limits:
        print("its own limits are not what they were")
tell()
