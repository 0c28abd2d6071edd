"""A real gateway under a real server on a free port, the in-memory queue, and a worker without a sandbox.

The worker does what the call's code says: `say TEXT`, `hold` (until `worker.let_go`), `silent` (never answers),
`fail` (exit code 1), `lose` (an infra failure), `garbage` (an answer that cannot be read), `twice` (answers two times),
`echo` (its stdin), `flaky N` (an infra failure the first N times, then its stdin), `end STATUS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec

from exec_service.app import Gateway, serve
from exec_service.config import GatewayConfig
from exec_wire.messages.calls import Call, Result, Timings, pack, unpack_call, verdict
from exec_wire.queue.memory import MemoryQueue, MemoryWorkerEnd
from exec_wire.queue.protocol import Answer, Job, WorkerInfo
from exec_wire.queue.redis import RedisQueue
from loadtest.support.processes import free_port

T = TypeVar("T")
JSON = {"content-type": "application/json"}


class ScriptedWorker:
    def __init__(
        self,
        queue: MemoryQueue | RedisQueue,
        name: str = "w1",
        slots: int = 4,
        tier: str = "A",
        needs: tuple[str, ...] = ("python",),
    ) -> None:
        self.end = queue.worker(name)
        layers = ["seccomp", "landlock"]
        self.info = WorkerInfo(
            name, slots, needs=list(needs), tier=tier, layers=layers, profiles=["bare"], missing_layers=["cgroup"]
        )
        self.let_go = asyncio.Event()
        self.jobs: list[Job] = []  # every job taken, in order
        self.calls: list[Call] = []
        self.cancelled: list[str] = []
        self.kill_gate = asyncio.Event()  # closed: what was cancelled takes long to die
        self.kill_gate.set()
        self.deaf = False  # hears no cancellation
        self._running: dict[str, asyncio.Task[None]] = {}
        self._free = asyncio.Semaphore(slots)

    async def __aenter__(self) -> ScriptedWorker:
        await self.end.announce(self.info)
        self._tasks = [asyncio.create_task(loop()) for loop in (self._announce, self._take, self._listen)]
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._tasks, *self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.end.leave()

    @property
    def codes(self) -> list[str]:
        return [call.code for call in self.calls]

    async def _announce(self) -> None:
        while True:
            await self.end.announce(self.info)
            await self.end.renew(list(self._running))
            await asyncio.sleep(0.5)

    async def _take(self) -> None:
        while True:
            await self._free.acquire()
            [job] = await self.end.take(1)
            self.jobs.append(job)
            self.calls.append(unpack_call(job.payload))
            self._running[job.id] = asyncio.create_task(self._run(job, self.calls[-1]))

    async def _listen(self) -> None:
        while True:
            for id in await self.end.cancelled():
                self.cancelled.append(id)
                if id in self._running and not self.deaf:
                    self._running[id].cancel()

    async def _run(self, job: Job, call: Call) -> None:
        try:
            await self._perform(job, call)
        except asyncio.CancelledError:
            if job.id in self.cancelled:  # else the worker itself stops
                await self.kill_gate.wait()
                await self.end.answer([Answer(job.id, pack(verdict("cancelled", worker=self.info.id)), stay_ms=3.0)])
            raise
        finally:
            self._running.pop(job.id, None)
            self._free.release()

    def _flaky(self, call: Call, failures: int) -> Result:
        met = sum(other.code == call.code and other.stdin == call.stdin for other in self.calls)
        return verdict("worker_lost", error="lost") if met <= failures else verdict("ok", stdout=call.stdin)

    async def _perform(self, job: Job, call: Call) -> None:
        verb, _, text = call.code.partition(" ")
        if verb == "hold":
            await self.let_go.wait()
        if verb == "silent":
            await asyncio.Event().wait()
        if verb == "garbage":
            await self.end.answer([Answer(job.id, b"\xc1")])
            return
        result = {
            "fail": lambda: verdict("error", exit_code=1),
            "lose": lambda: verdict("worker_lost", error="lost"),
            "echo": lambda: verdict("ok", stdout=call.stdin),
            "flaky": lambda: self._flaky(call, int(text)),
            "end": lambda: verdict(text),  # type: ignore[arg-type]
        }.get(verb, lambda: verdict("ok", stdout=text, completed=True))()
        result.worker = self.info.id
        result.timings = Timings(start_ms=1.0, run_ms=2.0)
        answer = Answer(job.id, pack(result), stay_ms=3.0, record=result.blame != "infra")
        await self.end.answer([answer])
        if verb == "twice":
            assert isinstance(self.end, MemoryWorkerEnd)
            self.end._reply_to[job.id] = job.reply_to  # as a worker does whose lease went to another one
            await self.end.answer([answer])


@dataclass
class Service:
    url: str
    client: httpx.AsyncClient
    gateway: Gateway
    queue: MemoryQueue
    worker: ScriptedWorker
    stop: asyncio.Event

    @property
    def grpc_target(self) -> str:
        return f"127.0.0.1:{self.gateway.config.grpc_port}"

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    async def run(self, code: str = "say hi", **fields: object) -> httpx.Response:
        return await self.client.post("/v1/run", json={"code": code, **fields})

    async def batch(self, *calls: object, **query: str) -> httpx.Response:
        return await self.client.post("/v1/batch", json={"calls": list(calls)}, params=query)

    async def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0


def lines(response: httpx.Response) -> list[Result]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return msgspec.json.Decoder(Result).decode_lines(response.content)


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The body of an error answer, checked for what all of them have."""
    assert (response.status_code, response.headers["content-type"]) == (status, "application/problem+json"), response.text
    body: dict[str, Any] = response.json()
    assert (body["code"], body["status"]) == (code, status), body
    assert body["request_id"] == response.headers["x-request-id"]
    return body


