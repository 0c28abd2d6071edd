# G 82: namespaces of its own, in which it would be root
# expect: status=ok
# needs: seccomp x86_64
import os

from attack import attempt, syscall, tell

FLAGS = {
    "time": 0x80,
    "mount": 0x20000,
    "cgroup": 0x2000000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
}
FLAGS["net"] = 0x40000000


def clone(flags):
    if syscall(56, flags | 17, 0, 0, 0, 0) == 0:
        os._exit(0)


for name, flag in FLAGS.items():
    attempt(f"unshare {name}", syscall, 272, flag)
    if name != "time":  # there the number means something else
        attempt(f"clone {name}", clone, flag)
        attempt(f"clone user and {name}", clone, flag | FLAGS["user"])
attempt("setns", syscall, 308, 0, 0)
tell()
