"""What a program leaves to be read has a bounded cost: large results are made beside the event loop, and files that do not fit
are named."""

import asyncio
import base64
import threading
import time
from collections.abc import AsyncIterator

import pytest
from common import PATIENCE_S, until
from sandbox_harness import Lab, laboratory
from session_harness import SessionLab, session_laboratory

from exec_wire.messages.sessions import FetchFiles, Got
from worker.sandbox import execution

MB = 1 << 20
INVALID = "import os\nfor fd in (1, 2):\n    for _ in range({mb}):\n        os.write(fd, bytes([255]) * (1 << 20))\n"
SPARSE = "import os\nos.truncate(os.open('sparse', os.O_WRONLY | os.O_CREAT), {bytes})\nopen('small', 'w').write('here')\n"


@pytest.fixture(scope="module")
async def lab() -> AsyncIterator[Lab]:
    async with laboratory(slots=3) as lab:
        yield lab


class LoopTime:
    """CPU time of the event loop's own thread, in its longest turn: what the machine is busy with does not count."""

    def __init__(self) -> None:
        self.longest_s, self.turns = 0.0, 0

    async def watch(self) -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            self.longest_s, self.turns = max(self.longest_s, time.thread_time() - before), self.turns + 1


async def test_invalid_utf8_is_decoded_beside_the_event_loop(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    decode = execution.text

    def text(fd: int, size: int, cap: int) -> tuple[str, bool]:
        threads.add(threading.current_thread() is threading.main_thread())
        return decode(fd, size, cap)

    monkeypatch.setattr(execution, "text", text)
    result = await lab.run(INVALID.format(mb=4), output_kb=4096, file_mb=16)
    assert (result.status, result.truncated) == ("ok", False)
    assert result.stdout == result.stderr == "\ufffd" * (4 * MB)
    assert threads == {False}
    threads.clear()
    assert await lab.output("print(1)") == "1\n"
    assert threads == {True}  # a small one takes no thread


async def test_a_canary_stays_right_and_the_loop_turns_while_large_results_are_made(lab: Lab) -> None:
    loop_time = LoopTime()
    watching = asyncio.create_task(loop_time.watch())
    flood = [asyncio.create_task(lab.run(INVALID.format(mb=4), output_kb=4096, wall_s=60, cpu_s=60)) for _ in range(4)]
    for number in range(5):
        assert await lab.output(f"print({number})", wall_s=60, cpu_s=60) == f"{number}\n"
    for result in await asyncio.gather(*flood):
        assert result.status == "ok" and len(result.stdout) == 4 * MB
    watching.cancel()
    assert loop_time.turns > 10
    assert loop_time.longest_s < 0.05  # of CPU time; to decode one of them at once takes more


async def test_text_in_slices_is_the_same_text(lab: Lab) -> None:
    """A character that lies across two slices is whole."""
    code = "import sys\nsys.stdout.write('x' + '€' * 300_000)"
    assert await lab.output(code, output_kb=4096) == "x" + "€" * 300_000


async def test_a_sparse_file_is_not_read_and_its_size_is_told(lab: Lab) -> None:
    code = SPARSE.format(bytes=400 * MB)
    result = await lab.run(code, fetch_files=["sparse", "small", "none"], file_mb=500, memory_mb=512)
    assert result.status == "ok"
    assert result.files == {"small": base64.b64encode(b"here").decode()}
    room = lab.pool.config.max_result_bytes * 3 // 4
    assert result.files_missing == {
        "sparse": f"{400 * MB} bytes; there is room for {room} in this result",
        "none": "no such file",
    }


async def test_files_are_fetched_until_the_result_is_full(lab: Lab) -> None:
    code = "for name in 'abc': open(name, 'wb').write(name.encode() * (10 << 20))"
    result = await lab.run(code, fetch_files=["a", "b", "c"], file_mb=64, memory_mb=256, wall_s=60, cpu_s=60)
    assert {name: len(base64.b64decode(content)) for name, content in result.files.items()} == {"a": 10 * MB, "b": 10 * MB}
    assert list(result.files_missing) == ["c"]
    assert base64.b64decode(result.files["a"]) == b"a" * (10 * MB)


async def test_why_a_file_is_not_fetched_is_told(lab: Lab) -> None:
    code = "import os\nos.mkdir('folder')\nos.symlink('/etc/hostname', 'link')"
    result = await lab.run(code, fetch_files=["folder", "link"])
    assert result.files == {}
    assert result.files_missing["folder"] == "it is not a regular file"
    assert result.files_missing["link"].startswith("it cannot be opened")


async def test_large_results_together_fit_in_their_budget() -> None:
    """A task holds the bytes of its result until it ends; the next task waits until then."""
    async with laboratory(slots=2, results_bytes=8 * MB) as lab:
        sent = asyncio.Event()

        async def work() -> str:
            result = await lab.run(INVALID.format(mb=1), wall_s=60, cpu_s=60)
            await sent.wait()
            return result.status

        first = asyncio.create_task(work())
        await until(lambda: lab.pool._results._used > 0, "the first result is made")
        second = asyncio.create_task(work())
        await until(lambda: len(lab.pool._results._waiting) == 1, "the second one waits")
        assert lab.pool._results._used <= 8 * MB
        assert await lab.output("print(1)") == "1\n"  # a small one does not wait
        sent.set()
        assert await asyncio.wait_for(asyncio.gather(first, second), PATIENCE_S) == ["ok", "ok"]
        assert lab.pool._results._used == 0


async def test_a_program_that_is_cancelled_while_it_waits_for_room_gives_everything_back() -> None:
    async with laboratory(slots=3, results_bytes=8 * MB) as lab:
        sent = asyncio.Event()

        async def work() -> None:
            await lab.run(INVALID.format(mb=1), wall_s=60, cpu_s=60)
            await sent.wait()

        first, second = asyncio.create_task(work()), asyncio.create_task(work())
        await until(lambda: len(lab.pool._results._waiting) == 1, "one waits for the other")
        waiting = first if second in lab.pool._results._held else second
        waiting.cancel()
        sent.set()
        await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), PATIENCE_S)
        assert lab.pool._results._used == 0
        assert (await lab.run(INVALID.format(mb=1), wall_s=60, cpu_s=60)).status == "ok"


