"""The system calls that a program may make: an allow-list, compiled to a binary search tree in classic BPF.

Calls that are not listed fail with ENOSYS, as on an older kernel, so that libc and CPython fall back (clone3 to clone). Refused
calls fail with EPERM, which Python raises as an exception. Another architecture's calls (int 0x80) kill the program. A linear
filter of this size takes 1.1 ms to install, because the kernel emulates it once per call number to build its bitmap; the tree
takes 0.1 ms.

The policy is two filters; the kernel applies the stricter result. The zygote installs the large one once, and every child
inherits it; it allows the calls that a child's confinement still needs. The last step of that confinement installs the small
one, which refuses them too; only this one costs time per program. Each zygote compiles both once, before it serves.
"""

import errno
import os
import platform
import struct

ALLOWED = """
    read write readv writev pread64 pwrite64 preadv pwritev lseek close close_range dup dup2 dup3 pipe pipe2
    open openat creat stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat
    getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink
    symlinkat chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat futimesat truncate ftruncate
    fallocate fsync fdatasync sync_file_range msync umask getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr mknod
    mknodat flock sendfile copy_file_range
    mmap munmap mremap mprotect brk mbind get_mempolicy set_mempolicy membarrier memfd_create mlock munlock
    fork vfork execve execveat exit exit_group wait4 waitid kill tkill tgkill pidfd_open pidfd_send_signal
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_tgsigqueueinfo rt_sigsuspend
    sigaltstack pause alarm getitimer setitimer restart_syscall signalfd signalfd4
    futex futex_waitv futex_wake futex_wait futex_requeue set_robust_list get_robust_list set_tid_address rseq arch_prctl
    sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min
    sched_rr_get_interval sched_getattr getcpu
    getpid getppid gettid getpgid getpgrp setpgid getsid setsid getuid geteuid getgid getegid getresuid getresgid getgroups
    capget setuid setgid setreuid setregid setresuid setresgid setfsuid setfsgid getrlimit setrlimit getrusage times
    sysinfo uname getpriority ioprio_get
    time gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep timer_create timer_settime timer_gettime
    timer_getoverrun timer_delete timerfd_create timerfd_settime timerfd_gettime
    select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2
    connect bind listen accept accept4 getsockname getpeername sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg shutdown
    setsockopt getsockopt
    getrandom map_shadow_stack mseal
""".split()

REFUSED = """
    ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_getfd
    mount umount2 pivot_root chroot fsopen fsmount fsconfig fspick move_mount open_tree mount_setattr unshare setns
    setgroups capset sethostname setdomainname
    bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register
    keyctl add_key request_key fanotify_init fanotify_mark inotify_init inotify_init1 inotify_add_watch inotify_rm_watch
    name_to_handle_at open_by_handle_at
    shmget shmat shmctl shmdt semget semop semctl semtimedop msgget msgsnd msgrcv msgctl
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
    vmsplice splice tee memfd_secret mlockall munlockall mlock2 personality
    sched_setaffinity sched_setscheduler sched_setattr sched_setparam ioprio_set setpriority
    clock_settime clock_adjtime settimeofday adjtimex kexec_load kexec_file_load init_module finit_module delete_module
    reboot swapon swapoff acct syslog quotactl quotactl_fd iopl ioperm modify_ldt migrate_pages move_pages
    landlock_create_ruleset landlock_add_rule landlock_restrict_self seccomp vhangup nfsservctl lookup_dcookie
    set_mempolicy_home_node statmount listmount lsm_get_self_attr lsm_set_self_attr lsm_list_modules
    setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr sync syncfs
    readahead cachestat mincore
""".split()

# Return success and do nothing: advice on the page cache, which all programs share.
IGNORED = ["fadvise64"]

CHANGES_OF_FILES = "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat".split()
CHANGES_OF_TIMES = "utime utimes utimensat futimesat".split()

# Calls that the zygote, its supervisors (folder.c) and a child during confinement use, and that some tier refuses to programs.
CONFINING = """
    mount unshare setns setgroups capset seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self
    chown fchownat chmod fchmodat madvise
""".split()

# Calls that send a signal. Their targets are numbers, which cannot change while a supervisor looks at them.
SIGNALS = "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo".split()

