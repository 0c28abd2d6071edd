"""A bulk job while each part of the cluster is killed once, and somebody who wants quick answers meanwhile: `make bulk`.

Real processes on this machine: two gateways, workers with sandboxes, one jobs worker (Celery), a Redis of their own. When a
share of the job is done, a part is killed by SIGKILL while chunks run, and a new one is started in its place. From submission
to the end somebody sends an interactive call (priority `train`) every `EVERY_S`, however long the answers take, to both
gateways, as the client does with several addresses. The time of each counts from when it was due, and all of them count.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import httpx
import msgspec
from msgspec import Struct

from exec_client import AsyncClient, ExecError
from exec_service.jobs.store import JobStore
from exec_wire.messages.jobs import JobResult, JobStatus
from loadtest import facts, redis_server
from loadtest.parts import Part
from loadtest.ports import free_port
from loadtest.results import percentile

P99_S = 1.0
EVERY_S = 0.1
PATIENCE_S = 30.0
KILLS = ((0.1, "worker"), (0.35, "jobs worker"), (0.6, "gateway"))  # when this share of the items is done
GATEWAYS = ("gateway", "second gateway")
WORKERS = ("worker", "second worker")
SLOTS = 2
SLOWEST = 20  # that are told one by one
LINES = {"content-type": "application/x-ndjson"}


class Broken(Exception):
    """What was to be shown did not happen."""


class Kill(Struct, frozen=True):
    part: str
    at_s: float  # since the submission
    done: int  # items, as the status said
    back_after_s: float  # until the new one was ready


class Interactive(Struct, frozen=True):
    """One call of somebody who waits."""

    at_s: float  # since the submission
    took_s: float
    error: str = ""
    queue_ms: float = 0.0
    run_ms: float = 0.0


class BulkResults(Struct, kw_only=True):
    started: str
    commit: str
    machine: dict[str, str]
    server: str
    items: int
    chunk_items: int
    program: str
    took_s: float = 0.0
    outcomes: dict[str, int] = {}
    right: int = 0  # items with exactly one result, and that the right one
    kills: list[Kill] = []
    calls: int = 0
    failed_calls: int = 0
    p50_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0
    longest_s: float = 0.0
    over_p99_s: int = 0  # interactive calls that took longer than what is wanted of the 99th percentile
    slowest: list[Interactive] = []

    @property
    def items_per_s(self) -> float:
        return self.items / self.took_s if self.took_s else 0.0

    @property
    def once(self) -> bool:
        return self.right == self.items == sum(self.outcomes.values())

    @property
    def good(self) -> bool:
        return self.once and len(self.kills) == len(KILLS) and not self.failed_calls and self.p99_s <= P99_S

    def count(self, calls: list[Interactive]) -> None:
        took = [call.took_s for call in calls]
        self.calls, self.failed_calls = len(calls), sum(bool(call.error) for call in calls)
        self.p50_s, self.p95_s, self.p99_s = (round(percentile(took, share), 3) for share in (0.5, 0.95, 0.99))
        self.longest_s, self.over_p99_s = max(took), sum(one > P99_S for one in took)
        self.slowest = sorted(calls, key=lambda call: -call.took_s)[:SLOWEST]


class BulkCluster:
    """Each part can be killed; a new one takes its place, at the same address."""

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
        """-9, while chunks are run."""
        give_up = time.monotonic() + PATIENCE_S
        while not self._store.running(job):  # a new jobs worker takes a moment
            if time.monotonic() > give_up:
                raise Broken(f"no chunk was running when the {name} was to be killed")
            time.sleep(0.02)
        self.parts[name].kill()

    def replace(self, name: str) -> float:
        """A new one in its place; how long until it was ready."""
        self.parts[name].wait()
        self.parts[name].close()
        began = time.monotonic()
        self.parts[name] = self._make(name)
        self.parts[name].wait_ready()
        return time.monotonic() - began

    # -- as a caller; whichever gateway is there ---------------------------------------------------------------------------

    def submit(self, lines: Iterable[bytes]) -> str:
        response = httpx.post(f"{self.urls[0]}/v1/jobs", content=b"".join(lines), headers=LINES, timeout=60)
        return str(response.raise_for_status().json()["id"])

    def status(self, job: str) -> JobStatus:
        return msgspec.json.decode(self._get(f"/v1/jobs/{job}"), type=JobStatus)

    def results(self, job: str) -> list[JobResult]:
        return msgspec.json.Decoder(JobResult).decode_lines(self._get(f"/v1/jobs/{job}/results"))

    def _get(self, path: str) -> bytes:
        for url in self.urls:
            with suppress(httpx.TransportError):  # it is being replaced
                return httpx.get(url + path, timeout=60).raise_for_status().content
        raise Broken("no gateway answers")

    def until(self, job: str, reached: Callable[[JobStatus], bool], timeout_s: float) -> JobStatus:
        give_up = time.monotonic() + timeout_s
        while not reached(status := self.status(job)):
            if time.monotonic() > give_up:
                words = "\n".join(f"{name}: {part.words[-2000:]}" for name, part in self.parts.items())
                raise Broken(f"after {timeout_s:g} s: {status}\n{words}")
            time.sleep(0.1)
        return status


@contextmanager
def somebody_calls(urls: list[str], began: float) -> Iterator[list[Interactive]]:
    """Every `EVERY_S`, in a thread of its own; the list is whole when this has ended."""
    calls: list[Interactive] = []
    stop = threading.Event()

    async def call(client: AsyncClient, due: float) -> None:
        try:
            result = await client.run("print('now')", deadline_s=60)
            error = "" if result.stdout == "now\n" else f"{result.status}: {result.stdout!r}"
            queue_ms, run_ms = result.timings.queue_ms, result.timings.run_ms
        except ExecError as failed:
            error, queue_ms, run_ms = f"{type(failed).__name__}: {failed}", 0.0, 0.0
        took_s = round(time.monotonic() - due, 4)
        calls.append(Interactive(round(due - began, 3), took_s, error, queue_ms, run_ms))

    async def call_often() -> None:
        async with AsyncClient(",".join(urls)) as client, asyncio.TaskGroup() as group:
            due = time.monotonic()
            while not stop.is_set():
                group.create_task(call(client, due))
                due += EVERY_S
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    with ThreadPoolExecutor(1) as thread:
        calling = thread.submit(asyncio.run, call_often())
        try:
            yield calls
        finally:
            stop.set()
            calling.result(90)


def run(results: BulkResults, folder: Path, timeout_s: float) -> BulkResults:
    with BulkCluster(folder, results.chunk_items) as cluster, ThreadPoolExecutor(len(KILLS)) as replacer:
        began = time.monotonic()
        with somebody_calls(cluster.urls, began) as calls:
            job = cluster.submit(_lines(results.items, results.program))
            kills: list[tuple[str, float, int, Future[float]]] = []
            for share, name in KILLS:
                status = cluster.until(job, lambda status, share=share: status.done >= share * results.items, timeout_s)  # type: ignore[misc]
                cluster.kill(name, job)
                kills.append((name, time.monotonic() - began, status.done, replacer.submit(cluster.replace, name)))
            ended = cluster.until(job, lambda status: status.state == "done", timeout_s)
            results.took_s = round(time.monotonic() - began, 2)
        results.kills = [Kill(name, round(at_s, 2), done, round(back.result(), 2)) for name, at_s, done, back in kills]
        results.outcomes = ended.outcomes
        results.right = right_ones(cluster.results(job), results.items)
    results.count(calls)
    return results


def _lines(items: int, program: str) -> Iterator[bytes]:
    for number in range(items):
        yield msgspec.json.encode({"call": {"code": program.format(number)}}) + b"\n"


def right_ones(results: list[JobResult], items: int) -> int:
    """How many of the items have one result, with what their program printed."""
    times = Counter(result.item for result in results)
    right = {result.item for result in results if result.call is not None and result.call.stdout == f"{result.item}\n"}
    return sum(times[item] == 1 and item in right for item in range(items))


PAGE = """# A bulk job while parts are killed

