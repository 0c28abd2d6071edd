# F 76: writes outside of its folders
# expect: status=ok
# needs: landlock|mntns
import os
import sys

from attack import attempt, tell

PLACES = """/ /usr /usr/lib /usr/local/bin /bin /lib /lib64 /etc /dev /opt /opt/packages /opt/service /w /w/call/.. /proc /proc/self
/proc/sys/kernel /sys /sys/fs/cgroup /root /home /var /var/tmp /run /boot /srv""".split()
for place in {*PLACES, sys.base_prefix, os.path.dirname(os.__file__)}:
    attempt(f"file in {place}", open, f"{place}/seventy-six", "w")
    attempt(f"folder in {place}", os.mkdir, f"{place}/seventy-six")
    attempt(f"link in {place}", os.symlink, "x", f"{place}/seventy-six")
for file in (
    os.__file__,
    "/usr/bin/env",
    "/etc/ld.so.cache",
    "/proc/self/oom_score_adj",
    "/proc/self/comm",
    "/proc/self/attr/current",
):
    attempt(f"append to {file}", open, file, "r+b")
    attempt(f"truncate {file}", os.truncate, file, 0)
tell()
