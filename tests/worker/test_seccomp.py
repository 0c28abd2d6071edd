"""The policy on system calls, as the kernel would see its two filters."""

import errno
import platform
import struct

import pytest

from worker.sandbox.inside import _zygote, seccomp

ALLOW, KILL = seccomp.RET_ALLOW, seccomp.RET_KILL
ENOSYS, EPERM, EAFNOSUPPORT = (0x00050000 | number for number in (errno.ENOSYS, errno.EPERM, errno.EAFNOSUPPORT))
STRICTER = {KILL: 0, ENOSYS: 1, EPERM: 1, EAFNOSUPPORT: 1, ALLOW: 2}
OPTIONS = [
    {},
    {"network_namespace": False},
    {"memory_counted": False},
    {"network_namespace": False, "memory_counted": False, "files_apart": False},
]
# What runs under the zygote's filter alone: its own loop, keepers, and children on their way.
OURS = """
    mount unshare setns setgroups setresgid setresuid capset capget seccomp prctl landlock_create_ruleset landlock_add_rule
    landlock_restrict_self chown fchownat chmod fchmodat unlinkat mkdirat openat getdents64 clone wait4 kill poll
    ppoll recvmsg sendmsg signalfd4 setsid chdir dup2 dup3 close_range prlimit64 mmap munmap
""".split()


def answer(program: bytes, number: int, arguments: tuple[int, ...] = (0, 0), architecture: int | None = None) -> int:
    """What a filter of these instructions says to a call."""
    steps = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    words = {0: number, 4: architecture or seccomp.ARCHITECTURES[platform.machine()], 16: arguments[0], 24: arguments[1]}
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


def both(filters: tuple[bytes, bytes], number: int, arguments: tuple[int, ...] = (0, 0)) -> int:
    return min((answer(one, number, arguments) for one in filters), key=STRICTER.__getitem__)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_program_may_what_is_listed_and_nothing_else(options: dict[str, bool]) -> None:
    numbers = _zygote.SYSCALLS
    filters = seccomp.compile_filters(numbers, **options)
    names = {number: name for name, number in numbers.items()}
    allowed = set(seccomp.ALLOWED)
    if not options.get("memory_counted", True):
        allowed.discard("memfd_create")
    if not options.get("files_apart", True):
        allowed -= set(seccomp.CHANGES_OF_FILES)
    for number in range(1200):
        name = names.get(number, "")
        if name in seccomp.CHECKED:
            continue
        refused = name in seccomp.REFUSED or (name in seccomp.CHANGES_OF_FILES and name not in allowed)
        assert both(filters, number) == (ALLOW if name in allowed else EPERM if refused else ENOSYS), (number, name)
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
        ("prlimit64", (7, 0), EPERM),
    ],
)
def test_some_calls_go_by_their_arguments(name: str, arguments: tuple[int, int], wanted: int) -> None:
    assert both(seccomp.compile_filters(_zygote.SYSCALLS), _zygote.SYSCALLS[name], arguments) == wanted


@pytest.mark.parametrize("options", OPTIONS)
def test_the_zygotes_filter_lets_confinement_and_cleaning_work(options: dict[str, bool]) -> None:
    early, _ = seccomp.compile_filters(_zygote.SYSCALLS, **options)
    refused = [name for name in OURS if name in _zygote.SYSCALLS and answer(early, _zygote.SYSCALLS[name]) != ALLOW]
    assert refused == []


def test_calls_of_another_architecture_kill() -> None:
    early, late = seccomp.compile_filters(_zygote.SYSCALLS)
    assert answer(early, 0, architecture=0x40000003) == answer(late, 0, architecture=0x40000003) == KILL
