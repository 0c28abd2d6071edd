"""`exec-service head` and `exec-service node`, which Slurm and Ray start: what they keep alive, and what they leave."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from common import wait_until
from redis_harness import need_redis
from service_harness import children_of, tree_of

from exec_client import Client
from loadtest.support.processes import ROOT, environment

NODE = ["node", "--end-with-stdin", "--", "--runtime", "echo", "--insecure", "--slots", "8"]


class Head:
    """A head whose command starts a node that echoes."""

    def __init__(self, file: Path, *words: str, command: list[str] | None = None) -> None:
        self.file = file
        node = [sys.executable, "-m", "exec_service", *NODE]
        arguments = [
            "head",
            "--file",
            str(file),
            "--address",
            "127.0.0.1",
            *words,
            "--",
            *(node if command is None else command),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "exec_service", *arguments],
            cwd=ROOT,
            env={**environment({}), "TMPDIR": str(file.parent)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def named(self) -> dict[str, str]:
        wait_until(lambda: self.file.exists() or self.process.poll() is not None, "the file")
        assert self.process.poll() is None
        return dict(line.split("=", 1) for line in self.file.read_text().splitlines())

    def client(self) -> Client:
        named = self.named()
        return Client(named["EXEC_URL"], api_key=named["EXEC_API_KEY"])

    def child(self, words: str) -> int:
        def found() -> list[int]:
            commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children_of(self.process.pid)}
            return [pid for pid, command in commands.items() if words in command.replace("\0", " ")]

        return int(wait_until(found, words)[0])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.words = self.process.communicate(timeout=90)[1]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    need_redis()
    head = Head(tmp_path / "service.env", "--end-with-stdin")
    yield head
    head.close()
    if head.process.returncode != -signal.SIGKILL:
        assert head.process.returncode == 0 and list(tmp_path.iterdir()) == [], head.words


def test_a_head_serves_with_a_new_key_in_a_file_that_only_its_user_reads(head: Head) -> None:
    with head.client() as client:
        assert client.run("words").stdout == "words"
    assert stat.S_IMODE(head.file.stat().st_mode) == 0o600
    assert httpx.post(f"{head.named()['EXEC_URL']}/v1/run", json={"code": "1"}).status_code == 401
    secret = head.named()["EXEC_REDIS"].split(":")[2].partition("@")[0]
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in tree_of(head.process.pid)]
    assert len(commands) >= 5 and not [command for command in commands if secret in command]


def test_killed_parts_are_started_again_at_the_same_address(head: Head) -> None:
    with head.client() as client:
        assert client.run("first").stdout == "first"
        node = head.child("exec_service node")
        for pid in (head.child("exec_service gateway"), head.child("-server"), *children_of(node)):
            os.kill(pid, signal.SIGKILL)
            results = client.run_many([f"{number}" for number in range(50)], deadline_s=100)
            assert [result.stdout for result in results] == [f"{number}" for number in range(50)]


@pytest.mark.parametrize("how", ["signal", "kill", "stdin"])
def test_all_parts_end_with_the_head(head: Head, how: str) -> None:
    with head.client() as client:
        assert client.run("words").stdout == "words"
    tree = tree_of(head.process.pid)
    if how == "stdin":
        assert head.process.stdin is not None
        head.process.stdin.close()
        head.process.stdin = None
    else:
        head.process.send_signal(signal.SIGTERM if how == "signal" else signal.SIGKILL)
    wait_until(lambda: not [pid for pid in tree if alive(pid)], "the end of all parts")
    assert how == "kill" or not head.file.exists()


def alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_a_head_ends_as_its_command_does(tmp_path: Path) -> None:
    need_redis()
    head = Head(tmp_path / "service.env", command=["sh", "-c", 'test -n "$EXEC_REDIS" && exit 7'])
    head.process.communicate(timeout=90)
    assert head.process.returncode == 7


def test_a_node_whose_worker_cannot_run_here_ends_with_its_exit_code() -> None:
    command = [sys.executable, "-m", "exec_service", "node", "--", "--runtime", "echo"]
    ended = subprocess.run(command, cwd=ROOT, env=environment({"redis": "redis://127.0.0.1:1"}), capture_output=True, text=True)
    assert ended.returncode == 2 and "--insecure" in ended.stderr and "cannot run here" in ended.stderr
