"""Several Redis servers as one job queue: what the gateway's and the worker's end share.

Each server is a shard with all that a single one has: streams, reply streams, heartbeats, records. An end has one end of the
single-server queue per shard, and every state is that of a shard: unavailable, forgotten, what is to be cancelled there.

A command for all shards waits at most `SLOW_S`; a shard that has not answered by then is unavailable.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Generic, TypeVar

from exec_wire.queue.protocol import QueueUnavailable
from exec_wire.supervisor import logged

log = logging.getLogger("exec_wire.redis")

SLOW_S, GRACE_S = 0.5, 0.05  # a server that needs longer for a command does not hold up the others
RETRY_S = 0.3

E = TypeVar("E")
S = TypeVar("S", bound="Shard[Any]")
T = TypeVar("T")


def owner(name: str, shards: Collection[str]) -> str:
    """The shard of a name, by rendezvous hashing: a shard that is added takes its part of the names, no other name moves."""
    return max(shards, key=lambda shard: hashlib.blake2b(f"{shard}\0{name}".encode(), digest_size=8).digest())


class Shard(Generic[E]):
    """One server and the end of its queue."""

    def __init__(self, name: str, end: E) -> None:
        self.name, self.end = name, end
        self.unavailable_because = ""  # not empty while the server cannot be used: the reason

    @property
    def available(self) -> bool:
        return not self.unavailable_because

    def failed(self, why: str) -> None:
        if self.available:
            log.warning("%s; the other servers of the queue are used", why, extra={"shard": self.name})
        self.unavailable_because = why

    def reached(self) -> None:
        if not self.available:
            log.warning("a server of the queue is available again", extra={"shard": self.name})
        self.unavailable_because = ""


def all_unavailable(shards: Collection[Shard[Any]]) -> QueueUnavailable | None:
    if any(shard.available for shard in shards):
        return None
    return QueueUnavailable("; ".join(shard.unavailable_because for shard in shards), sent=True)


class Background:
    """Tasks that nobody awaits; their failures are logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], failure: str) -> asyncio.Task[T]:
        task = logged(asyncio.create_task(work), failure)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


async def wait_a_little(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Until all are done, but at most `SLOW_S`. If the event loop itself was late, answers that are there are read."""
    if tasks:
        _, pending = await asyncio.wait(tasks, timeout=SLOW_S)
        if pending:
            await asyncio.wait(pending, timeout=GRACE_S)


async def ask_each(shards: Collection[S], ask: Callable[[S], Awaitable[T]], background: Background) -> dict[S, T]:
    """The answers of the shards that answer in time. The others are unavailable; their answers may come later."""

    async def guarded(shard: S) -> tuple[T] | None:
        try:
            return (await ask(shard),)
        except QueueUnavailable as error:
            shard.failed(str(error))
            return None

    tasks = {shard: background.start(guarded(shard), "a server was not asked") for shard in shards}
    await wait_a_little(tasks.values())
    answers: dict[S, T] = {}
    for shard, task in tasks.items():
        if not task.done():
            shard.failed(f"{shard.name}: no answer within {SLOW_S:g} s")
        elif (found := task.result()) is not None:
            [answers[shard]] = found
    return answers


class Merged(Generic[S, T]):
    """One reader of something that every shard has. A read is under way at each, and goes on when the reader is cancelled."""

    def __init__(self, shards: Collection[S], read: Callable[[S], Awaitable[list[T]]]) -> None:
        self._shards, self._read = shards, read
        self._reads: dict[S, asyncio.Task[list[T]]] = {}

    async def next(self) -> list[tuple[S, T]]:
        """What has come from any shard, at least one.

        Raises:
            QueueUnavailable: no shard can be used.
        """
        while True:
            for shard in self._shards:
                if shard not in self._reads:
                    self._reads[shard] = asyncio.create_task(self._read_one(shard))
            await asyncio.wait(self._reads.values(), return_when=asyncio.FIRST_COMPLETED)
            ended = [shard for shard, read in self._reads.items() if read.done()]
            if items := [(shard, item) for shard in ended for item in self._reads.pop(shard).result()]:
                return items
            if unavailable := all_unavailable(self._shards):
                raise unavailable

    async def _read_one(self, shard: S) -> list[T]:
        try:
            return await self._read(shard)
        except QueueUnavailable:
            await asyncio.sleep(RETRY_S)
            return []

    def close(self) -> None:
        for read in self._reads.values():
            read.cancel()
