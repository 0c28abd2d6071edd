"""What one program does leaves no trace that another one, of the same time or a later one, could read."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandbox_harness import Lab, laboratory, need_sandbox

from worker.selftest import ATTACKS, self_test

# Modules of the standard library that programs can read and that this process does not import.
SHARED = sorted(Path(os.__file__).parent.glob("encodings/mac_*.py"))
OPEN_SHARED = 'import os\nfd = os.open(os.path.dirname(os.__file__) + "/encodings/mac_roman.py", os.O_RDONLY)\n'
DROP_SHARED = """
import os, pathlib
for file in pathlib.Path(os.__file__).parent.glob("encodings/mac_*.py"):
    print(os.posix_fadvise(os.open(file, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED))
"""
MASKS = {"own_uid": [], "root_of_the_jail": ["uid"], "no_jail": ["userns"]}


def is_cached(file: Path) -> bool:
    """Is its first page in the page cache?"""
    fd = os.open(file, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


async def test_a_program_does_not_move_shared_files_in_and_out_of_the_page_cache(lab: Lab) -> None:
    for file in SHARED:
        file.read_bytes()
    try:
        assert is_cached(SHARED[0])
    except OSError as error:
        pytest.skip(f"the file system of the standard library cannot say what is cached: {error}")
    assert await lab.output(DROP_SHARED) == "None\n" * len(SHARED)
    assert [file.name for file in SHARED if not is_cached(file)] == []


ASK_THE_CACHE = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def told(got):
    return "done" if got >= 0 else errno.errorcode[ctypes.get_errno()]
libc.mmap.restype = ctypes.c_void_p
shown = ctypes.c_void_p(libc.mmap(None, ctypes.c_size_t(4096), 1, 1, fd, ctypes.c_long(0)))
vector = ctypes.create_string_buffer(64)
try:
    os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    print("RWF_NOWAIT done")
except OSError as error:
    print("RWF_NOWAIT", errno.errorcode[error.errno])
print("mincore", told(libc.mincore(shown, ctypes.c_size_t(4096), vector)))
print("readahead", told(libc.readahead(fd, ctypes.c_long(0), ctypes.c_size_t(4096))))
print("cachestat", told(libc.syscall(451, fd, vector, vector, 0)))
for name, advice in ("cold", 20), ("pageout", 21), ("collapse", 25), ("mergeable", 12), ("dontneed", 4):
    print(name, told(libc.madvise(shown, ctypes.c_size_t(4096), advice)))
print("RESOLVE_CACHED", told(libc.syscall(437, -100, b"/usr", (ctypes.c_uint64 * 3)(0, 0, 0x20), ctypes.c_size_t(24))))
"""
ANSWERS = """RWF_NOWAIT ENOTSUP
mincore EPERM
readahead EPERM
cachestat EPERM|ENOSYS
cold EPERM
pageout EPERM
collapse EPERM
mergeable EPERM
dontneed done
RESOLVE_CACHED ENOSYS
"""


@pytest.mark.parametrize("mask", MASKS)
async def test_no_system_call_says_what_is_cached(mask: str) -> None:
    async with laboratory(slots=1, mask_layers=MASKS[mask], min_tier="D") as lab:
        told = await lab.output(OPEN_SHARED + ASK_THE_CACHE)
    for line, wanted in zip(told.splitlines(), ANSWERS.splitlines(), strict=True):
        assert line.split()[0] == wanted.split()[0]
        assert line.split()[1] in wanted.split()[1].split("|")


def times_of_devices() -> list[int]:
    return [Path(name).stat().st_mtime_ns for name in ("/dev/null", "/dev/zero", "/dev/urandom")]


@pytest.mark.parametrize("mask", MASKS)
async def test_times_of_device_nodes_are_not_for_programs(mask: str) -> None:
    before = times_of_devices()
    code = """
    import os
    for name in "/dev/null", "/dev/zero", "/dev/urandom":
        try:
            print(os.utime(name))
        except OSError:
            print("refused")
    print(open("/dev/null", "w").write("x"), len(open("/dev/zero", "rb").read(3)))
    """
    async with laboratory(slots=1, mask_layers=MASKS[mask], min_tier="D") as lab:
        assert await lab.output(code) == "refused\nrefused\nrefused\n1 3\n"
    assert times_of_devices() == before


TAKE_A_NAME = r"""
import os, socket, time
one = socket.socket(socket.AF_UNIX)
one.bind("\0meet")
while time.time() < float(os.environ["UNTIL"]): time.sleep(0.01)
print([line.split()[-1] for line in open("/proc/self/net/unix").read().splitlines()[1:]])
"""


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "no_jail"])
async def test_programs_of_the_same_time_do_not_share_names_of_sockets(mask: str) -> None:
    async with laboratory(slots=4, mask_layers=MASKS[mask], min_tier="C") as lab:
        until = {"UNTIL": str(time.time() + 2)}
        told = await asyncio.gather(*(lab.output(TAKE_A_NAME, env=until, wall_s=30) for _ in range(4)))
    assert set(told) == {"['@meet']\n"}


async def test_a_network_namespace_is_used_again_and_empty(own_lab: Lab) -> None:
    """By one program after the other: a new one for each would cost more than the program."""
    look = "import os; print(os.readlink('/proc/self/ns/net'), len(open('/proc/self/net/unix').readlines()))"
    seen = {await own_lab.output(look) for _ in range(8)}
    assert len(seen) <= 2  # one program may end while the next one starts
    assert {line.split()[1] for line in seen} == {"1"}


IN_FLIGHT = r"""
import array, os, socket
one, other = socket.socketpair()
named = socket.socket(socket.AF_UNIX)
named.bind("\0outlives")
named.listen()
fds = array.array("i", [one.fileno(), other.fileno(), named.fileno()])
other.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
print(os.readlink("/proc/self/ns/net"))
"""


async def test_a_network_namespace_in_which_sockets_outlive_their_program_is_not_used_again(own_lab: Lab) -> None:
    """Sockets in flight to themselves live until the kernel looks for such circles."""
    look = "import os; print(os.readlink('/proc/self/ns/net')); print(open('/proc/self/net/unix').read().count('outlives'))"
    for _ in range(4):
        left = await own_lab.output(IN_FLIGHT)
        seen = (await own_lab.output(look)).splitlines()
        assert seen[1] == "0" and seen[0] != left.strip()


def test_the_self_test_tells_programs_that_meet() -> None:
    """Where nothing confines them, its programs say so."""
    need_sandbox()
    for name in ("bounding set", "names of sockets 1"):
        run = subprocess.run([sys.executable, "-c", ATTACKS[name].code], capture_output=True, text=True, timeout=60)
        assert run.stdout.startswith("escaped"), (name, run)


async def test_the_self_test_finds_no_channel_here(own_lab: Lab) -> None:
    assert await self_test(own_lab.pool) == []