# The flags of clone that make a namespace (clone does not accept CLONE_NEWTIME).
NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
AF_UNIX = 1
SOCK_STREAM = 1
ANY_FLOW = 0xF & ~4  # the bits of a socket type that SOCK_STREAM (1) and SOCK_SEQPACKET (5) share
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
PR_SET_SECCOMP, PR_SET_MM, PR_SET_MEMORY_MERGE = 22, 35, 67
# Advice with effects beyond the caller's own memory: it moves pages of shared files out of the page cache or into huge pages,
# or merges equal pages of different programs.
MADV_MERGEABLE, MADV_COLD, MADV_PAGEOUT, MADV_COLLAPSE = 12, 20, 21, 25
# HIPRI, DSYNC, SYNC, APPEND. NOWAIT reveals whether a page is in the page cache, DONTCACHE reads a page without caching it.
HARMLESS_RWF = 0x1 | 0x2 | 0x4 | 0x10
F_SETLEASE, F_NOTIFY = 1024, 1026
# Who gets a signal when a descriptor is ready; F_SETSIG chooses which.
F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP = 8, 15, 0x8901, 0x8902

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

RET_KILL, RET_ASK, RET_ALLOW = 0x80000000, 0x7FC00000, 0x7FFF0000
_LOAD, _AND, _JEQ, _JGE, _JSET, _RET = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16

Code = list[tuple[int, int, int, int]]  # code, jump if true, jump if false, constant


def _ret(value: int) -> Code:
    return [(_RET, 0, 0, value)]


def _errno(number: int) -> Code:
    return _ret(0x00050000 | number)


def _load_argument(index: int) -> Code:
    return [(_LOAD, 0, 0, _ARGS_AT + 8 * index)]  # the low word: all checked arguments are ints


def _refuse_if_bits(argument: int, bits: int, by: int = errno.EPERM) -> Code:
    return [*_load_argument(argument), (_JSET, 0, 1, bits), *_errno(by), *_ret(RET_ALLOW)]


def _only_if_equal(argument: int, value: int, otherwise: int) -> Code:
    return [*_load_argument(argument), (_JEQ, 1, 0, value), *_errno(otherwise), *_ret(RET_ALLOW)]


def _refuse_if_one_of(argument: int, *values: int) -> Code:
    last = len(values) - 1
    tests = [(_JEQ, last - index, int(index == last), value) for index, value in enumerate(values)]
    return [*_load_argument(argument), *tests, *_errno(errno.EPERM), *_ret(RET_ALLOW)]


_HARMLESS_FLAGS = _refuse_if_bits(5, 0xFFFFFFFF & ~HARMLESS_RWF, by=errno.EOPNOTSUPP)
CHECKED: dict[str, Code] = {
    "clone": _refuse_if_bits(0, NEW_NAMESPACES),
    "socket": _only_if_equal(0, AF_UNIX, errno.EAFNOSUPPORT),
    "socketpair": _only_if_equal(0, AF_UNIX, errno.EAFNOSUPPORT),
    "ioctl": _refuse_if_one_of(1, TIOCSTI, TIOCLINUX),
    "prctl": _refuse_if_one_of(0, PR_SET_SECCOMP, PR_SET_MM, PR_SET_MEMORY_MERGE),
    "fcntl": _refuse_if_one_of(1, F_SETLEASE, F_NOTIFY),
    "prlimit64": _only_if_equal(0, 0, errno.EPERM),  # its own only: a CPU limit on another process of the same uid kills it
    "madvise": _refuse_if_one_of(2, MADV_MERGEABLE, MADV_COLD, MADV_PAGEOUT, MADV_COLLAPSE),
    "preadv2": _HARMLESS_FLAGS,
    "pwritev2": _HARMLESS_FLAGS,
}

# One of a pair of datagram sockets can send to any socket with a name in the file system; a connected stream cannot.
_PAIRS_OF_STREAMS: Code = [
    *_load_argument(0),
    (_JEQ, 1, 0, AF_UNIX),
    *_errno(errno.EAFNOSUPPORT),
    *_load_argument(1),
    (_AND, 0, 0, ANY_FLOW),
    (_JEQ, 1, 0, SOCK_STREAM),
    *_errno(errno.EPERM),
    *_ret(RET_ALLOW),
]


def _refuse_truncation(argument: int) -> Code:
    """Opening with O_TRUNC and without a right to write: the kernel truncates then too."""
    writes = [(_AND, 0, 0, os.O_ACCMODE), (_JEQ, 2, 0, os.O_WRONLY), (_JEQ, 1, 0, os.O_RDWR), *_errno(errno.EACCES)]
    return [*_load_argument(argument), (_JSET, 0, len(writes), os.O_TRUNC), *writes, *_ret(RET_ALLOW)]


