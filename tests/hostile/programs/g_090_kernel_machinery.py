# G 90: the parts of the kernel that most ways out begin with
# expect: status=ok
# needs: seccomp x86_64
from attack import attempt, buffer, syscall, tell

for name, number, arguments in (
    ("io_uring_setup", 425, (8, buffer())),
    ("bpf", 321, (0, buffer(), 128)),
    ("userfaultfd", 323, (1,)),
    ("perf_event_open", 298, (buffer(), 0, -1, -1, 0)),
    ("modify_ldt", 154, (1, buffer(16), 16)),
    ("memfd_secret", 447, (0,)),
    ("add_key", 248, (b"user", b"x", b"x", 1, -2)),
    ("vmsplice", 278, (1, buffer(16), 1, 0)),
    ("seccomp", 317, (3, 0, None)),
    ("seccomp by prctl", 157, (22, 2, buffer())),
    ("memory map by prctl", 157, (35, 1, 0, 0, 0)),
    ("landlock", 444, (0, 0, 1)),
    ("kexec", 246, (0, 0, None, 0)),
    ("init_module", 175, (buffer(), 0, b"")),
):
    attempt(name, syscall, number, *arguments)
attempt("/dev/userfaultfd", open, "/dev/userfaultfd")
attempt("/dev/kvm", open, "/dev/kvm")
attempt("/dev/fuse", open, "/dev/fuse")
tell()
