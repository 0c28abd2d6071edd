# F 79: takes files of the host into its folder by hard links and renaming
# expect: status=ok
# needs: landlock|mntns
import os

from attack import attempt, tell

for file in "/usr/bin/env", os.__file__, "/etc/ld.so.cache":
    attempt(f"link {file}", os.link, file, "taken")
    attempt(f"rename {file}", os.rename, file, "taken")
with open("own", "w") as own:
    own.write("x")
attempt("rename out", os.rename, "own", "/usr/own")
attempt("link out", os.link, "own", "/dev/own")
tell()
