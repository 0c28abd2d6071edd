# G 88: makes device nodes
# expect: status=ok
import os
import stat

from attack import attempt, tell

for name, kind, device in (
    ("sda", stat.S_IFBLK, os.makedev(8, 0)),
    ("vda", stat.S_IFBLK, os.makedev(254, 0)),
    ("mem", stat.S_IFCHR, os.makedev(1, 1)),
    ("kmsg", stat.S_IFCHR, os.makedev(1, 11)),
    ("null", stat.S_IFCHR, os.makedev(1, 3)),
    ("tty", stat.S_IFCHR, os.makedev(5, 0)),
):
    attempt(name, os.mknod, name, kind | 0o666, device)
    attempt(f"open {name}", open, name, "rb")
tell()
