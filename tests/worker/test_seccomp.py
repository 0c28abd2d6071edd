"""The policy on system calls, as the kernel would see its two filters."""

import errno
import platform
import struct

import pytest

from worker.sandbox.inside import _zygote, seccomp

pytestmark = pytest.mark.vm
ALLOW, ASK, KILL = seccomp.RET_ALLOW, seccomp.RET_ASK, seccomp.RET_KILL
ENOSYS, EPERM, EACCES, EAFNOSUPPORT, EOPNOTSUPP, NOTHING = (
    0x00050000 | number for number in (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EAFNOSUPPORT, errno.EOPNOTSUPP, 0)
)
STRICTER = {KILL: 0, ENOSYS: 1, EPERM: 1, EACCES: 1, EAFNOSUPPORT: 1, EOPNOTSUPP: 1, NOTHING: 1, ALLOW: 2}
OPTIONS = [
    {},
    {"network_namespace": False},
    {"memory_counted": False},
    {"network_namespace": False, "mount_namespace": False},
    {"network_namespace": False, "memory_counted": False, "mount_namespace": False, "files_apart": False},
    {
        "network_namespace": False,
        "mount_namespace": False,
        "files_apart": False,
        "truncation_apart": False,
        "signals_apart": False,
    },
]
# Calls under the zygote's filter alone: of its loop, of supervisors, and of children during set-up.
OURS = """
    mount unshare setns setgroups setresgid setresuid capset capget seccomp prctl landlock_create_ruleset landlock_add_rule
    landlock_restrict_self chown fchownat chmod fchmodat unlinkat mkdirat openat getdents64 clone wait4 kill poll
    ppoll recvmsg sendmsg pidfd_open pidfd_send_signal signalfd4 setsid chdir dup2 dup3 close_range prlimit64 mmap munmap
    madvise
""".split()


def answer(program: bytes, number: int, arguments: tuple[int, ...] = (), architecture: int | None = None) -> int:
    """What a filter of these instructions says to a call."""
    steps = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    words = {0: number, 4: architecture or seccomp.ARCHITECTURES[platform.machine()]}
    words |= {16 + 8 * index: argument for index, argument in enumerate((*arguments, 0, 0, 0, 0, 0, 0)[:6])}
    at = value = 0
    while True:
        code, yes, no, constant = steps[at]
        at += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            value = words[constant]
        elif code == 0x54:
            value &= constant
        else:
            holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
            at += yes if holds else no


def both(filters: tuple[bytes, bytes], number: int, arguments: tuple[int, ...] = ()) -> int:
    return min((answer(one, number, arguments) for one in filters), key=STRICTER.__getitem__)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_program_may_what_is_listed_and_nothing_else(options: dict[str, bool]) -> None:
    numbers = _zygote.SYSCALLS
    filters = seccomp.compile_filters(numbers, **options)
    names = {number: name for name, number in numbers.items()}
    allowed = set(seccomp.ALLOWED)
    if not options.get("memory_counted", True):
        allowed.discard("memfd_create")
    changes: set[str] = set()
    if not options.get("mount_namespace", True):
        changes |= set(seccomp.CHANGES_OF_TIMES)
    if not options.get("files_apart", True):
        changes |= set(seccomp.CHANGES_OF_FILES)
    by_arguments = {*seccomp.CHECKED}
    if not options.get("truncation_apart", True):
        by_arguments |= {"open", "openat", "truncate"}
    for number in range(1200):
        name = names.get(number, "")
        if name in by_arguments:
            continue
        wanted = NOTHING if name in seccomp.IGNORED else ALLOW if name in allowed - changes else ENOSYS
        refused = name in seccomp.REFUSED or name in changes
        assert both(filters, number) == (EPERM if refused else wanted), (number, name)
    assert both(filters, 0x40000000 | numbers["read"]) == ENOSYS  # x32


