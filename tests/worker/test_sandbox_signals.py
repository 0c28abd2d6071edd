"""Signals of programs without a PID namespace, without a uid of their own and with a Landlock that does not know signals.

The programs have root's uid here. They send others only signals that are ignored: one that gets through harms nobody.
"""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sandbox_harness import NAME_ITSELF, Lab, has_come_this_far, laboratory, tree_of

pytestmark = pytest.mark.vm
OLDER_KERNEL = ["userns", "landlock=2"]


@pytest.fixture(scope="module")
async def shared_uid() -> AsyncIterator[Lab]:
    async with laboratory(mask_layers=[*OLDER_KERNEL, "uid"], min_tier="D") as lab:
        yield lab


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the uid of the programs, in a group of its own."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


OWN = """
import multiprocessing, os, signal, subprocess, threading, time
def ended(process): return process.wait(20)
process = subprocess.Popen(["sleep", "60"]); process.terminate(); print("terminate", ended(process))
process = subprocess.Popen(["sh", "-c", "sleep 60; true"], start_new_session=True)
os.killpg(process.pid, signal.SIGKILL); print("group", ended(process))
worker = multiprocessing.Process(target=time.sleep, args=(60,)); worker.start(); worker.kill(); worker.join(20)
print("worker", worker.exitcode)
got = []
signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
os.kill(os.getpid(), signal.SIGUSR1); signal.raise_signal(signal.SIGUSR1)
signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1); os.kill(0, signal.SIGUSR1)
os.killpg(os.getpgrp(), signal.SIGUSR1)
while len(got) < 5: time.sleep(0.01)
print("own", len(got))
read, write = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid(); os.write(write, str(os.getpid()).encode()); time.sleep(60)
    os._exit(0)
os.wait()
orphan = int(os.read(read, 100))
os.kill(orphan, signal.SIGKILL)
while True:
    try: os.kill(orphan, 0); time.sleep(0.01)
    except ProcessLookupError: break
print("orphan")
signal.signal(signal.SIGURG, lambda *_: os._exit(7))  # who does not mind it ignores it: none of the machine is harmed
child = os.fork()
if child == 0:
    os.write(write, b"x"); time.sleep(60)  # Python forgets signals that come during a fork
os.read(read, 1)
signal.signal(signal.SIGURG, signal.SIG_DFL); os.kill(-1, signal.SIGURG); print("all", os.wait()[1] >> 8)
child = subprocess.Popen(["true"]); ended(child)
for pid, number in (os.getpid(), 65), (child.pid, 65), (child.pid, 15):
    try: os.kill(pid, number)
    except OSError as error: print(type(error).__name__)
"""


async def test_program_signals_itself_and_what_it_started(shared_uid: Lab) -> None:
    assert (await shared_uid.output(OWN, wall_s=60)).split("\n") == [
        "terminate -15", "group -9", "worker -9", "own 5", "orphan", "all 7", "OSError", "OSError", "ProcessLookupError", ""
    ]  # fmt: skip


OTHERS = """
import ctypes, fcntl, os, signal, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    if libc.syscall(*arguments) < 0: raise OSError(ctypes.get_errno(), "refused")
NUMBERS = {"x86_64": (62, 200, 234, 129, 297), "aarch64": (129, 130, 131, 138, 240)}
kill, tkill, tgkill, queue, thread_queue = NUMBERS[os.uname().machine]
URG = signal.SIGURG  # ignored: if it is not contained, nobody is harmed
info = struct.pack("iiii", URG, 0, -1, 0) + bytes(112)
ours, _ = socket.socketpair()
for target in TARGETS:
    ways = [lambda: os.kill(target, URG), lambda: os.kill(target, 0), lambda: os.killpg(target, URG),
        lambda: call(kill, ctypes.c_long(target | 1 << 32), URG), lambda: call(tkill, target, URG),
        lambda: call(tgkill, target, target, URG), lambda: call(queue, target, URG, info),
        lambda: call(thread_queue, target, target, URG, info), lambda: signal.pidfd_send_signal(os.pidfd_open(target), URG),
        lambda: fcntl.fcntl(ours, fcntl.F_SETOWN, target), lambda: fcntl.fcntl(ours, 15, struct.pack("ii", 1, target)),
        lambda: fcntl.ioctl(ours, 0x8901, struct.pack("i", target)),
        lambda: fcntl.ioctl(ours, 0x8902, struct.pack("i", target))]
    for number, way in enumerate(ways):
        try: way()
        except OSError: pass
        else: print("escaped", target, number)
try: os.kill(-1, URG)
except OSError: pass
else: print("escaped: all")
print("contained")
"""


async def test_program_signals_no_other_process_of_its_uid(shared_uid: Lab, bystander: subprocess.Popen[bytes]) -> None:
    targets = [bystander.pid, os.getpid(), shared_uid.runner_pid, *tree_of(shared_uid.runner_pid)]
    assert await shared_uid.output(OTHERS.replace("TARGETS", str(targets))) == "contained\n"


TRY_ALL = """
import os
found = []
for pid in range(1, 50_000):
    try: os.kill(pid, 0)
    except OSError: pass
    else: found.append(pid)
print(found == [os.getpid()])
"""


async def test_program_reaches_no_program_that_runs_beside_it(shared_uid: Lab) -> None:
    beside = asyncio.create_task(shared_uid.run(f"{NAME_ITSELF}\nimport time\ntime.sleep(60)", wall_s=60))
    while not has_come_this_far(tree_of(shared_uid.runner_pid)):  # noqa: ASYNC110 - it happens in another process
        await asyncio.sleep(0.02)
    assert await shared_uid.output(TRY_ALL, wall_s=60, cpu_s=60) == "True\n"
    beside.cancel()
    await asyncio.gather(beside, return_exceptions=True)


async def test_timeout_kills_a_program_that_waits_for_its_supervisor(shared_uid: Lab) -> None:
    code = "import os\nwhile True:\n    os.fork()\n    try: os.kill(-1, 0)\n    except OSError: pass"
    result = await shared_uid.run(code, wall_s=1, processes=16)
    assert result.status in ("timeout", "error"), result
    assert (await shared_uid.run("print(1)")).stdout == "1\n"


TRUNCATE = """
import os
for way in (lambda: os.truncate(PATH, 0), lambda: os.open(PATH, os.O_RDONLY | os.O_TRUNC),
            lambda: os.open(PATH, 3 | os.O_TRUNC),
            lambda: os.open(PATH, os.O_WRONLY | os.O_TRUNC), lambda: os.open(PATH, os.O_RDWR | os.O_TRUNC)):
    try: way()
    except OSError: pass
    else: print("escaped")
with open("own", "w") as own: own.write("long"); own.flush(); own.truncate(1)
with open("own", "w") as own: pass
print(os.path.getsize("own"))
"""


async def test_file_of_the_host_is_not_truncated_where_landlock_does_not_cover_that(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    for path in (file, tmp_path, *tmp_path.parents[:-1]):
        path.chmod(path.stat().st_mode | (0o666 if path == file else 0o555))
    async with laboratory(slots=1, mask_layers=OLDER_KERNEL, min_tier="D") as lab:
        assert await lab.output(TRUNCATE.replace("PATH", repr(str(file)))) == "0\n"
    assert file.read_text() == "kept"