def soon(coroutine: Coroutine[object, object, T]) -> asyncio.Task[T]:
    return asyncio.create_task(coroutine)


async def until(true: Callable[[], bool], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110 - any condition, not only one that somebody signals
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(gateway: Gateway, stop: asyncio.Event) -> AsyncIterator[str]:
    urls: asyncio.Queue[str] = asyncio.Queue()
    task = asyncio.create_task(serve(gateway, stop=stop, listening=urls.put_nowait))
    try:
        yield await asyncio.wait_for(urls.get(), 30)
    finally:
        stop.set()
        await asyncio.wait_for(task, 30)


@asynccontextmanager
async def running(
    *, slots: int = 4, tier: str = "A", worker: bool = True, grpc: bool = False, **settings: object
) -> AsyncIterator[Service]:
    grpc_port = free_port() if grpc else 0
    defaults: dict[str, object] = {"port": 0, "workers_refresh_s": 0.02, "drain_s": 0.2, "grpc_port": grpc_port}
    config = msgspec.convert(defaults | settings, GatewayConfig)
    queue = MemoryQueue()
    scripted = ScriptedWorker(queue, slots=slots, tier=tier)
    gateway = Gateway(config, queue.gateway("g1"))
    stop = asyncio.Event()
    # Left in the reverse order: the client hangs up, the server drains, then the tasks and the worker stop.
    async with (
        gateway,
        _maybe(scripted if worker else None),
        serving(gateway, stop) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        if worker:
            await gateway.worker_registry.refresh()
            gateway.dispatch.release.look_again()
        yield Service(url, client, gateway, queue, scripted, stop)


@asynccontextmanager
async def _maybe(worker: ScriptedWorker | None) -> AsyncIterator[None]:
    if worker is None:
        yield
        return
    async with worker:
        yield


async def raw_request(
    port: int, request: bytes, read: Callable[[asyncio.StreamReader], Awaitable[bytes]] | None = None
) -> bytes:
    """Bytes as they are, for what an HTTP library would refuse to send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        await writer.drain()
        return await asyncio.wait_for(read(reader) if read else reader.read(65536), 30)
    finally:
        writer.close()
