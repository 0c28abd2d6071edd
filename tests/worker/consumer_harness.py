"""A worker's loop between a queue in memory and a pool whose programs do what the test says."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sandbox_harness import call_of

from exec_wire import Call, Result, Sandbox, pack, unpack_result, verdict
from exec_wire.queue.memory import MemoryQueue, MemoryWorkerEnd
from exec_wire.queue.protocol import Answer, Job, QueueUnavailable
from worker.consumer import Consumer
from worker.slots import Slots


class ScriptedPool(Slots):
    """A pool whose programs do what the test says, in turn."""

    sandbox = Sandbox("A", ["all"])
    profiles = ["bare"]
    languages = ["python"]
    missing: dict[str, str] = {}
    alive = True

    def __init__(self, *ends: Any, slots: int = 1, holds: int = 0) -> None:
        super().__init__(slots)
        self.holds = holds
        self._ends = list(ends)
        self.starts = 0

    @property
    def to_hold(self) -> int:
        return self.holds

    async def run(self, call: Call, slot: int, remaining_s: float) -> Result:
        self.starts += 1
        end = self._ends.pop(0) if self._ends else verdict("ok")
        if isinstance(end, asyncio.Event):
            await end.wait()
            return verdict("ok")
        if isinstance(end, Result):
            return end
        raise end


class SessionRouter:
    """The gateway's side of a queue with one worker."""

    def __init__(self, queue: MemoryQueue, consumer: Consumer) -> None:
        self._queue, self._gateway = queue, queue.gateway("g")
        self.consumer = consumer
        self._numbers = 0

    async def send(self, code: str = "pass", *, remaining_s: float = 30.0, deliveries: int = 1, **fields: Any) -> str:
        self._numbers += 1
        id = f"job{self._numbers}"
        job = Job(id, pack(call_of(code, **fields)), round(remaining_s * 1000), "g", deliveries=deliveries)
        await self._gateway.publish([job])
        return id

    async def answers(self, count: int = 1) -> dict[str, Result]:
        found: dict[str, Result] = {}
        async with asyncio.timeout(30):
            while len(found) < count:
                for answer in await self._gateway.receive():
                    assert answer.id not in found
                    found[answer.id] = unpack_result(answer.payload)
        return found

    async def ask(self, code: str = "pass", **fields: Any) -> Result:
        id = await self.send(code, **fields)
        return (await self.answers())[id]

    async def cancel(self, id: str) -> None:
        await self._gateway.cancel([id])

    def tell_cancelled(self, *ids: str) -> None:
        """As the queue does, whether or not the worker has these jobs."""
        self._queue.cancels["w"].put(ids)

    async def slots(self) -> list[int]:
        return [info.slots for info in await self._gateway.workers()]


@asynccontextmanager
async def desk(pool: Any) -> AsyncIterator[SessionRouter]:
    queue = MemoryQueue()
    async with Consumer("w", pool, queue.worker("w")) as consumer:
        yield SessionRouter(queue, consumer)


class FailingEnd:
    """A worker's end of a queue whose `take` raises what the test says, and else does as the real one."""

    def __init__(self, end: MemoryWorkerEnd) -> None:
        self._end = end
        self.raises: list[BaseException] = []
        self.away = False
        self.takes = 0

    async def hand_back(self, ids: Sequence[str]) -> list[str]:
        self._check()
        return await self._end.hand_back(ids)

    async def started(self, ids: Sequence[str]) -> None:
        self._check()
        await self._end.started(ids)

    async def answer(self, answers: Sequence[Answer]) -> None:
        self._check()
        await self._end.answer(answers)

    def _check(self) -> None:
        if self.away:
            raise QueueUnavailable("the server is away", sent=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    async def take(self, most: int, **how: Any) -> list[Job]:
        self.takes += 1
        if self.raises:
            raise self.raises.pop(0)
        return await self._end.take(most, **how)
