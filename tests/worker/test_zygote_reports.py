"""A worker that does not read does not keep a zygote from enforcing limits, and nothing that it is sent leaks."""

import asyncio
import itertools
import os
import select
import socket

import pytest
from common import PATIENCE_S, until
from sandbox_harness import NAME_ITSELF, has_come_this_far, laboratory, open_fds, scripted_runner
from session_harness import session_laboratory

from exec_wire import Limits
from worker.sandbox import protocol
from worker.sandbox.large_results import LargeResults
from worker.sandbox.protocol import ZygoteRequest
from worker.sandbox.session_tree import SessionTree
from worker.sandbox.zygote_client import MAX_UNANSWERED, ZygoteClient

ENDLESS = f"{NAME_ITSELF}\nwhile True: pass"


async def fill(zygote: ZygoteClient) -> None:
    """Both directions of the socket, until the zygote takes no more."""
    asyncio.get_running_loop().remove_reader(zygote._socket)
    refusals = 0
    while refusals < 20:
        try:
            protocol.send_request(zygote._socket, ZygoteRequest(protocol.REQUEST_PING))
            refusals = 0
        except BlockingIOError:
            refusals += 1
            await asyncio.sleep(0.02)


async def test_a_worker_that_does_not_read_keeps_no_limit_from_being_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with laboratory() as lab:
        [zygote] = lab.pool._zygotes
        monkeypatch.setattr(zygote, "ping", lambda: True)  # else the silent zygote is killed with all its programs
        endless = asyncio.create_task(lab.run(ENDLESS, wall_s=2, cpu_s=600, deadline_s=600))
        await until(lambda: has_come_this_far(lab.sandboxed_pids), "the program runs")
        await fill(zygote)
        await until(lambda: not has_come_this_far(lab.sandboxed_pids), "its limit ends the program")
        assert not endless.done()
        asyncio.get_running_loop().add_reader(zygote._socket, zygote._read)
        result = await asyncio.wait_for(endless, PATIENCE_S)
        assert (result.status, result.blame) == ("timeout", "model")
        assert await lab.output("print(6 * 7)") == "42\n"
        assert lab.pool._zygotes == [zygote]


async def test_a_worker_that_was_held_up_does_not_take_its_zygote_for_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats count and not time: while a busy machine holds up the worker, an answer waits to be read."""
    ours, zygote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client = ZygoteClient(0, "bare", ours)
    with zygote:
        assert client.ping()
        monkeypatch.setattr("time.monotonic", lambda: float("inf"))
        assert client.ping()
        monkeypatch.undo()
        pong = protocol.read_report(bytes(protocol.REPORT_BYTES))._replace(kind=protocol.REPORT_PONG)
        client._handle(pong)
        assert [client.ping() for _ in range(MAX_UNANSWERED + 1)] == [True] * MAX_UNANSWERED + [False]
        client.close()


async def test_a_place_that_is_in_use_is_not_changed_and_its_descriptors_do_not_pile_up() -> None:
    async with session_laboratory() as lab:
        session = await lab.create()
        tree = session.session.member.tree
        [zygote_pid] = lab.zygote_pids
        before = open_fds(zygote_pid)
        for _ in range(5):
            slot = await lab.pool._runner.session_slot(tree.index)
            request, fds = protocol.slot_request(tree.index, slot.uid, slot.files)
            protocol.send_request(tree.zygote._socket, request, fds)
            for fd in (*fds, *slot.counters):
                if fd is not None:
                    os.close(fd)
        await session.ok("1")  # it has read all of them
        assert open_fds(zygote_pid) <= before


async def test_control_groups_that_are_no_longer_waited_for_are_closed() -> None:
    """Two are requested; the caller is cancelled after the first answer, and both are requested again."""
    link, theirs = await scripted_runner()
    zygote, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tree = SessionTree(ZygoteClient(0, "", zygote), link, 1, Limits(), itertools.count(), LargeResults())

    def answer(leaf: int) -> int:
        read, write = os.pipe()
        protocol.send_message(theirs, {"leaf": [1, leaf], "by_pids": False}, [write])
        os.close(write)
        return read

    async def closed(read: int) -> bool:
        return await asyncio.to_thread(lambda: bool(select.select([read], [], [], 5)[0]) and os.read(read, 1) == b"")

    reads = []
    for _ in range(3):
        asking = asyncio.create_task(tree._leaves(2))
        asked = [await asyncio.to_thread(theirs.recv, 1000) for _ in range(2)]
        first, second = (int(words.partition(b", ")[2].rstrip(b"]}")) for words in asked)
        reads.append(answer(first))
        await until(lambda first=first: f"leaf {[1, first]}" not in link._answers, "one answer is there")  # type: ignore[misc]
        await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        reads.append(answer(second))
    for read in reads:
        assert await closed(read)
        os.close(read)
    theirs.close()
    await link.close()
