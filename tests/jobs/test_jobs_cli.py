"""`exec-service jobs …` as people use it: a real terminal for the progress bar, files, and exit codes for scripts."""

import asyncio
import io
import json
import os
import pty
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from gateway_harness import until
from jobs_harness import Jobs, body, calls, jobs_running

from exec_service.__main__ import main
from loadtest.support.processes import ROOT, environment

Command = Callable[..., Awaitable[tuple[object, str, str]]]


@pytest.fixture
async def jobs(tmp_path: Path) -> AsyncIterator[Jobs]:
    async with jobs_running(tmp_path, jobs_chunk_items=5) as jobs:
        yield jobs


@pytest.fixture
def command(jobs: Jobs, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs it in this process, beside the service; gives its exit code, stdout and stderr."""

    async def run(*arguments: str, stdin: bytes = b"", url: str = "") -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(main, ["jobs", *arguments, "--url", url or jobs.service.url])
        return ended.value.code, *capfd.readouterr()

    return run


async def test_job_is_submitted_watched_and_its_results_are_written_to_a_file(command: Command, tmp_path: Path) -> None:
    items, results = tmp_path / "items.jsonl", tmp_path / "results.jsonl"
    items.write_bytes(body(calls(*(f"say {number}" for number in range(12)))))
    code, out, err = await command("submit", str(items), "--name", "mine", "--watch")
    job = out.strip()
    assert code == 0 and f"12 items in 3 chunks. Next: exec-service jobs watch {job}" in err
    assert err.splitlines()[-1].split() == [job, "█" * 30, "100%", "12/12", "done", "ok", "12", "mine"]
    assert (await command("status"))[1].split()[0] == job
    assert json.loads((await command("status", job, "--json"))[1])["outcomes"] == {"ok": 12}
    assert await command("results", job, "-o", str(results)) == (0, "", "")
    assert [json.loads(line)["item"] for line in results.read_text().splitlines()] == list(range(12))
    assert not list(tmp_path.glob("*.part"))  # noqa: ASYNC240 - a test may wait for its disk


async def test_terminal_shows_one_bar_that_grows_until_the_job_has_ended(jobs: Jobs) -> None:
    job = (await jobs.submit(calls(*["say x"] * 5, "hold"))).id
    ours, its = pty.openpty()
    watching = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "exec_service", "jobs", "watch", job, "--url", jobs.service.url,
        stdout=-1, stderr=its, cwd=ROOT, env=environment({}),
    )  # fmt: skip
    os.close(its)
    os.set_blocking(ours, False)
    shown = ""

    def read() -> str:
        nonlocal shown
        try:
            shown += os.read(ours, 65536).decode()
        except BlockingIOError:
            pass
        except OSError:  # Linux says EIO when the other end was closed
            return shown
        return shown

    await until(lambda: "5/6  running" in read())
    jobs.service.worker.let_go.set()
    async with asyncio.timeout(30):
        assert await watching.wait() == 0
    frames = read().split("\r\x1b[K")
    os.close(ours)
    assert frames[0] == "" and f"{'█' * 25}{'░' * 5}  83%" in shown
    assert frames[-1].startswith(f"{job} {'█' * 30} 100%") and frames[-1].endswith("\r\n") and shown.count("\n") == 1


async def test_pause_resume_cancel_and_remove(jobs: Jobs, command: Command) -> None:
    job = (await jobs.submit(calls("hold"))).id
    for action, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        code, out, _ = await command(action, job)
        assert (code, out.split()[4]) == (0, state)
    assert (await command("watch", job))[0] == 1  # not all of it is done
    assert await command("remove", job) == (0, "", "")
    code, _, err = await command("status", job)
    assert code == 2 and "no_such_job" in err


async def test_wrong_line_is_named_even_if_much_follows_it(command: Command) -> None:
    lines = body([*calls("say 1"), {"call": {"code": 7}}]) + body(calls("x" * 1_000_000)) * 30
    code, out, err = await command("submit", "-", stdin=lines)
    assert (code, out) == (2, "") and "bad_field" in err and "$[1].call.code" in err, err


async def test_what_cannot_be_reached_or_read_is_said(command: Command, tmp_path: Path) -> None:
    code, _, err = await command("status", url="http://127.0.0.1:9")
    assert code == 69 and "http://127.0.0.1:9" in err and "--url" in err
    code, _, err = await command("submit", str(tmp_path / "nothing.jsonl"))
    assert code == 2 and "No such file" in err
