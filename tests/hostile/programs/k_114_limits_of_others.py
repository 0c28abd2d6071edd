# K 114: sets the limits of processes that are not its own: the host's, its parent, process 1
# expect: status=ok
# bait
# needs: landlock
import os
import resource

from attack import attempt, tell

for pid in {int(os.environ["BAIT_PID"]), os.getppid()} - {0, os.getpid()}:
    for number in resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE:
        # As it is, so that it does no harm where it succeeds; a limit of CPU time of 0 would be a kill.
        attempt(f"limit {number} of {pid}", lambda p, n: resource.prlimit(p, n, resource.prlimit(p, n)), pid, number)
tell()
