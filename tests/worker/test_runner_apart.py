"""A runner in a process of its own, as in the second container of a pod: joined by its socket, ended by SIGTERM."""

import asyncio
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from common import PATIENCE_S, until, wait_until
from sandbox_harness import laboratory

from worker.config import default_packages
from worker.sandbox.runner_client import RunnerClient, SandboxUnavailable

ROOT = Path(__file__).parents[2]


def start(socket: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "exec_service", "runner", "--socket", str(socket), "--packages", default_packages()]
    return subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    socket = tmp_path / "runner.sock"
    process = start(socket)
    yield process, socket
    process.kill()
    process.wait()


def wait_for(path: Path) -> None:
    wait_until(lambda: path.exists() and stat.S_IMODE(path.stat().st_mode) == 0o660, f"{path} appears")


def test_runner_without_a_worker_ends_at_once_on_sigterm(runner: tuple[subprocess.Popen[str], Path]) -> None:
    process, socket = runner
    wait_for(socket)
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    assert not socket.exists()


async def test_worker_that_came_first_waits_for_its_runner_which_outlives_sigterm_until_it_leaves(tmp_path: Path) -> None:
    socket = tmp_path / "runner.sock"
    late = asyncio.get_running_loop().call_later(1.0, lambda: processes.append(start(socket)))
    processes: list[subprocess.Popen[str]] = []
    try:
        async with laboratory(runner_socket=str(socket)) as lab:
            assert {"python", "bash"} <= set(lab.pool.languages)
            running = asyncio.create_task(lab.run("import time; time.sleep(4); print('whole')", wall_s=30))
            await until(lambda: lab.pool.free_slots < lab.pool.slots, "the program runs")
            processes[0].send_signal(signal.SIGTERM)
            assert (await running).stdout == "whole\n"
            assert (await lab.run("print(1)")).status == "ok"
            assert (await lab.run("echo $((6 * 7))", language="bash")).stdout == "42\n"
        assert await asyncio.to_thread(processes[0].wait, PATIENCE_S) == 0
    finally:
        late.cancel()
        for process in processes:
            process.kill()
            process.wait()


async def test_no_runner_at_the_socket_is_said_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match=f"no runner at {tmp_path}/none.sock"):
        await RunnerClient.join(tmp_path / "none.sock", patience_s=0.1)


def test_runner_that_must_be_in_a_user_namespace_refuses_the_machines_root(tmp_path: Path) -> None:
    process = start(tmp_path / "runner.sock", "--user-namespace")
    _, words = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "hostUsers: false" in words) == (69, True)
