"""Sessions in the real sandbox: state, errors, limits, interrupts."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from common import PATIENCE_S, until
from sandbox_harness import NAME_ITSELF, has_come_this_far, one_core
from session_harness import Handle, SessionLab, session_laboratory

import worker.sessions
from exec_wire.messages.sessions import Refused
from exec_wire.problems import problem


@pytest.fixture(scope="module")
async def lab() -> AsyncIterator[SessionLab]:
    async with session_laboratory(("bare", "numpy")) as lab:
        yield lab


@pytest.fixture
async def session(lab: SessionLab) -> Handle:
    return await lab.create()


async def test_variables_of_one_cell_are_there_in_the_next(session: Handle) -> None:
    await session.ok("x = 20")
    result = await session.ok("x += 1\nx * 2")
    assert (result.value, result.completed, result.state_kept) == ("42", True, True)


async def test_output_belongs_to_its_own_cell(session: Handle) -> None:
    assert (await session.ok("print('one')")).stdout == "one\n"
    second = await session.ok("import sys; print('two'); print('err', file=sys.stderr)")
    assert (second.stdout, second.stderr) == ("two\n", "err\n")


async def test_error_shows_the_cells_own_lines_and_keeps_the_state(session: Handle) -> None:
    await session.ok("kept = 1\ndef f(a):\n    return a / 0\n")
    result = await session.run("y = 2\nf(3)")
    assert (result.status, result.blame, result.exit_code, result.state_kept) == ("error", "model", 1, True)
    assert "ZeroDivisionError" in result.stderr
    assert 'File "<cell 2>", line 2' in result.stderr
    assert "f(3)" in result.stderr
    assert "return a / 0" in result.stderr
    assert "session.py" not in result.stderr
    assert (await session.ok("kept + y")).value == "3"


async def test_cell_that_does_not_compile_says_where(session: Handle) -> None:
    result = await session.run("x = (")
    assert result.status == "error"
    assert "SyntaxError" in result.stderr
    assert "<cell 1>" in result.stderr


async def test_source_of_a_function_is_found(session: Handle) -> None:
    await session.ok("def f():\n    return 'a source'\n")
    assert "a source" in (await session.ok("import inspect; print(inspect.getsource(f))")).stdout


async def test_classes_of_cells_can_be_pickled(session: Handle) -> None:
    await session.ok("class C:\n    x = 1\n")
    assert (await session.ok("import pickle; pickle.loads(pickle.dumps(C())).x")).value == "1"


async def test_sys_exit_ends_the_cell_and_not_the_session(session: Handle) -> None:
    result = await session.run("x = 5\nimport sys\nsys.exit(3)")
    assert (result.status, result.exit_code, result.state_kept) == ("error", 3, True)
    assert (await session.ok("x")).value == "5"


async def test_os_exit_ends_the_session(session: Handle) -> None:
    result = await session.run("import os; os._exit(3)")
    assert (result.status, result.exit_code, result.state_kept) == ("error", 3, False)
    refused = await session.refused("1")
    assert refused.code == "session_ended"


@pytest.mark.parametrize("ending", ["sys.exit(3)", "raise KeyError('child')", "print('child')"])
async def test_a_child_that_reaches_the_end_of_the_cell_does_not_answer_for_it(session: Handle, ending: str) -> None:
    cell = f"""
import os, sys
if (child := os.fork()) == 0:
    {ending}
else:
    code = os.waitstatus_to_exitcode(os.wait()[1])
    answer = 42
