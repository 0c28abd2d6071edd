# K 119: changes mode and times of what all programs of the sandbox share
# expect: status=ok
# needs: mntns
import os

from attack import attempt, tell

PLACES = "/ /w /dev /dev/null /dev/urandom /proc /usr /opt /opt/packages /opt/service /etc /etc/ld.so.cache".split()
for place in PLACES:
    if os.path.exists(place):
        # As it is: where it succeeds, nothing is broken for those who come later.
        attempt(f"mode of {place}", os.chmod, place, os.stat(place).st_mode & 0o7777)
        attempt(f"owner of {place}", os.chown, place, os.getuid(), os.getgid())
        attempt(f"times of {place}", os.utime, place, (os.stat(place).st_atime, os.stat(place).st_mtime))
        attempt(f"attribute of {place}", os.setxattr, place, "user.x", b"1")
tell()
