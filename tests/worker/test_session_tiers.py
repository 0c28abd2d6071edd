"""Sessions where layers of the sandbox are missing, and zygotes that are replaced or die under them."""

import asyncio
import os
import signal

import pytest
from common import until
from session_harness import session_laboratory

DAEMON = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n    os._exit(0)\n"


@pytest.mark.parametrize("mask", [["cgroup"], ["uid"], ["uid", "cgroup"]], ids=["tier B", "tier C", "tier C without cgroup"])
async def test_session_forks_and_rolls_back_in_weaker_tiers(mask: list[str]) -> None:
    async with session_laboratory(mask_layers=mask, min_tier="D") as lab:
        session = await lab.create(auto_checkpoint=True)
        await session.ok("x = 1")
        (fork,) = await session.fork()
        await fork.ok("x = 2")
        await session.ok("x = 3")
        await session.roll_back()
        assert [(await each.ok("x")).value for each in (session, fork)] == ["1", "2"]
        stuck = await fork.run("while True: pass", wall_s=0.3)
        assert (stuck.status, stuck.state_kept) == ("timeout", True)
        (other,) = await fork.fork()
        await other.ok(DAEMON)
        tree = other.session.member.tree
        await other.delete()
        assert (await fork.ok("x")).value == "2"
        assert other.id not in lab.sessions._sessions
        await session.delete()
        await fork.delete()
        await until(lambda: tree.ended.done(), "nothing is left of it")


async def test_tree_that_takes_too_much_memory_is_ended_without_control_groups() -> None:
    async with session_laboratory(mask_layers=["cgroup"], min_tier="D") as lab:
        session = await lab.create(memory_mb=100)
        (fork,) = await session.fork()
        result = await fork.run("import time\nx = b'a' * (200 << 20)\ntime.sleep(3)")
        assert (result.status, result.state_kept) == ("memory_limit", False)


async def test_session_in_tier_d_has_state_and_cannot_be_forked() -> None:
    async with session_laboratory(mask_layers=["userns"], min_tier="D") as lab:
        session = await lab.create()
        await session.ok("x = 1")
        result = await session.run("x = 2\nwhile True: pass", wall_s=0.3)
        assert (result.status, result.state_kept) == ("timeout", True)
        assert (await session.ok("x")).value == "2"
        assert (await session.not_forkable()).code == "not_forkable"
        assert (await session.ok("x")).value == "2"
        crashed = await session.run("import os; os._exit(4)")
        assert (crashed.status, crashed.exit_code, crashed.state_kept) == ("error", 4, False)
        other = await lab.create()
        await other.ok(DAEMON)
        await other.delete()
        await until(lambda: len(lab.pool.session_slots) == lab.pool.config.max_sessions, "both places are free again")


async def test_retired_zygote_stays_until_its_sessions_have_ended() -> None:
    async with session_laboratory() as lab:
        session = await lab.create()
        await session.ok("x = 1")
        old = session.session.member.tree.zygote
        lab.pool._retire(old)
        await until(lambda: any(zygote.ready for zygote in lab.pool._zygotes), "another zygote is there")
        assert (await lab.run("print(1)")).stdout == "1\n"
        second = await lab.create()
        assert second.session.member.tree.zygote is not old
        assert (await session.ok("x")).value == "1"
        (fork,) = await session.fork()
        await session.delete()
        assert not old.lost
        await fork.delete()
        await until(lambda: old.lost, "the old zygote was let go")
        await until(lambda: len(lab.zygote_pids) == 1, "and has ended")
        assert (await second.ok("1")).value == "1"


async def test_killed_zygote_loses_its_sessions_and_frees_their_places() -> None:
    async with session_laboratory() as lab:
        sessions = [await lab.create() for _ in range(3)]
        running = asyncio.create_task(sessions[0].run("import time; time.sleep(20)"))
        await until(lambda: sessions[0].session.running, "the cell runs")
        for pid in lab.zygote_pids:
            os.kill(pid, signal.SIGKILL)
        assert (await running).status == "session_lost"
        assert (await sessions[1].run("1")).status == "session_lost"
        assert (await sessions[2].not_forkable()).code == "session_lost"
        await until(lambda: len(lab.pool.session_slots) == lab.pool.config.max_sessions, "all places are free again")
        assert (await (await lab.create()).ok("1")).value == "1"
