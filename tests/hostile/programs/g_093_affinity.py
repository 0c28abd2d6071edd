# G 93: takes other cores, a higher priority, another scheduler
# expect: status=ok
# needs: seccomp
import os

from attack import attempt, tell

attempt("affinity", os.sched_setaffinity, 0, range(os.cpu_count()))
attempt("nice", os.setpriority, os.PRIO_PROCESS, 0, -5)
for policy in os.SCHED_FIFO, os.SCHED_RR, os.SCHED_BATCH, os.SCHED_OTHER:
    attempt(f"scheduler {policy}", os.sched_setscheduler, 0, policy, os.sched_param(0 if policy in (0, 3) else 1))
tell()