"""
    result = await session.run(cell)
    assert (result.status, result.state_kept) == ("ok", True), result
    assert "child" in result.stdout + result.stderr or "exit" in ending
    expected = {"sys": 3, "rai": 1, "pri": 0}[ending[:3]]
    assert (await session.run("(code, answer)")).value == f"({expected}, 42)"


async def test_segfault_is_the_cells_fault(session: Handle) -> None:
    result = await session.run("import ctypes; ctypes.string_at(0)")
    assert (result.status, result.signal, result.blame, result.state_kept) == ("signal", 11, "model", False)


async def test_timeout_interrupts_and_keeps_the_state(session: Handle) -> None:
    await session.ok("x = 7")
    result = await session.run("print('before', flush=True)\nwhile True: pass", wall_s=0.3)
    assert (result.status, result.blame, result.state_kept) == ("timeout", "model", True)
    assert result.stdout == "before\n"
    assert "KeyboardInterrupt" in result.stderr
    assert result.usage.wall_s < 2
    assert (await session.ok("x")).value == "7"


async def test_a_cell_that_shares_its_core_has_as_much_time_as_one_that_does_not() -> None:
    with one_core():
        async with session_laboratory() as crowd:
            sessions = [await crowd.create(), await crowd.create()]
            code = "import time\nbegan = time.process_time()\nwhile time.process_time() < began + 1: pass"
            await asyncio.gather(*(session.ok(code, wall_s=1.6) for session in sessions))
            results = await asyncio.gather(*(session.run("while True: pass", wall_s=1.0) for session in sessions))
    assert [(result.status, result.blame, result.state_kept) for result in results] == [("timeout", "model", True)] * 2
    assert all(result.usage.wall_s < 1.6 for result in results)


async def test_timeout_kills_what_does_not_stop(session: Handle) -> None:
    result = await session.run("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", wall_s=0.3)
    assert (result.status, result.state_kept) == ("timeout", False)


async def test_interrupt_stops_the_cell_and_keeps_the_state(lab: SessionLab, session: Handle) -> None:
    await session.ok("x = 1")
    running = asyncio.create_task(session.run(f"import time\nx = 2\n{NAME_ITSELF}\ntime.sleep(30)", wall_s=20))
    await until(lambda: has_come_this_far(lab.sandboxed_pids), "the cell runs")
    assert await session.interrupt()
    result = await running
    assert (result.status, result.exit_code, result.state_kept) == ("error", 130, True)
    assert "KeyboardInterrupt" in result.stderr
    assert (await session.ok("x")).value == "2"


async def test_interrupt_of_an_idle_session_changes_nothing(session: Handle) -> None:
    await session.ok("x = 1")
    assert not await session.interrupt()
    session.session.member.interrupt()  # a signal that comes too late
    await asyncio.sleep(0.1)
    assert (await session.ok("x")).value == "1"


async def test_memory_limit_ends_the_session(lab: SessionLab) -> None:
    session = await lab.create(memory_mb=64)
    result = await session.run("x = bytearray(200 << 20)\nprint(len(x))")
    assert (result.status, result.blame, result.state_kept) == ("memory_limit", "model", False)


async def test_too_much_output_stops_the_cell_and_keeps_the_state(lab: SessionLab) -> None:
    session = await lab.create(output_kb=4, file_mb=64)
    await session.ok("x = 1")
    result = await session.run("while True: print('a' * 1000)")
    assert (result.status, result.state_kept, result.truncated) == ("output_limit", True, True)
    assert len(result.stdout) < 6000
    assert (await session.ok("x")).value == "1"


async def test_far_too_much_output_is_its_limit_also_if_the_cell_ends_before_it_is_stopped(lab: SessionLab) -> None:
    session = await lab.create(output_kb=64)
    result = await session.run("import os\nos.write(1, b'a' * (1 << 20))\n1 / 0")
    assert (result.status, result.blame, result.state_kept, result.truncated) == ("output_limit", "model", True, True)


async def test_sessions_do_not_see_each_other(lab: SessionLab) -> None:
    one, two = await lab.create(), await lab.create()
    await one.ok("secret = 'of one'\nopen('/tmp/secret', 'w').write(secret)\nopen('own', 'w').write(secret)")
    result = await two.ok(
        "import os\nprint('secret' in globals(), os.path.exists('/tmp/secret'), os.listdir('.'),"
        " sorted(p for p in os.listdir('/proc') if p.isdigit()), os.getuid())"
    )
    words = result.stdout.split()
    assert words[:3] == ["False", "False", "[]"]
    assert (await one.ok("import os; os.getuid()")).value != words[-1]


async def test_stdin_of_each_cell_is_its_own(session: Handle) -> None:
    assert (await session.ok("input()", stdin="first\nrest")).value == "'first'"
    assert (await session.ok("input()", stdin="second")).value == "'second'"


async def test_matplotlib_figures_and_tables_are_shown(session: Handle) -> None:
    result = await session.ok(
        "class T:\n    def _repr_html_(self): return '<b>t</b>'\n    def __repr__(self): return 'T!'\ndisplay(T())\nT()"
    )
    assert result.stdout == "T!\n"
    assert result.value == "T!"
    assert [shown.data for shown in result.display] == [{"text/html": "<b>t</b>"}] * 2
    drawn = await session.run("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()", wall_s=20)
    assert drawn.status == "ok", drawn.stderr
    assert drawn.display[-1].data["image/png"].startswith("iVBORw0KGgo")


async def test_files_go_in_and_out(session: Handle) -> None:
    await session.put({"in/data.txt": b"hello", "/tmp/abs.txt": b"absolute"})
    await session.ok("text = open('in/data.txt').read() + open('/tmp/abs.txt').read()\nopen('out.txt', 'w').write(text * 2)")
    assert await session.fetch("out.txt", "missing", "in/data.txt") == {
        "out.txt": b"helloabsolutehelloabsolute",
        "in/data.txt": b"hello",
    }


async def test_pipes_and_links_out_of_the_folders_are_not_fetched(session: Handle) -> None:
    await session.ok(
        "import os\nos.mkfifo('pipe')\nos.symlink('/etc', 'out')\nopen('f', 'w').write('x')\nos.symlink('f', 'in')"
    )
    assert await session.fetch("pipe", "out/ld.so.cache", "in") == {"in": b"x"}


async def test_session_that_writes_to_its_control_socket_is_ended(session: Handle) -> None:
    result = await session.run("import os, time\nos.write(6, b'{\"number\": 1}')\ntime.sleep(5)")
    assert (result.status, result.blame, result.state_kept) == ("signal", "model", False)
    assert "session was ended" in result.error


async def test_session_that_closes_its_control_socket_is_ended(session: Handle) -> None:
    result = await session.run("import os, time\nos.close(6)\ntime.sleep(5)")
    assert (result.status, result.blame, result.state_kept) == ("signal", "model", False)


async def test_descriptors_that_come_with_an_answer_are_dropped(lab: SessionLab, session: Handle) -> None:
    before = lab.own_fds
    result = await session.run(
        "import socket, os, time\ns = socket.socket(fileno=os.dup(6))\nsocket.send_fds(s, [b'junk'], [0, 1, 2])\ntime.sleep(5)"
    )
    assert (result.status, result.state_kept) == ("signal", False)
    assert lab.own_fds <= before


async def test_cell_is_not_run_twice_for_the_same_key(session: Handle) -> None:
    await session.ok("x = 0")
    first = await session.ok("x += 1\nx", idempotency_key="k")
    assert (await session.ok("x += 1\nx", idempotency_key="k")).value == first.value == "1"
    refused = await session.refused("x += 2", idempotency_key="k")
    assert refused.code == "idempotency_conflict"
    assert (await session.ok("x")).value == "1"


async def test_cell_whose_key_waits_is_not_run_twice_however_many_wait(
    lab: SessionLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.sessions, "RECORDS", 2)
    session = await lab.create()
    await session.ok("x = 0")
    async with session.session.lock:
        sent = [asyncio.create_task(session.ok("x += 1\nx", idempotency_key=f"k{n}")) for n in range(6)]
        await until(lambda: session.session.pending == 6, "all cells to wait")
        again = [asyncio.create_task(session.ok("x += 1\nx", idempotency_key=f"k{n}")) for n in range(6)]
        await asyncio.sleep(0)
    assert [(await task).value for task in sent] == [(await task).value for task in again] == list("123456")
    assert (await session.ok("x")).value == "6"


async def test_record_is_kept_from_the_end_of_a_cell_and_not_from_its_arrival(
    session: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    await session.ok("x = 0")
    async with session.session.lock:
        monkeypatch.setattr(worker.sessions, "RECORD_S", 0.0)
        sent = asyncio.create_task(session.ok("x += 1\nx", idempotency_key="k"))
        await until(lambda: session.session.pending == 1, "the cell to wait")
        monkeypatch.setattr(worker.sessions, "RECORD_S", 120.0)
    assert (await sent).value == (await session.ok("x += 1\nx", idempotency_key="k")).value == "1"


async def test_more_requests_than_a_session_may_have_waiting_are_refused_and_not_run(
    lab: SessionLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 64
    session = await lab.create()
    await session.ok("x = 0")
    async with session.session.lock:
        sent = [asyncio.create_task(session.ask_run("x += 1", idempotency_key=f"k{n}")) for n in range(most + 2)]
        await until(lambda: session.session.pending == most, "the queue to be full")
    replies = [await task for task in sent]
    refused = [reply for reply in replies if isinstance(reply, Refused)]
    assert [(reply.code, "64 requests" in reply.detail) for reply in refused] == [("session_queue_full", True)] * 2
    assert problem(refused[0].code).status == 429 and refused[0].retry_after_s
    assert (await session.ok("x")).value == str(most)
    assert (await session.ok("x += 1\nx", idempotency_key=f"k{most}")).value == str(most + 1)


async def test_cells_wait_for_each_other(session: Handle) -> None:
    await session.ok("done = []")
    await asyncio.gather(*(session.ok(f"import time; time.sleep(0.02); done.append({i})") for i in range(5)))
    assert (await session.ok("done")).value == "[0, 1, 2, 3, 4]"


async def test_session_of_another_tenant_is_not_found(lab: SessionLab) -> None:
    session = await lab.create(tenant="a")
    for tenant in ("", "b"):
        refused = await session.refused("1", tenant=tenant)
        assert refused.code == "no_such_session"


async def test_deleted_session_leaves_nothing(lab: SessionLab) -> None:
    before = lab.sandboxed_pids
    session = await lab.create()
    await session.ok("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n    os._exit(0)\n")
    assert len(lab.sandboxed_pids) > len(before)
    await session.delete()
    await until(lambda: lab.sandboxed_pids == before, "its processes are gone")
    assert (await session.refused("1")).code == "no_such_session"


async def test_idle_session_expires_and_a_used_one_does_not(lab: SessionLab) -> None:
    idle, used = await lab.create(ttl_s=4), await lab.create(ttl_s=4)
    expired = lab.sessions.counts["expired"]
    async with asyncio.timeout(PATIENCE_S):
        while lab.sessions.counts["expired"] == expired:
            await used.ok("1")
            await asyncio.sleep(0.2)
    assert (await idle.refused("1")).code == "no_such_session"
    await used.ok("1")
    assert lab.sessions.counts["expired"] == expired + 1


async def test_profile_that_is_not_there_is_refused(lab: SessionLab) -> None:
    reply = await lab.ask_create(profile="pascal")
    assert isinstance(reply, Refused)
    assert reply.code == "bad_field"


async def test_session_that_keeps_a_cpu_busy_between_cells_is_ended(lab: SessionLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.sessions.IDLE_CPU_S", 0.5)
    monkeypatch.setattr("worker.sessions.IDLE_CPU_SHARE", 0.0)  # on a busy machine they get less than what is forgiven
    quiet, busy, child = await lab.create(), await lab.create(), await lab.create()
    await busy.ok("import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()")
    await child.ok("import os\nif os.fork() == 0:\n    while True: pass")
    await until(lambda: not busy.session.alive and not child.session.alive, "they are ended")
    assert "kept a CPU busy" in (await busy.refused("1")).detail
    assert (await quiet.ok("1")).value == "1"
