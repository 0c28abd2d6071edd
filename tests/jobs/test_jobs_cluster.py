"""Bulk jobs in a cluster of real processes: Celery on a real server, programs in real sandboxes, and parts that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest
from jobs_harness import LINES, body
from redis_harness import need_redis
from sandbox_harness import need_sandbox

from exec_client import AsyncClient
from exec_service.jobs import JobStore
from exec_wire.jobs import JobResult, JobStatus
from loadtest.parts import ROOT, Part, environment
from loadtest.redis_server import RedisServer, free_port


class Bulk:
    """A gateway at a port that stays the same, two workers and a jobs worker; each can be killed and started again."""

    def __init__(self, folder: Path, redis: RedisServer, chunk_items: int) -> None:
        self.folder, self._redis, self._chunk_items = folder, redis, chunk_items
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.parts: dict[str, Part] = {}
        self.store = JobStore(folder)

    def __enter__(self) -> Bulk:
        for name in ("gateway", "worker", "spare", "jobs"):
            self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts.values():
            part.kill()
            part.close()

    def start(self, name: str) -> None:
        self.parts[name] = self._make(name)
        self.parts[name].wait_ready()

    def _make(self, name: str) -> Part:
        url, settings = self._redis.url, {"jobs_dir": self.folder}
        if name == "gateway":
            arguments = ["gateway", "--port", str(self.port), "--grpc-port", "0"]
            return Part(arguments, environment({"redis": url, "jobs_chunk_items": self._chunk_items, **settings}))
        if name == "jobs":
            return Part.jobs_worker(url, "--gateway", self.url, "--chunks", "2", **settings)
        return Part.worker(url, "--slots", "2", "--min-tier", "D", profiles='{"bare": []}')

    def kill(self, name: str, job: str) -> None:
        """-9 while chunks are run, and a new one in its place."""
        assert self.store.running(job) and self.status(job).state == "running", "it was over before anything could be killed"
        self.parts[name].kill()
        self.parts[name].wait()
        self.parts[name].close()
        self.start(name)

    def submit(self, items: int, program: str) -> str:
        lines = body({"call": {"code": program.format(number)}} for number in range(items))
        response = httpx.post(f"{self.url}/v1/jobs", content=lines, headers=LINES, timeout=60)
        assert response.status_code == 201, response.text
        return str(response.json()["id"])

    def status(self, job: str) -> JobStatus:
        return msgspec.json.decode(httpx.get(f"{self.url}/v1/jobs/{job}", timeout=60).content, type=JobStatus)

    def until(self, job: str, reached: Callable[[JobStatus], bool], timeout_s: float) -> JobStatus:
        give_up = time.monotonic() + timeout_s
        while not reached(status := self.status(job)):
            assert time.monotonic() < give_up, (status, {name: part.words for name, part in self.parts.items()})
            time.sleep(0.1)
        return status

    def results(self, job: str) -> list[JobResult]:
        response = httpx.get(f"{self.url}/v1/jobs/{job}/results", timeout=60)
        return msgspec.json.Decoder(JobResult).decode_lines(response.content)


@contextlib.contextmanager
def interactive(url: str) -> Iterator[list[float]]:
    """Somebody calls ten times a second, however long the answers take; how long each took."""
    took: list[float] = []
    stop = threading.Event()

    async def call(client: AsyncClient) -> None:
        began = time.monotonic()
        assert (await client.run("print('now')")).stdout == "now\n"
        took.append(time.monotonic() - began)

    async def call_often() -> None:
        async with AsyncClient(url) as client, asyncio.TaskGroup() as calls:
            while not stop.is_set():
                calls.create_task(call(client))
                await asyncio.sleep(0.1)

    with ThreadPoolExecutor(1) as thread:
        calling = thread.submit(asyncio.run, call_often())
        try:
            yield took
        finally:
            stop.set()
            calling.result(60)


def survive_kills(folder: Path, items: int, chunk_items: int, program: str, timeout_s: float) -> list[float]:
    need_redis()
    need_sandbox()
    with RedisServer() as redis, Bulk(folder, redis, chunk_items) as bulk:
        began = time.monotonic()
        job = bulk.submit(items, program)
        with interactive(bulk.url) as took:
            for share, name in ((0.1, "jobs"), (0.35, "gateway"), (0.6, "worker")):
                bulk.until(job, lambda status, share=share: status.done >= share * items, timeout_s)  # type: ignore[misc]
                bulk.kill(name, job)
            ended = bulk.until(job, lambda status: status.state == "done", timeout_s)
        print(f"{items} items in {time.monotonic() - began:.0f} s")
        assert (ended.done, ended.outcomes) == (items, {"ok": items})
        results = bulk.results(job)
    assert [result.item for result in results] == list(range(items))
    assert all(result.call and result.call.stdout == f"{result.item}\n" for result in results)
    took.sort()
    p50, p99 = took[len(took) // 2], took[int(len(took) * 0.99)]
    print(f"interactive calls: {len(took)}, p50 {p50:.3f} s, p99 {p99:.3f} s, longest {took[-1]:.3f} s")
    return took


def test_every_item_is_done_once_though_each_part_is_killed(tmp_path: Path) -> None:
    assert survive_kills(tmp_path, 300, 10, "import time; time.sleep(0.1); print({})", 60)


@pytest.mark.slow
def test_twenty_thousand_items_are_done_once_and_interactive_calls_stay_quick(tmp_path: Path) -> None:
    took = survive_kills(tmp_path, 20_000, 500, "print({})", 500)
    assert took[int(len(took) * 0.99)] <= 1.0


def test_jobs_worker_says_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "exec_service", "jobs-worker"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment({}))
    assert ended.returncode == 2 and "--redis and --jobs-dir" in ended.stderr
