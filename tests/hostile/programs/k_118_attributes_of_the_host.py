# K 118: changes mode and times of a file of the host
# expect: status=ok
# bait
# needs: landlock|mntns seccomp
import os

from attack import attempt, tell

file = os.environ["BAIT"] + "/file"
attempt("mode", os.chmod, file, 0o600)
attempt("owner", os.chown, file, os.getuid(), -1)
attempt("times", os.utime, file, (1, 1))
tell()
