"""The start-up self-test: runs hostile programs in the real sandbox before any other call.

Each program tries an attack and prints `contained` if that failed. An attack runs if the layer that stops it is on.
"""

import asyncio
import platform
from typing import NamedTuple

from exec_wire import Call, Limits
from worker.pool import Pool

PATIENCE_S = 60.0
TRIES = 3  # if the machine is too busy to start a program in time


class Attack(NamedTuple):
    code: str
    ends: tuple[str, ...] = ("ok",)  # accepted statuses
    needs: str = ""  # the layers of which each stops the attack; if none is there, it is not tried
    limits: Limits = Limits(wall_s=5.0, memory_mb=64, processes=16)


_TRY = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
escaped = []
def attempt(what, f, *arguments):
    try:
        if f(*arguments) is not False:
            escaped.append(what)
    except OSError:
        pass
"""
_TELL = "\nprint('escaped: ' + ', '.join(map(str, escaped)) if escaped else 'contained')\n"
# Run twice at the same time: each program must be able to use the name, and see no other.
_NAMES = rf"""{_TRY}
import time
own = socket.socket(socket.AF_UNIX)
try: own.bind("\0self-test")
except OSError: escaped.append("a name is taken")
time.sleep(0.1)
attempt("names", lambda: len(open("/proc/self/net/unix").readlines()) != 2){_TELL}"""
_INT_80 = r"""
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # getpid by the 32-bit entry
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print("escaped: int 0x80")
"""

ATTACKS: dict[str, Attack] = {
    "endless loop": Attack("while True: pass", ("timeout",), limits=Limits(wall_s=0.3)),
    "fork bomb": Attack(
        "import os\nwhile True: os.fork()", ("error", "timeout"), limits=Limits(wall_s=0.5, processes=16, memory_mb=64)
    ),
    "daemon that stays": Attack(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n    os._exit(0)\n"
        "print('contained')"
    ),
    "memory bomb": Attack("x = b'x' * (1 << 30)\nprint('escaped')", ("memory_limit", "error")),
    "sockets of any family": Attack(
        f"{_TRY}for family in 2, 10, 16, 17, 38, 40: attempt(family, socket.socket, family, socket.SOCK_RAW){_TELL}",
        needs="seccomp",
    ),
    "writing outside": Attack(
        f"{_TRY}for place in '/usr', '/etc', '/opt', '/var/tmp', '/dev', '/': attempt(place, open, place + '/x', 'w'){_TELL}",
        needs="landlock mntns",
    ),
    "reading secrets": Attack(
        f"{_TRY}for file in '/etc/shadow', '/etc/passwd', '/proc/1/environ', '/home', '/run/secrets': "
        f"attempt(file, lambda: os.listdir(file) if os.path.isdir(file) else open(file).read()){_TELL}",
        needs="landlock mntns",
    ),
    "other processes": Attack(
        f"{_TRY}attempt('list', lambda: any(p.isdigit() and p not in '12' for p in os.listdir('/proc')))"
        f"\nattempt('kill', lambda: os.getppid() != 0 and os.kill(os.getppid(), 0)){_TELL}",
        needs="landlock pidns",
    ),
    "inherited descriptors": Attack(f"{_TRY}for fd in range(3, 300): attempt(fd, os.fstat, fd){_TELL}"),
    "ptrace": Attack(f"{_TRY}attempt('ptrace', lambda: libc.ptrace(0, 0, 0, 0) == 0){_TELL}", needs="seccomp"),
    "new user namespace": Attack(f"{_TRY}attempt('unshare', lambda: libc.unshare(0x10000000) == 0){_TELL}", needs="seccomp"),
    "capabilities": Attack(
        f"{_TRY}header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\n"
        f"attempt('capget', lambda: libc.capget(header, data) != 0 or any(data)){_TELL}"
    ),
    "bounding set": Attack(
        f"{_TRY}for number in range(64): attempt(number, lambda: libc.prctl(23, number, 0, 0, 0) > 0){_TELL}", needs="userns"
    ),
    "page cache": Attack(
        f"{_TRY}file = os.open(os.__file__, 0)\nattempt('look', os.preadv, file, [bytearray(1)], 0, os.RWF_NOWAIT)"
        f"\nattempt('readahead', lambda: libc.readahead(file, ctypes.c_long(0), ctypes.c_size_t(1)) == 0)"
        f"\nattempt('times of a device', os.utime, '/dev/null'){_TELL}",
        needs="seccomp",
    ),
    **{f"names of sockets {number}": Attack(_NAMES, needs="netns") for number in (1, 2)},
    "a file left behind": Attack("open('leftover', 'w').write('x')\nprint('contained')"),
}
# Run afterwards, in every slot.
LEFTOVERS = Attack("import os\nprint(*os.listdir('.') or ['contained'])")
if platform.machine() == "x86_64":
    ATTACKS["32-bit system call"] = Attack(_INT_80, ("signal",), needs="seccomp")


async def self_test(pool: Pool) -> list[str]:
    """Describes each attack that was not contained. Uses all slots of the pool, which must be idle."""
    slots = asyncio.Queue[int]()
    for slot in [pool.take_slot() for _ in range(pool.free_slots)]:
        slots.put_nowait(slot)
    try:
        layers = set(pool.sandbox.layers)
        wanted = [(name, attack) for name, attack in ATTACKS.items() if not attack.needs or layers & set(attack.needs.split())]
        problems = await asyncio.gather(*(_attack(pool, slots, name, attack) for name, attack in wanted))
        problems += await asyncio.gather(*(_attack(pool, slots, "leftovers", LEFTOVERS) for _ in range(pool.slots)))
        return [problem for problem in problems if problem]
    finally:
        while not slots.empty():
            pool.give_back(slots.get_nowait())


async def _attack(pool: Pool, slots: asyncio.Queue[int], name: str, attack: Attack) -> str:
    slot = await slots.get()
    try:
        for _ in range(TRIES):
            result = await pool.run(Call(code=attack.code, limits=attack.limits), slot, PATIENCE_S)
            if (result.status, result.blame) != ("timeout", "infra"):
                break
    except Exception as error:
        return f"{name}: {type(error).__name__} {error}"
    finally:
        slots.put_nowait(slot)
    if result.status == "timeout" and result.blame == "infra" and "timeout" not in attack.ends:
        return f"{name}: this machine is too busy for the self-test"
    is_contained = result.status != "ok" or result.stdout.strip() == "contained"
    if result.status in attack.ends and is_contained:
        return ""
    return f"{name}: {result.status} {result.error or result.stdout.strip()[:200] or result.stderr.strip()[-200:]}"
