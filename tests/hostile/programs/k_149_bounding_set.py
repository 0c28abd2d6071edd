# K 149: what an executed file could give it
# expect: status=ok
# needs: userns
import subprocess

from attack import escaped, libc, tell

PR_CAPBSET_READ, PR_CAPBSET_DROP = 23, 24
if left := [number for number in range(64) if libc.prctl(PR_CAPBSET_READ, number, 0, 0, 0) > 0]:
    escaped(f"the bounding set has {left}")
status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
for line in status.splitlines():
    name, _, value = line.partition(":\t")
    if name.startswith("Cap") and int(value, 16):
        escaped(f"{name} of what it executes is {value}")
tell()
