# B 18: starts commands until it may not any more
# expect: status=ok
# limits: wall_s=10
import subprocess

started = []
try:
    while len(started) < 500:
        started.append(subprocess.Popen(["sleep", "100"]))
except OSError:
    pass
print("contained" if len(started) <= 32 else f"escaped: {len(started)} processes")
