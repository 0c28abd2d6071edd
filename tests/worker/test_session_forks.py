"""Forks of sessions in the real sandbox: independent variables, files and lives; checkpoints and rollback."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from common import until
from session_harness import Handle, SessionLab, session_laboratory

from exec_wire.messages.sessions import Refused, Told


@pytest.fixture(scope="module")
async def lab() -> AsyncIterator[SessionLab]:
    async with session_laboratory(("bare", "numpy")) as lab:
        yield lab


@pytest.fixture
async def session(lab: SessionLab) -> Handle:
    return await lab.create()


async def test_forks_have_independent_variables(session: Handle) -> None:
    await session.ok("x = [1]")
    one, two = await session.fork(2)
    await one.ok("x.append('one')")
    await two.ok("x.append('two')")
    values = [(await each.ok("x")).value for each in (session, one, two)]
    assert values == ["[1]", "[1, 'one']", "[1, 'two']"]


async def test_forks_have_independent_files(session: Handle) -> None:
    await session.ok("import os, tempfile\nos.mkdir('d')\nopen('d/f', 'w').write('old')\nos.symlink('d/f', 'link')")
    (fork,) = await session.fork()
    assert (await fork.ok("open('d/f').read() + open('link').read()")).value == "'oldold'"
    await fork.ok("open('d/f', 'w').write('new'); open('own', 'w').write('x')")
    assert (await session.ok("open('d/f').read(), os.path.exists('own')")).value == "('old', False)"
    assert (await fork.ok("tempfile.gettempdir()")).value != (await session.ok("tempfile.gettempdir()")).value
    assert await fork.fetch("d/f") == {"d/f": b"new"}


async def test_fork_stays_in_the_folder_it_was_in(session: Handle) -> None:
    await session.ok("import os\nos.mkdir('sub')\nos.chdir('sub')\nopen('f', 'w').write('x')")
    (fork,) = await session.fork()
    assert (await fork.ok("os.listdir('.'), os.path.basename(os.getcwd())")).value == "(['f'], 'sub')"


async def test_absolute_tmp_is_shared_between_forks(session: Handle) -> None:
    (fork,) = await session.fork()
    await fork.ok("open('/tmp/shared', 'w').write('x')")
    assert (await session.ok("open('/tmp/shared').read()")).value == "'x'"


async def test_output_of_forks_does_not_mix(session: Handle) -> None:
    forks = await session.fork(4)
    results = await asyncio.gather(*(fork.ok(f"print({i})") for i, fork in enumerate(forks)))
    assert [result.stdout for result in results] == ["0\n", "1\n", "2\n", "3\n"]


async def test_many_forks_at_once(lab: SessionLab) -> None:
    session = await lab.create(processes=8)
    await session.ok("x = 1")
    forks = await session.fork(40)
    assert {(await fork.ok(f"x + {i}")).value for i, fork in enumerate(forks)} == {str(1 + i) for i in range(40)}
    await session.delete()
    for fork in forks:
        await fork.delete()


async def test_forks_do_not_count_as_processes_of_a_session(lab: SessionLab) -> None:
    bomb = (
        "import os\nmade = 0\ntry:\n    while os.fork():\n        made += 1\n    os._exit(0)\nexcept OSError:\n    pass\nmade"
    )
    session = await lab.create(processes=8)
    await session.fork(5)
    assert (await session.ok(bomb)).value == "7"


async def test_fork_of_a_fork_works_when_its_parents_are_gone(session: Handle) -> None:
    await session.ok("x = 1")
    (child,) = await session.fork()
    await child.ok("x = 2")
    (grandchild,) = await child.fork()
    await session.delete()
    await child.delete()
    assert (await grandchild.ok("x")).value == "2"
    assert (await grandchild.fork())[0].id


async def test_deleting_a_fork_kills_what_it_started_and_nothing_else(lab: SessionLab, session: Handle) -> None:
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n    os._exit(0)\n"
    (fork,) = await session.fork()
    before = set(lab.sandboxed_pids)
    await fork.ok(daemon)
    await session.ok(daemon)
    mine = set(lab.sandboxed_pids) - before
    assert len(mine) == 2
    await fork.delete()
    await until(lambda: len(mine & set(lab.sandboxed_pids)) == 1, "the fork's daemon is gone")
    assert (await session.ok("1")).value == "1"
    assert len(mine & set(lab.sandboxed_pids)) == 1


async def test_crash_of_the_parent_does_not_hurt_its_forks(session: Handle) -> None:
    await session.ok("x = 1")
    (fork,) = await session.fork()
    assert (await session.run("import os; os.abort()")).signal == 6
    assert (await fork.ok("x")).value == "1"
    assert (await fork.run("import os; os.abort()")).signal == 6
    await until(lambda: not fork.session.member.tree.members, "nobody is left")
    await until(lambda: fork.session.member.tree.ended.done(), "the sandbox is gone")


async def test_session_with_threads_is_not_forkable(session: Handle) -> None:
    await session.ok("import threading\nstop = threading.Event()\nt = threading.Thread(target=stop.wait)\nt.start()")
    refused = await session.not_forkable()
    assert (refused.code, "1 threads" in refused.detail) == ("not_forkable", True)
    await session.ok("stop.set(); t.join()")
    assert len(await session.fork()) == 1


async def test_session_with_live_children_is_not_forkable(session: Handle) -> None:
    await session.ok("import subprocess\np = subprocess.Popen(['sleep', '60'])")
    refused = await session.not_forkable()
    assert (refused.code, "1 living child" in refused.detail) == ("not_forkable", True)
    await session.ok("p.kill()")  # dead, and not reaped
    assert len(await session.fork()) == 1


RANDOM = "(random.random(), float(np.random.rand()))"


@pytest.mark.parametrize(("seed", "different"), [("", 4), ("random.seed(1); np.random.seed(2)\nrandom.random()", 1)])
async def test_random_numbers_differ_between_forks_unless_seeded(lab: SessionLab, seed: str, different: int) -> None:
    session = await lab.create(profile="numpy")
    await session.ok(f"import random, numpy as np\n{seed}")
    forks = await session.fork(3)
    assert len({(await each.ok(RANDOM)).value for each in (session, *forks)}) == different


async def test_memory_limit_holds_for_all_forks_together(lab: SessionLab) -> None:
    session = await lab.create(memory_mb=200)
    await session.ok("x = b'a' * (80 << 20)")
    one, two = await session.fork(2)
    assert (await one.ok("len(x)")).value == str(80 << 20)  # shared, so counted once
    await one.run("y = b'b' * (80 << 20)")
    await two.run("y = b'b' * (80 << 20)")
    await until(lambda: not all(each.session.alive for each in (session, one, two)), "the kernel has ended one of them")
    dead = next(each for each in (session, one, two) if not each.session.alive)
    assert "memory_limit" in (await dead.refused("1")).detail


async def test_forked_process_has_its_own_identity(session: Handle) -> None:
    (fork,) = await session.fork()
    result = await fork.ok(
        "import os, threading, signal\n"
        "print(os.getpid() == threading.get_native_id(), os.getppid())\n"
        "import subprocess; print(subprocess.run(['echo', 'child'], capture_output=True, text=True).stdout)"
    )
    assert result.stdout.split() == ["True", "0", "child"]
    assert (await fork.run("os.abort()")).signal == 6


async def test_fork_interrupts_and_times_out_by_itself(session: Handle) -> None:
    one, two = await session.fork(2)
    stuck = asyncio.create_task(one.run("while True: pass", wall_s=0.5))
    assert (await two.ok("1 + 1")).value == "2"
    result = await stuck
    assert (result.status, result.state_kept) == ("timeout", True)


async def test_many_forks_and_deletions_leave_nothing(lab: SessionLab, session: Handle) -> None:
    await session.ok("x = 1")
    before_fds = lab.own_fds
    for _ in range(10):
        for fork in await session.fork(3):
            await fork.ok("x")
            await fork.delete()
    tree = session.session.member.tree
    assert len(tree.members) == 1
    assert lab.own_fds <= before_fds + 1
    await session.fork()
    folders = (await session.ok("import os; sorted(os.listdir('/mnt'))")).value
    assert folders is not None
    assert folders.count(",") <= 1  # its own and the last fork's


async def rolled_back(reply: object) -> bool | None:
    assert isinstance(reply, Told), reply
    return reply.sessions[0].files_restored


async def test_rollback_after_a_regret_restores_variables_and_files(lab: SessionLab) -> None:
    session = await lab.create(auto_checkpoint=True)
    await session.ok("x = 1\nopen('f', 'w').write('old')")
    await session.ok("x = 2\nopen('f', 'w').write('new')\nopen('g', 'w').write('g')")
    assert (await session.look()).checkpoint
    assert await rolled_back(await session.roll_back()) is True
    assert (await session.ok("import os; x, open('f').read(), os.listdir('.')")).value == "(1, 'old', ['f'])"


async def test_rollback_after_a_crash(lab: SessionLab) -> None:
    session = await lab.create(auto_checkpoint=True)
    await session.ok("x = 1")
    assert (await session.run("x = 2\nimport os\nos.abort()")).state_kept is False
    assert (await session.refused("x")).code == "session_ended"
    assert await rolled_back(await session.roll_back()) is True
    assert (await session.ok("x")).value == "1"


async def test_rollback_after_a_timeout_that_lost_the_state(lab: SessionLab) -> None:
    session = await lab.create(auto_checkpoint=True)
    await session.ok("x = 1")
    result = await session.run("import signal\nx = 2\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass", wall_s=0.2)
    assert (result.status, result.state_kept) == ("timeout", False)
    await session.roll_back()
    assert (await session.ok("x")).value == "1"


async def test_rollback_is_one_deep(lab: SessionLab) -> None:
    session = await lab.create(auto_checkpoint=True)
    for i in range(3):
        await session.ok(f"x = {i}")
    await session.roll_back()
    refused = await session.roll_back()
    assert isinstance(refused, Refused)
    assert refused.code == "no_checkpoint"
    assert (await session.ok("x")).value == "1"
    assert len(session.session.member.tree.members) == 2  # the next checkpoint is there


async def test_rollback_without_checkpoints_is_refused(session: Handle) -> None:
    await session.ok("x = 1")
    refused = await session.roll_back()
    assert isinstance(refused, Refused)
    assert refused.code == "no_checkpoint"


async def test_large_folder_is_not_restored_and_says_so(lab: SessionLab) -> None:
    session = await lab.create(auto_checkpoint=True, file_mb=64)
    await session.ok("x = 1\nopen('big', 'wb').write(bytes(17 << 20))")
    await session.ok("x = 2\nopen('after', 'w').write('x')")
    assert await rolled_back(await session.roll_back()) is False
    assert (await session.ok("import os; x, sorted(os.listdir('.'))")).value == "(1, ['after', 'big'])"


async def test_rollback_ends_what_the_cell_started(lab: SessionLab) -> None:
    session = await lab.create(auto_checkpoint=True)
    await session.ok("x = 1")
    before = set(lab.sandboxed_pids)
    await session.ok("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n    os._exit(0)\n")
    await session.roll_back()
    await until(lambda: len(set(lab.sandboxed_pids)) <= len(before), "the daemon is gone")
    assert (await session.ok("x")).value == "1"


async def test_cell_with_threads_runs_without_a_checkpoint(lab: SessionLab) -> None:
    session = await lab.create(auto_checkpoint=True)
    await session.ok("import threading\nstop = threading.Event()\nthreading.Thread(target=stop.wait, daemon=True).start()")
    assert (await session.ok("1")).value == "1"
    assert not (await session.look()).checkpoint
