"""A worker that was taken over speaks to its runner, which is root. It gets what the runner's command line allows, or nothing.

The uids that these tests attack have no process but our own: with a runner that believes its worker, anything there dies.
"""

import asyncio
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from common import PATIENCE_S, until, wait_until
from sandbox_harness import (
    OWN_UIDS,
    bystander,
    cgroups_of,
    is_alive,
    laboratory,
    need_sandbox,
    open_fds,
    scripted_runner,
    tree_of,
)

from worker.config import WorkerConfig, default_packages
from worker.pool import Pool
from worker.sandbox import protocol, uids
from worker.sandbox.runner_client import SandboxUnavailable
from worker.sandbox.tiers import ALL_LAYERS

ROOT = Path(__file__).parents[2]
FOREIGN_UID = 123_456
OWN_BASE = 2_141_000_000 + os.getpid() % 10 * uids.BLOCKS * uids.BLOCK_SIZE  # of blocks that only these tests take
MODEST = {"slots": 1, "sessions": 1, "profiles": {"bare": []}, "min_tier": "D"}


@contextlib.contextmanager
def listening(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    need_sandbox()
    path = folder / "runner.sock"
    command = [sys.executable, "-m", "exec_service", "runner", "--socket", str(path), "--packages", default_packages()]
    process = subprocess.Popen([*command, *arguments], cwd=ROOT)
    try:
        wait_until(lambda: path.exists() or process.poll() is not None, "the runner listens")
        yield process, path
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """As it is started without any options."""
    with listening(tmp_path_factory.mktemp("runner")) as started:
        yield started


def connect(path: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wait_until(lambda: link.connect_ex(str(path)) == 0, "it listens")  # it may still clean up after another worker
    link.settimeout(PATIENCE_S)
    return link


def answers(link: socket.socket) -> Iterator[dict[str, Any]]:
    """All that comes until the runner closes the connection."""
    while received := protocol.receive_message(link):
        message, fds = received
        for fd in fds:
            os.close(fd)
        yield message


def refused(path: Path, *messages: bytes) -> str:
    """Why the runner ended the connection."""
    with connect(path) as link:
        for message in messages:
            link.send(message)
        said = list(answers(link))
    assert [next(iter(message)) for message in said] == ["failed"], said
    return str(said[0]["failed"])


def configure(**wishes: Any) -> bytes:
    return json.dumps({"configure": MODEST | wishes}).encode()


def dashed(name: str) -> str:
    return name.replace(" ", "-")


def traces(bases: range) -> set[str]:
    """What runners left of blocks that begin there; other runners of this machine have other blocks."""
    names = {entry.name for entry in uids.STATE_FOLDER.iterdir()} if uids.STATE_FOLDER.is_dir() else set()
    return {name for name in names if int("".join(filter(str.isdigit, name)) or 0) in bases}


# -- the attacks ------------------------------------------------------------------------------------------------------------


def test_worker_cannot_have_processes_of_a_foreign_uid_killed(runner: tuple[subprocess.Popen[bytes], Path]) -> None:
    before = traces(range(1_000_000))
    with bystander(FOREIGN_UID) as process:
        attack = {"slots": 1, "uid_base": FOREIGN_UID - 5, "mask_layers": [], "faults": False, "profiles": {}}
        with connect(runner[1]) as link:
            link.send(json.dumps({"configure": attack}).encode())
            said = next(answers(link))
        assert process.poll() is None
        assert "uid_base" in said["failed"]
    assert traces(range(1_000_000)) == before


def test_worker_cannot_take_layers_away_from_the_sandbox(runner: tuple[subprocess.Popen[bytes], Path]) -> None:
    """With every layer masked, programs would run as root of the machine."""
    attack = {"slots": 1, "mask_layers": ALL_LAYERS, "uid_base": 200_000, "faults": True, "profiles": {"bare": []}}
    with connect(runner[1]) as link:
        link.send(json.dumps({"configure": attack}).encode())
        assert "mask_layers" in next(answers(link))["failed"]


def test_uid_base_of_the_command_line_spares_processes_that_are_not_a_sandboxs(tmp_path: Path) -> None:
    base = 3 * 1024 * 1024
    with bystander(base + 7) as process, listening(tmp_path, "--uid-base", str(base)) as (_, path), connect(path) as link:
        link.send(configure())
        said = [next(answers(link)) for _ in range(2)]
        assert [list(message) for message in said] == [["ready"], ["zygote"]]
        assert process.poll() is None
        assert not (uids.STATE_FOLDER / f"uids-{base}.lock").exists()
        assert (uids.STATE_FOLDER / f"uids-{base + uids.BLOCK_SIZE}.lock").exists()


@pytest.mark.parametrize("base", ["0", "1000", "99999", "-5", "4294967295", "1e9", "abc"])
def test_uid_base_that_could_be_somebodys_is_refused_on_the_command_line(tmp_path: Path, base: str) -> None:
    command = [sys.executable, "-m", "exec_service", "runner", "--socket", str(tmp_path / "s"), f"--uid-base={base}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, "--uid-base" in ended.stderr, "unrecognized" in ended.stderr) == (2, True, False)


async def test_worker_that_joins_a_runner_cannot_switch_test_hooks_on(runner: tuple[subprocess.Popen[bytes], Path]) -> None:
    hooks: dict[str, Any] = {"mask_layers": ["cgroup"], "fault_injection": True}
    async with laboratory(slots=1, runner_socket=str(runner[1]), **hooks) as lab:
        assert "masked by configuration" not in lab.pool.missing.values()
        assert (await lab.run("print(1)", fail_step="seccomp")).status == "ok"


@pytest.mark.parametrize(("own", "workers"), [("A", "D"), ("D", "A")])
async def test_the_stricter_of_two_minimum_tiers_holds_and_no_zygote_starts(tmp_path: Path, own: str, workers: str) -> None:
    with listening(tmp_path, "--min-tier", own, "--mask-layers", "cgroup") as (process, path):
        with pytest.raises(SandboxUnavailable, match="tier A is required and this is tier B") as refusal:
            async with laboratory(runner_socket=str(path), min_tier=workers):
                pass
        assert refusal.value.missing["cgroup"] == "masked by configuration"
        await until(lambda: tree_of(process.pid) == [process.pid], "nothing runs below the runner")


def test_sandbox_below_the_runners_own_tier_starts_nothing_whatever_the_worker_says(tmp_path: Path) -> None:
    with listening(tmp_path, "--mask-layers", ",".join(ALL_LAYERS)) as (_, path):
        assert "tier B is required and this is tier E" in refused(path, configure(min_tier="E"))


async def test_worker_gets_as_many_slots_and_sessions_as_the_command_line_says(tmp_path: Path) -> None:
    with listening(tmp_path, "--max-slots", "2", "--max-sessions", "3") as (_, path):
        assert "3 slots" in refused(path, configure(slots=3))
        assert "4 sessions" in refused(path, configure(sessions=4))
        async with laboratory(slots=2, max_sessions=3, runner_socket=str(path)) as lab:
            assert (await lab.run("print(1)")).stdout == "1\n"


async def test_worker_cannot_have_a_program_run_under_a_uid_of_its_choice() -> None:
    """It holds the zygotes' sockets, by which slots are made known too."""
    async with laboratory(slots=1, mask_layers=["userns"], min_tier="D") as lab:
        for uid in (0, FOREIGN_UID):
            protocol.send_request(lab.pool._zygotes[0]._socket, protocol.slot_request(0, uid, [])[0])
            assert int(await lab.output("import os; print(os.getuid())")) in OWN_UIDS


@pytest.fixture
def odd_module(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Its name, and a file that appears when it is imported."""
    name, mark = f"exec_service_hostile_{os.getpid()}", tmp_path / "mark"
    module = Path("/tmp", f"{name}.py")
    module.write_text(f"open({str(mark)!r}, 'w').write('imported')")
    yield name, mark
    module.unlink()


async def test_profile_does_not_import_what_lies_in_the_machines_tmp(odd_module: tuple[str, Path]) -> None:
    """Without a jail a zygote is an ordinary process, as root here, and everybody can write to /tmp."""
    need_sandbox()
    name, mark = odd_module
    config = WorkerConfig(slots=1, profiles={"odd": [name]}, mask_layers=["userns"], min_tier="D")
    async with asyncio.timeout(60):
        with contextlib.suppress(SandboxUnavailable):
            async with Pool(config) as pool:
                await pool.wait_ready()
    assert not mark.exists()


# -- messages that are not one ----------------------------------------------------------------------------------------------

MESSAGES = {  # to a runner that listens, as the first one
    "no JSON": b"\x00\xff\x00",
    "very deep": b'{"configure": {"slots": 1, "profiles": {"a": ' + b"[" * 30_000,
    "too long": b'{"configure": {"slots": 1, "profiles": {}}}' + b" " * 70_000,
    "not an object": b"null",
    "another one first": b'{"session_slot": 1}',
    "unknown field": configure(packages="/etc"),
    "bool slots": configure(slots=True),
    "very many slots": configure(slots=10**30),
    "slots and sessions beyond the uids": configure(slots=512, sessions=512),
    "import of a path": configure(profiles={"x": ["../evil"]}),
}
MORE_MESSAGES = {
    "half of it": b'{"configure": {"slots": 1',
    "not UTF-8": b'{"configure": {"slots": 1, "profiles": {"\xff\xfe": []}}}',
    "very deep and unknown": b'{"x": ' + b"[" * 60_000,
    "a list": b"[]",
    "a number": b"7",
    "nothing in it": b"{}",
    "null in it": b'{"configure": null}',
    "unknown": b'{"shutdown": true}',
    "two at once": b'{"configure": {"slots": 1, "profiles": {}}, "session_slot": 1}',
    "without slots": b'{"configure": {"profiles": {}}}',
    "no slots": configure(slots=0),
    "negative slots": configure(slots=-1),
    "text slots": configure(slots="1"),
    "half a slot": configure(slots=1.5),
    "list of slots": configure(slots=[1]),
    "null slots": configure(slots=None),
    "more slots than uids": configure(slots=1024),
    "infinitely many slots": b'{"configure": {"slots": Infinity, "profiles": {}}}',
    "negative sessions": configure(sessions=-1),
    "bool sessions": configure(sessions=False),
    "unknown tier": configure(min_tier="S"),
    "tier of a wrong type": configure(min_tier=["A"]),
    "profiles in a list": configure(profiles=[]),
    "profile without a name": configure(profiles={"": []}),
    "profile with a long name": configure(profiles={"x" * 65: []}),
    "profile with a line break": configure(profiles={"x\n": []}),
    "too many profiles": configure(profiles={f"p{i}": [] for i in range(65)}),
    "imports in a text": configure(profiles={"x": "os"}),
    "import of a number": configure(profiles={"x": [1]}),
    "import of a program": configure(profiles={"x": ["os;print(1)"]}),
    "import with a line break": configure(profiles={"x": ["os\n"]}),
    "import of dots": configure(profiles={"x": ["os..path"]}),
    "import with a long name": configure(profiles={"x": ["y" * 129]}),
    "too many imports": configure(profiles={"x": ["os"] * 257}),
    "negative session slot": b'{"session_slot": -1}',
    "bool session slot": b'{"session_slot": true}',
    "path as a session slot": b'{"session_slot": "/../../x"}',
    "huge session slot": b'{"session_slot": 1%s}' % (b"0" * 5000),
    "negative leaf": b'{"leaf": [1, -1]}',
    "path as a leaf": b'{"leaf": [1, "/../../x"]}',
    "leaf without a number": b'{"leaf": [1]}',
    "leaf with too many": b'{"leaf": [1, 0, 0]}',
    "leaf by name": b'{"leaf": {"index": 1, "leaf": 0}}',
    "negative zygote": b'{"recycle": -1}',
    "bool zygote": b'{"retire": false}',
    "zygote by name": b'{"retire": "bare"}',
}


@pytest.mark.parametrize("what", MESSAGES, ids=dashed)
def test_first_message_that_is_not_allowed_is_answered_and_ends_the_connection(
    runner: tuple[subprocess.Popen[bytes], Path], what: str
) -> None:
    assert refused(runner[1], MESSAGES[what]).startswith("the runner does not allow this: ")


@pytest.mark.parametrize("what", MORE_MESSAGES, ids=dashed)
def test_message_of_a_wrong_shape_type_or_range_is_refused_in_words_that_can_be_logged(what: str) -> None:
    from worker.sandbox.runner_limits import BadRequest, parse

    with pytest.raises(BadRequest) as refusal:
        parse(MORE_MESSAGES[what])
    words = str(refusal.value)
    assert 0 < len(words) <= 1000 and words.isascii() and words.isprintable()


def test_runner_serves_the_next_worker_after_all_of_that(runner: tuple[subprocess.Popen[bytes], Path]) -> None:
    with connect(runner[1]) as link:
        link.send(configure())
        said = [next(answers(link)) for _ in range(2)]
    assert [list(message) for message in said] == [["ready"], ["zygote"]]
    assert runner[0].poll() is None


LATER = {  # to a runner with one slot and one session slot
    "session slot of a slot": {"session_slot": 0},
    "session slot beyond the sessions": {"session_slot": 2},
    "session slot of a wrong type": {"session_slot": "1"},
    "leaf of a slot": {"leaf": [0, 0]},
    "huge leaf": {"leaf": [1, 10**9]},
    "zygote that never was": {"recycle": 1000},
    "configure again": {"configure": MODEST},
    "nothing": {},
}


@pytest.mark.parametrize("what", LATER, ids=dashed)
async def test_later_message_that_is_not_allowed_ends_the_runner_and_leaves_nothing(what: str) -> None:
    async with laboratory(slots=1, max_sessions=1, uid_base=OWN_BASE) as lab:
        base, before, link = lab.uid_base, tree_of(lab.runner_pid), lab.pool._runner
        link._socket.send(json.dumps(LATER[what]).encode())
        await until(link.lost.is_set, "the connection ends")
        await until(lambda: not any(is_alive(pid) for pid in before), "runner, jail and zygote are gone")
        assert (await lab.run("print('again')")).stdout == "again\n"  # in the next runner's zygotes
    assert (base - OWN_BASE) % uids.BLOCK_SIZE == 0
    assert cgroups_of(base) == [] and traces(range(OWN_BASE, OWN_BASE + uids.BLOCKS * uids.BLOCK_SIZE)) == set()


async def test_worker_cannot_have_zygotes_without_end() -> None:
    async with laboratory(slots=1, max_sessions=1) as lab:
        link = lab.pool._runner
        give_up = time.monotonic() + PATIENCE_S
        while not link.lost.is_set() and time.monotonic() < give_up:
            newest = max(zygote.number for zygote in lab.pool._zygotes)
            assert newest < 40, "forty zygotes for one slot"
            link.send({"retire": newest})
            await asyncio.sleep(0.02)
        assert link.lost.is_set()


async def test_descriptors_that_come_with_a_message_are_closed() -> None:
    async with laboratory(slots=1, max_sessions=1) as lab:
        link = lab.pool._runner
        (await link.session_slot(1)).files.clear()  # it works; what it opened is of no interest here
        before = open_fds(lab.runner_pid)
        for _ in range(20):
            read, write = os.pipe()
            socket.send_fds(link._socket, [b'{"session_slot": 1}'], [write] * 16)
            os.close(write)
            assert await asyncio.to_thread(select.select, [read], [], [], PATIENCE_S) == ([read], [], [])
            assert os.read(read, 1) == b""  # the other end is closed
            os.close(read)
        await until(lambda: open_fds(lab.runner_pid) <= before + 4, "the runner has closed what came and what it sent")
        assert (await lab.run("print(1)")).stdout == "1\n"


# -- the worker's side --------------------------------------------------------------------------------------------------------


async def test_late_answers_of_the_runner_are_closed_and_not_taken_for_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    link, theirs = await scripted_runner()

    def answer(uid: int) -> int:
        """Its descriptor's other end."""
        read, write = os.pipe()
        words = {"session_slot": 1, "uid": uid, "present": [], "counters": [True, False, False]}
        protocol.send_message(theirs, words, [write])
        os.close(write)
        return read

    async def closed(read: int) -> bool:
        return await asyncio.to_thread(lambda: bool(select.select([read], [], [], PATIENCE_S)[0]) and os.read(read, 1) == b"")

    with monkeypatch.context() as hasty:
        hasty.setattr("worker.sandbox.runner_client.ANSWER_S", 0.01)
        with pytest.raises(TimeoutError):
            await link.session_slot(1)
    again = asyncio.create_task(link.session_slot(1))
    await asyncio.sleep(0.05)
    late, right, unasked = answer(10), answer(20), answer(30)
    slot = await again
    assert slot.uid == 20
    assert await closed(late) and await closed(unasked)
    assert slot.counters[0] is not None
    os.close(slot.counters[0])
    assert await closed(right)
    asked = asyncio.create_task(link.session_slot(1))
    await asyncio.sleep(0.05)
    last = answer(40)
    assert (await asked).uid == 40
    for read in (late, right, unasked, last):
        os.close(read)
    theirs.close()
    await link.close()
