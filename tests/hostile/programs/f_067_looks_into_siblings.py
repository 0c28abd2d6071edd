# F 67: reads the environment, memory, descriptors and files of every other process
# expect: status=ok
# pair: f_067_sibling_with_secrets.py
# needs: landlock|mntns
import os
import time

from attack import attempt, tell

time.sleep(0.2)
own = {os.getpid()}
for pid in range(1, 32769):
    if pid in own or not os.path.exists(f"/proc/{pid}"):
        continue
    for name in "environ", "mem", "maps", "cmdline", "stat":
        attempt(f"{name} of {pid}", lambda path: open(path, "rb").read(1), f"/proc/{pid}/{name}")
    for name in "fd", "root", "cwd", "task":
        attempt(f"{name} of {pid}", os.listdir, f"/proc/{pid}/{name}")
tell()