@pytest.fixture(scope="module")
async def sessions() -> AsyncIterator[SessionLab]:
    async with session_laboratory() as lab:
        yield lab


async def test_files_of_a_session_that_do_not_fit_are_named(sessions: SessionLab) -> None:
    session = await sessions.create(file_mb=500, memory_mb=512)
    await session.ok(SPARSE.format(bytes=400 * MB))
    reply = await sessions.ask(FetchFiles(session.id, ["sparse", "small", "none", "../../../etc/passwd"], ""))
    assert isinstance(reply, Got)
    assert reply.files == {"small": base64.b64encode(b"here").decode()}
    assert reply.files_missing["sparse"].startswith(f"{400 * MB} bytes; there is room for ")
    assert reply.files_missing["none"] == "no such file"
    assert len(reply.files_missing) == 3


async def test_output_of_a_cell_is_decoded_beside_the_event_loop(sessions: SessionLab) -> None:
    session = await sessions.create(output_kb=4096)
    result = await session.ok(INVALID.format(mb=4), wall_s=60)
    assert result.stdout == result.stderr == "\ufffd" * (4 * MB)
    assert sessions.pool._results._thread._threads  # it was used


async def test_a_compiled_program_holds_no_bytes_of_its_compilation_while_it_runs(lab: Lab) -> None:
    results = lab.pool._results
    code = "#include <unistd.h>\nstatic char x[2 << 20] = {1};\nint main() { sleep(60); return x[0]; }"
    running = asyncio.create_task(lab.run(code, language="cpp", wall_s=60))
    await until(lambda: running.done() or (lab.pool._compiled._programs and not results._held), "it runs, and holds nothing")
    assert not running.done()
    running.cancel()
    await asyncio.wait({running})