{summary}

| killed | after | items done by then | the new one was ready after |
| --- | ---: | ---: | ---: |
{kills}

Interactive calls (`print('now')`, priority `train`), one every {every_ms:g} ms from submission to the end, to both gateways;
all of them count:

| calls | failed | p50 | p95 | p99 | longest | longer than {p99:g} s |
| ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| {calls} | {failed} | {p50:.3f} s | {p95:.3f} s | {p99_found:.3f} s | {longest:.3f} s | {over} |

The slowest of them:

| sent after | took | of that waiting in the service | running |
| ---: | ---: | ---: | ---: |
{slowest}

Two gateways, {workers} workers with {slots} slots each and sandboxes of the profile `bare`, one jobs worker and Redis, all on
this machine with its load generator. `make bulk` writes this page and the figures beside it.

| | |
| --- | --- |
{about}
"""


def page(results: BulkResults) -> str:
    summary = (
        f"{results.items} items in chunks of {results.chunk_items}: {results.right} with exactly one result, the right one, in "
        f"{results.took_s:.0f} s ({results.items_per_s:.0f} per second). {'Good.' if results.good else '**BAD.**'}"
    )
    about = {**results.machine, "server": results.server, "commit": results.commit, "started": results.started}
    return PAGE.format(
        summary=summary,
        kills="\n".join(f"| {one.part} | {one.at_s:.1f} s | {one.done} | {one.back_after_s:.1f} s |" for one in results.kills),
        every_ms=EVERY_S * 1000,
        p99=P99_S,
        calls=results.calls,
        failed=results.failed_calls,
        p50=results.p50_s,
        p95=results.p95_s,
        p99_found=results.p99_s,
        longest=results.longest_s,
        over=results.over_p99_s,
        slowest="\n".join(
            f"| {one.at_s:.1f} s | {one.took_s:.3f} s | {one.queue_ms:.0f} ms | {one.run_ms:.0f} ms |"
            for one in results.slowest
        ),
        workers=len(WORKERS),
        slots=SLOTS,
        about="\n".join(f"| {name} | {value} |" for name, value in about.items()),
    )


def row(one: Interactive) -> str:
    return f"| {one.at_s:.1f} s | {one.took_s:.3f} s | {one.queue_ms:.0f} ms | {one.run_ms:.0f} ms |"


def start(items: int, chunk_items: int, program: str) -> BulkResults:
    return BulkResults(
        started=facts.now(),
        commit=facts.commit(),
        machine=facts.machine(),
        server=redis_server.version(),
        items=items,
        chunk_items=chunk_items,
        program=program,
        kills=[],
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bulk", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--chunk-items", type=int, default=500)
    parser.add_argument("--program", default="print({})", help="{} is the number of the item, which it has to print")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the results, and a page beside them")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        results = run(start(given.items, given.chunk_items, given.program), Path(folder), given.timeout_s)
    text = page(results)
    print(text)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
        given.json.with_suffix(".md").write_text(text)
    return 0 if results.good else 1


if __name__ == "__main__":
    sys.exit(main())
