"""A rolling upgrade: parts of another commit (BASE, by default the one before) and parts of this tree share one queue.

Each part runs its own tree's code. The workers echo programs, so that the other tree needs no compiler. `make test-upgrade`
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from common import answers, wait_until
from redis_harness import need_redis

from exec_client import Client, Policy
from loadtest.support.processes import free_port
from loadtest.support.redis_server import RedisServer

ROOT = Path(__file__).parents[2]
CHART = Path("helm", "exec-service")
CALLS, AT_ONCE = 4000, 500

pytestmark = pytest.mark.slow


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    commit = os.environ.get("BASE") or "HEAD~1"
    if "LAYOUT_VERSION" not in git("show", f"{commit}:exec_wire/queue/redis_entries.py").stdout:
        pytest.skip(f"{commit} is not there, or its Redis keys have no version: upgrade all parts together")
    tree = tmp_path_factory.mktemp("base") / "tree"
    added = git("worktree", "add", "--detach", str(tree), commit)
    assert added.returncode == 0, added.stderr
    yield tree
    git("worktree", "remove", "--force", str(tree))


class Part:
    """A gateway or a worker of one tree, started and ready."""

    def __init__(self, tree: Path, kind: str, redis: str, *arguments: str) -> None:
        self.metrics_url = f"http://127.0.0.1:{(metrics_port := free_port())}"
        self._log = Path(os.environ.get("TMPDIR", "/tmp"), f"upgrade-{metrics_port}.log")
        variables = {name: value for name, value in os.environ.items() if not name.startswith("EXEC_")}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "exec_service", kind, "--redis", redis, *arguments],
                cwd=tree,
                env=variables | {"PYTHONPATH": str(tree), "EXEC_METRICS_PORT": str(metrics_port), "EXEC_SLOTS": "32"},
                stderr=log,
            )

    def wait_ready(self) -> None:
        ready = f"{self.metrics_url}/readyz"
        wait_until(lambda: answers(ready) or self.process.poll() is not None, self._log.read_text, 90, 0.1)
        assert self.process.poll() is None, self._log.read_text()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self._log.unlink(missing_ok=True)


@contextlib.contextmanager
def parts() -> Iterator[dict[str, Part]]:
    running: dict[str, Part] = {}
    try:
        yield running
    finally:
        for part in running.values():
            if part.process.poll() is None:
                part.stop()


def start_gateway(tree: Path, redis: str, port: int) -> Part:
    return Part(tree, "gateway", redis, "--port", str(port), "--grpc-port", "0")


def start_worker(tree: Path, redis: str) -> Part:
    return Part(tree, "worker", redis, "--runtime", "echo", "--insecure")


def check_calls(client: Client, label: str, count: int = CALLS) -> None:
    """Every program gets its own text back, exactly one result each."""
    for first in range(0, count, AT_ONCE):
        programs = [f"{label} {number}" for number in range(first, first + AT_ONCE)]
        assert [(result.status, result.stdout) for result in client.run_many(programs)] == [("ok", code) for code in programs]


@pytest.mark.parametrize("newer", ["gateway", "worker"])
def test_a_part_of_this_tree_works_with_one_of_the_other_commit(base: Path, newer: str) -> None:
    need_redis()
    with RedisServer() as server, parts() as running:
        running["worker"] = start_worker(ROOT if newer == "worker" else base, server.url)
        running["gateway"] = start_gateway(ROOT if newer == "gateway" else base, server.url, port := free_port())
        for part in running.values():
            part.wait_ready()
        with Client(f"http://127.0.0.1:{port}") as client:
            check_calls(client, newer)


def test_a_rolling_upgrade_and_its_way_back_lose_nothing(base: Path) -> None:
    """Parts are replaced one by one while calls run; then the older ones replace the newer ones."""
    need_redis()
    ports = {"gateway 1": free_port(), "gateway 2": free_port()}
    addresses = ",".join(f"http://127.0.0.1:{port}" for port in ports.values())
    with RedisServer() as server, parts() as running, ThreadPoolExecutor(1) as pool:

        def start(name: str, tree: Path) -> None:
            if name in running:
                running[name].stop()
            running[name] = start_gateway(tree, server.url, ports[name]) if name in ports else start_worker(tree, server.url)
            running[name].wait_ready()

        names = ["worker 1", "worker 2", *ports]
        for name in names:
            start(name, base)
        upgraded = False

        def load(client: Client) -> int:
            rounds = 0
            while not upgraded:
                check_calls(client, f"round {rounds}", AT_ONCE)
                rounds += 1
            return rounds

        with Client(addresses, policy=Policy(max_attempts=20)) as client:
            loading = pool.submit(load, client)
            for tree in (ROOT, base):
                for name in names:
                    start(name, tree)
                    time.sleep(1)
                    assert not loading.done(), loading.exception()
            upgraded = True
            assert loading.result(120) > 0


def test_the_chart_takes_the_values_of_the_other_commit(base: Path) -> None:
    """As `helm upgrade --reuse-values` does: the older defaults and the user's values win over the newer defaults."""
    helm = shutil.which("helm", path=f"{ROOT / '.tools' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    if helm is None:
        pytest.skip("there is no helm: sh deploy/tools.sh")
    for scenario in sorted((base / CHART / "ci").glob("*-values.yaml")):
        values = ["--values", str(base / CHART / "values.yaml"), "--values", str(scenario)]
        done = subprocess.run(
            [helm, "template", "rel", str(ROOT / CHART), *values], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{scenario.name}: {done.stderr}"