def compile_filters(
    numbers: dict[str, int],
    *,
    network_namespace: bool = True,
    memory_counted: bool = True,
    mount_namespace: bool = True,
    files_apart: bool = True,
    truncation_apart: bool = True,
    signals_apart: bool = True,
) -> tuple[bytes, bytes]:
    """The policy as two BPF programs, the zygote's and the child's. `numbers`: the machine's table of system calls.

    Without a network namespace programs can make no sockets except pairs of streams. Without a control group there is no memfd,
    whose memory no other limit counts. Landlock does not cover permissions, owners and times of files. Without a mount
    namespace a program cannot change times: every user may set those of /dev/null. If neither a mount namespace nor a uid
    separates its files from the user's (`files_apart`), it cannot change permissions and owners either.
    Where Landlock does not cover truncation (before ABI 3), only files that were opened for writing can be truncated. Where
    nothing separates its signals (`signals_apart`), none can be sent through a descriptor; see `compile_signal_filter`.
    """
    rules = _rules(numbers)
    if not network_namespace:
        rules[numbers["socket"]] = _errno(errno.EAFNOSUPPORT)
        rules[numbers["socketpair"]] = _PAIRS_OF_STREAMS
    if not memory_counted:
        rules[numbers["memfd_create"]] = _errno(errno.ENOSYS)
    refused = ([] if mount_namespace else CHANGES_OF_TIMES) + ([] if files_apart else CHANGES_OF_FILES)
    rules |= {numbers[name]: _errno(errno.EPERM) for name in refused if name in numbers}
    if not truncation_apart:
        opens = {"open": _refuse_truncation(1), "openat": _refuse_truncation(2), "truncate": _errno(errno.EACCES)}
        rules |= {numbers[name]: code for name, code in opens.items() if name in numbers}
    if not signals_apart:
        rules[numbers["fcntl"]] = _refuse_if_one_of(1, F_SETLEASE, F_NOTIFY, F_SETOWN, F_SETOWN_EX)
        rules[numbers["ioctl"]] = _refuse_if_one_of(1, TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP)
    confining = {numbers[name] for name in CONFINING if name in numbers}
    early = rules | {number: _ret(RET_ALLOW) for number in confining}
    late = {number: rules[number] for number in confining}
    return _compile(early, otherwise=_errno(errno.ENOSYS)), _compile(late, otherwise=_ret(RET_ALLOW))


def compile_signal_filter(numbers: dict[str, int]) -> bytes:
    """For a child where nothing separates its signals: asks the supervisor about each (native/signals.c)."""
    rules = {numbers["pidfd_send_signal"]: _errno(errno.EPERM)} | {numbers[name]: _ret(RET_ASK) for name in SIGNALS}
    return _compile(rules, otherwise=_ret(RET_ALLOW))


def _compile(rules: dict[int, Code], otherwise: Code) -> bytes:
    program = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_JEQ, 1, 0, ARCHITECTURES[platform.machine()]),
        *_ret(RET_KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        *_tree(_leaves(rules, otherwise)),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _rules(numbers: dict[str, int]) -> dict[int, Code]:
    rules = {numbers[name]: _errno(errno.EPERM) for name in REFUSED if name in numbers}
    rules |= {numbers[name]: _ret(RET_ALLOW) for name in ALLOWED if name in numbers}
    rules |= {numbers[name]: _errno(0) for name in IGNORED}
    return rules | {numbers[name]: code for name, code in CHECKED.items()}


def _leaves(rules: dict[int, Code], otherwise: Code) -> list[tuple[int, Code]]:
    """Ranges of call numbers as (first number, code); neighbours with the same code are joined."""
    leaves = [(0, rules.get(0, otherwise))]
    for number in range(1, max(rules) + 2):  # the last range includes the x32 numbers
        code = rules.get(number, otherwise)
        if code != leaves[-1][1]:
            leaves.append((number, code))
    return leaves


def _tree(leaves: list[tuple[int, Code]]) -> Code:
    if len(leaves) == 1:
        return leaves[0][1]
    middle = len(leaves) // 2
    below, above = _tree(leaves[:middle]), _tree(leaves[middle:])
    return [(_JGE, len(below), 0, leaves[middle][0]), *below, *above]
