# F 68: lists all processes
# expect: status=ok
# needs: landlock|mntns
import os

try:
    others = {name for name in os.listdir("/proc") if name.isdigit()} - {str(os.getpid())}
except OSError:
    others = set()
print(f"escaped: {others}" if others else "contained")
