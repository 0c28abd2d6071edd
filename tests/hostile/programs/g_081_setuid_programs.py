# G 81: starts programs that have more rights than it
# expect: status=ok
# without uid: status=ok|error
# needs: no_new_privs
import os
import subprocess

from attack import escaped, libc, tell

for command in (
    "su -c 'id -u'",
    "sudo -n id -u",
    "newgrp",
    "passwd -S",
    "chsh -l",
    "mount",
    "unshare -r id -u",
    "ping -c1 127.0.0.1",
):
    words = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    if words.strip() == "0" and os.getuid() != 0:
        escaped(command)
for shell in "sh", "su", "sudo -n sh", "unshare -r sh":
    words = subprocess.run(
        f"{shell} -c 'cat /proc/self/status'", shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    for line in words.stdout.splitlines():
        if line.startswith(("CapPrm", "CapEff", "CapAmb")) and int(line.split()[1], 16):
            escaped(f"{shell}: {line}")
if libc.prctl(39, 0, 0, 0, 0) != 1:
    escaped("new privileges are possible")
tell()
