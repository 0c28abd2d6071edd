"""A bulk job during which each part of the cluster is killed once, beside interactive calls.

Real processes on this machine: two gateways, two workers with sandboxes, one jobs worker (Celery) and a Redis server. When a
share of the job is done, a part is killed by SIGKILL while chunks run, and a new one is started. Meanwhile an interactive call
(priority `train`) is sent every `EVERY_S` to both gateways, as the client does with several addresses.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

import httpx
import msgspec
from common import PATIENCE_S

from exec_client import AsyncClient, ExecError
from exec_service.jobs.store import JobStore
from exec_wire.messages.jobs import JobResult, JobStatus
from loadtest.support import redis_server
from loadtest.support.processes import Part, free_port

EVERY_S = 0.1
KILLS = ((0.1, "worker"), (0.35, "jobs worker"), (0.6, "gateway"))  # when this share of the items is done
GATEWAYS = ("gateway", "second gateway")
WORKERS = ("worker", "second worker")
SLOTS = 2


class Bulk(NamedTuple):
    items: int
    right: int  # items with exactly one result, which is right
    outcomes: dict[str, int]
    killed: list[str]
    calls: int  # interactive ones
    errors: list[str]  # of the interactive calls

    @property
    def once(self) -> bool:
        return self.right == self.items == sum(self.outcomes.values())


class BulkCluster:
    """Each part can be killed and replaced at the same address."""

    def __init__(self, folder: Path, chunk_items: int) -> None:
        self._folder, self._chunk_items = folder, chunk_items
        self._redis = redis_server.RedisServer()
        self._ports = {name: free_port() for name in GATEWAYS}
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports.values()]
        self.parts: dict[str, Part] = {}
        self._store = JobStore(folder)

    def __enter__(self) -> Self:
        self._redis.__enter__()
        try:
            self.parts = {name: self._make(name) for name in (*GATEWAYS, *WORKERS, "jobs worker")}
            for part in self.parts.values():
                part.wait_ready()
            for name in GATEWAYS:
                self.parts[name].wait_for_workers(len(WORKERS))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts.values():
            part.kill()
        for part in self.parts.values():
            part.close()
        self._redis.__exit__()

    def _make(self, name: str) -> Part:
        redis, folder = self._redis.url, self._folder
        if name in GATEWAYS:
            settings = {"jobs_dir": folder, "jobs_chunk_items": self._chunk_items}
            return Part.gateway(redis, "--port", str(self._ports[name]), **settings)
        if name == "jobs worker":
            return Part.jobs_worker(redis, "--gateway", ",".join(self.urls), "--chunks", "4", jobs_dir=folder)
        return Part.worker(redis, slots=SLOTS, min_tier="D", profiles='{"bare": []}')

    def kill(self, name: str, job: str) -> None:
        """SIGKILL, while chunks run."""
        give_up = time.monotonic() + PATIENCE_S
        while not self._store.running(job):  # a new jobs worker takes a moment
            if time.monotonic() > give_up:
                raise RuntimeError(f"no chunk was running when the {name} was to be killed")
            time.sleep(0.02)
        self.parts[name].kill()

    def replace(self, name: str) -> None:
        self.parts[name].wait()
        self.parts[name].close()
        self.parts[name] = self._make(name)
        self.parts[name].wait_ready()

    def submit(self, lines: Iterable[bytes]) -> str:
        headers = {"content-type": "application/x-ndjson"}
        response = httpx.post(f"{self.urls[0]}/v1/jobs", content=b"".join(lines), headers=headers, timeout=60)
        return str(response.raise_for_status().json()["id"])

    def status(self, job: str) -> JobStatus:
        return msgspec.json.decode(self._get(f"/v1/jobs/{job}"), type=JobStatus)

    def results(self, job: str) -> list[JobResult]:
        return msgspec.json.Decoder(JobResult).decode_lines(self._get(f"/v1/jobs/{job}/results"))

    def _get(self, path: str) -> bytes:
        for url in self.urls:
            with suppress(httpx.TransportError):  # that gateway is being replaced
                return httpx.get(url + path, timeout=60).raise_for_status().content
        raise RuntimeError("no gateway answers")

    def until(self, job: str, reached: Callable[[JobStatus], bool], timeout_s: float) -> JobStatus:
        give_up = time.monotonic() + timeout_s
        while not reached(status := self.status(job)):
            if time.monotonic() > give_up:
                words = "\n".join(f"{name}: {part.words[-2000:]}" for name, part in self.parts.items())
                raise RuntimeError(f"after {timeout_s:g} s: {status}\n{words}")
            time.sleep(0.1)
        return status


@contextmanager
def interactive_calls(urls: list[str]) -> Iterator[list[str]]:
    """A call every `EVERY_S`, from a thread of its own; yields the error of each, empty if there was none."""
    errors: list[str] = []
    stop = threading.Event()

    async def call(client: AsyncClient) -> None:
        try:
            result = await client.run("print('now')", deadline_s=60)
            errors.append("" if result.stdout == "now\n" else f"{result.status}: {result.stdout!r}")
        except ExecError as failed:
            errors.append(f"{type(failed).__name__}: {failed}")

    async def call_often() -> None:
        async with AsyncClient(",".join(urls)) as client, asyncio.TaskGroup() as group:
            due = time.monotonic()
            while not stop.is_set():
                group.create_task(call(client))
                due += EVERY_S
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    with ThreadPoolExecutor(1) as thread:
        calling = thread.submit(asyncio.run, call_often())
        try:
            yield errors
        finally:
            stop.set()
            calling.result(90)


def run(items: int, chunk_items: int, program: str, folder: Path, timeout_s: float) -> Bulk:
    with BulkCluster(folder, chunk_items) as cluster, ThreadPoolExecutor(len(KILLS)) as replacer:
        with interactive_calls(cluster.urls) as errors:
            lines = (msgspec.json.encode({"call": {"code": program.format(item)}}) + b"\n" for item in range(items))
            job = cluster.submit(lines)
            replaced: dict[str, Future[None]] = {}
            for share, name in KILLS:
                cluster.until(job, lambda status, share=share: status.done >= share * items, timeout_s)  # type: ignore[misc]
                cluster.kill(name, job)
                replaced[name] = replacer.submit(cluster.replace, name)
            ended = cluster.until(job, lambda status: status.state == "done", timeout_s)
        for future in replaced.values():
            future.result()
        right = right_items(cluster.results(job), items)
    return Bulk(items, right, ended.outcomes, list(replaced), len(errors), [error for error in errors if error])


def right_items(found: list[JobResult], items: int) -> int:
    """How many items have one result, with the output of their program."""
    times = Counter(result.item for result in found)
    right = {result.item for result in found if result.call is not None and result.call.stdout == f"{result.item}\n"}
    return sum(times[item] == 1 and item in right for item in range(items))
