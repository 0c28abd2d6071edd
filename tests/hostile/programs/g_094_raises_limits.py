# G 94: raises its limits
# expect: status=ok
# needs: rlimits
import resource

from attack import attempt, tell

for name in "CPU FSIZE NOFILE NPROC CORE MEMLOCK STACK MSGQUEUE SIGPENDING RTPRIO NICE".split():
    number = getattr(resource, f"RLIMIT_{name}", None)
    if number is None:
        continue
    _, hard = resource.getrlimit(number)
    for more in resource.RLIM_INFINITY, hard + 1:
        attempt(f"{name} to {more}", resource.setrlimit, number, (more, more))
        attempt(f"{name} to {more} by prlimit", resource.prlimit, 0, number, (more, more))
tell()