@pytest.mark.parametrize(
    ("name", "arguments", "wanted"),
    [
        ("clone", (0x01200011, 0), ALLOW),
        ("clone", (0x10000000, 0), EPERM),
        ("socket", (1, 1), ALLOW),
        ("socket", (2, 1), EAFNOSUPPORT),
        ("prctl", (15, 0), ALLOW),
        ("prctl", (22, 0), EPERM),
        ("ioctl", (0, 0x5412), EPERM),
        ("prctl", (67, 1), EPERM),
        ("prlimit64", (7, 0), EPERM),
        ("madvise", (0, 0, 4), ALLOW),
        ("madvise", (0, 0, 12), EPERM),
        ("madvise", (0, 0, 20), EPERM),
        ("madvise", (0, 0, 21), EPERM),
        ("madvise", (0, 0, 25), EPERM),
        ("preadv2", (0, 0, 0, 0, 0, 0), ALLOW),
        ("preadv2", (0, 0, 0, 0, 0, 0x8), EOPNOTSUPP),
        ("preadv2", (0, 0, 0, 0, 0, 0x80), EOPNOTSUPP),
        ("pwritev2", (0, 0, 0, 0, 0, 0x2 | 0x10), ALLOW),
        ("pwritev2", (0, 0, 0, 0, 0, 0x8), EOPNOTSUPP),
        ("fadvise64", (0, 0, 0, 4), NOTHING),
    ],
)
def test_some_calls_go_by_their_arguments(name: str, arguments: tuple[int, ...], wanted: int) -> None:
    assert both(seccomp.compile_filters(_zygote.SYSCALLS), _zygote.SYSCALLS[name], arguments) == wanted


O_TRUNC, O_WRONLY, O_RDWR, O_CREAT = 0o1000, 1, 2, 0o100


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (0, ALLOW),
        (3, ALLOW),
        (O_WRONLY | O_CREAT | O_TRUNC, ALLOW),
        (O_RDWR | O_TRUNC, ALLOW),
        (O_TRUNC, EACCES),
        (3 | O_TRUNC, EACCES),
    ],
)
def test_only_an_open_for_writing_truncates_where_landlock_does_not_look(flags: int, wanted: int) -> None:
    filters = seccomp.compile_filters(_zygote.SYSCALLS, truncation_apart=False)
    assert both(filters, _zygote.SYSCALLS["openat"], (0, 0, flags)) == wanted
    assert both(filters, _zygote.SYSCALLS["truncate"]) == EACCES


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fcntl", (0, 8)),
        ("fcntl", (0, 15)),
        ("fcntl", (0, 1024)),
        ("ioctl", (0, 0x8901)),
        ("ioctl", (0, 0x8902)),
        ("ioctl", (0, 0x5412)),
    ],
)
def test_descriptors_get_no_owner_where_nothing_separates_signals(name: str, arguments: tuple[int, ...]) -> None:
    filters = seccomp.compile_filters(_zygote.SYSCALLS, signals_apart=False)
    assert both(filters, _zygote.SYSCALLS[name], arguments) == EPERM
    assert both(filters, _zygote.SYSCALLS[name], (0, 1)) == ALLOW


def test_every_call_that_sends_a_signal_is_asked_about_or_refused() -> None:
    asks = seccomp.compile_signal_filter(_zygote.SYSCALLS)
    answers = {name: answer(asks, number) for name, number in _zygote.SYSCALLS.items()}
    asked = {name for name, found in answers.items() if found == ASK}
    assert asked == {"kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"}
    assert {name for name, found in answers.items() if found not in (ASK, ALLOW)} == {"pidfd_send_signal"}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_zygotes_filter_lets_confinement_and_cleaning_work(options: dict[str, bool]) -> None:
    early, _ = seccomp.compile_filters(_zygote.SYSCALLS, **options)
    refused = [name for name in OURS if name in _zygote.SYSCALLS and answer(early, _zygote.SYSCALLS[name]) != ALLOW]
    assert refused == []


def test_calls_of_another_architecture_kill() -> None:
    early, late = seccomp.compile_filters(_zygote.SYSCALLS)
    assert answer(early, 0, architecture=0x40000003) == answer(late, 0, architecture=0x40000003) == KILL
