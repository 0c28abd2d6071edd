# G 87: mounts and unmounts
# expect: status=ok
# needs: seccomp x86_64
import os

from attack import attempt, libc, syscall, tell


def call(function, *arguments):
    if function(*arguments) != 0:
        raise OSError


attempt("tmpfs", call, libc.mount, b"none", b".", b"tmpfs", 0, None)
attempt("proc", call, libc.mount, b"proc", b".", b"proc", 0, None)
attempt("bind", call, libc.mount, b"/usr", b".", None, 4096, None)
attempt("writable", call, libc.mount, None, b"/usr", None, 32 | 4096, None)
for place in b"/proc", b"/w/call", b"/dev/null", b"/usr", b"/tmp", b"/":
    attempt(f"umount {place}", call, libc.umount2, place, 2)
attempt("fsopen", syscall, 430, b"tmpfs", 0)
attempt("open_tree", syscall, 428, -100, b"/", 1)
attempt("pivot_root", syscall, 155, b".", b".")
attempt("chroot", os.chroot, ".")
tell()
