# A 12: raises its own limit of CPU time, then uses it
# expect: status=cpu_limit stdout="contained\n"
# not-as-cell: cells have no limit of CPU time
# limits: cpu_s=1 wall_s=10
import resource

from attack import attempt, tell

for most in resource.RLIM_INFINITY, 1000:
    attempt(most, resource.setrlimit, resource.RLIMIT_CPU, (most, most))
tell()
while True:
    pass
