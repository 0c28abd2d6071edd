"""The gateway's end of a queue that is several Redis servers (`exec_wire.queue.shards`)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from exec_wire.messages.calls import Selection
from exec_wire.queue.protocol import (
    FORGOTTEN_S,
    NO_USE,
    RECONCILE_S,
    RECORD_S,
    Answer,
    Ask,
    GatewayInfo,
    Job,
    QueueUnavailable,
    ShardState,
    ShardsUnavailable,
    TenantUse,
    WorkerInfo,
)
from exec_wire.queue.redis_gateway import RedisGatewayEnd
from exec_wire.queue.shards import Background, Merged, Shard, all_unavailable, ask_each, owner, wait_a_little


@dataclass(eq=False, slots=True)
class _Published:
    """A job without an answer, and where it may be."""

    shard: _GatewayShard
    needs: str
    at: float
    counted: bool = True  # as unanswered there; not any more if it is to be published again


class _GatewayShard(Shard[RedisGatewayEnd]):
    def __init__(self, name: str, end: RedisGatewayEnd, former: bool) -> None:
        super().__init__(name, end)
        self.former = former  # gets no new jobs
        self.others: list[GatewayInfo] = []
        self.workers: list[WorkerInfo] = []
        self.classes: frozenset[str] = frozenset()  # that a live worker there can run
        self.unanswered: Counter[str] = Counter()  # jobs by class
        self.to_cancel: list[str] = []  # could not be cancelled while the server was unavailable
        self._forgotten, self._forgetful_until = 0, float("-inf")

    def is_forgetful(self, now: float) -> bool:
        """It lost everything so recently that something may still be missing."""
        if self.end.forgotten > self._forgotten:
            self._forgotten, self._forgetful_until = self.end.forgotten, now + RECONCILE_S
        return now < self._forgetful_until


class ShardedGatewayEnd:
    shared = True

    def __init__(self, name: str, ends: Mapping[str, RedisGatewayEnd], former: Sequence[str] = ()) -> None:
        """`ends`: by the names of their shards. `former`: those that get no new jobs."""
        self.name = name
        self.unreadable: Counter[str] = Counter()
        self._clock: Callable[[], float] = time.monotonic
        self._shards = [_GatewayShard(shard, end, shard in former) for shard, end in ends.items()]
        for shard in self._shards:
            shard.end.unreadable = self.unreadable
        self._by_name = {shard.name: shard for shard in self._shards}
        self._names = [shard.name for shard in self._shards if not shard.former]  # may own records
        self._published: dict[str, _Published] = {}
        self._unpublished: set[str] = set()  # jobs whose publication failed after `publish` returned
        self._failed_late = 0
        self._workers: dict[str, WorkerInfo] = {}
        # After a change of shards, records that live are where the former owners of their names are. Another gateway may know
        # other shards for longer than this one has run.
        self._ask_all_until = self._clock() + RECORD_S
        self._asks: dict[str, _GatewayShard] = {}  # where each came from
        self._background = Background()
        self._answers = Merged(self._shards, self._receive)
        self._asked = Merged(self._shards, lambda shard: shard.end.asked())

    @property
    def shards(self) -> ShardedGatewayEnd:
        return self

    @property
    def forgotten(self) -> int:
        return self._failed_late + sum(shard.end.forgotten for shard in self._shards)

    # -- heartbeats -------------------------------------------------------------------------------------------------------

    async def announce(self, backlog: bool, tenants: Mapping[str, TenantUse] = NO_USE) -> list[GatewayInfo]:
        async def heartbeat(shard: _GatewayShard) -> None:
            shard.others = await shard.end.announce(backlog, tenants)
            shard.reached()
            ids, shard.to_cancel = shard.to_cancel, []
            await self._cancel_at(shard, ids)

        await ask_each(self._shards, heartbeat, self._background)
        self._check_available()
        others = {other.id: other for shard in self._available() for other in shard.others}
        if any(set(other.shards) != self._by_name.keys() for other in others.values()):
            self._ask_all_until = self._clock() + RECORD_S
        return list(others.values())

    async def workers(self) -> list[WorkerInfo]:
        async def look(shard: _GatewayShard) -> None:
            shard.workers = await shard.end.workers()
            shard.classes = frozenset(needs for info in shard.workers if info.slots for needs in info.classes)

        await ask_each(self._available(), look, self._background)
        self._check_available()
        self._workers = {info.id: info for shard in self._available() for info in shard.workers}
        return sorted(self._workers.values(), key=lambda info: info.id)

    def _available(self) -> list[_GatewayShard]:
        return [shard for shard in self._shards if shard.available]

    def _check_available(self) -> None:
        if unavailable := all_unavailable(self._shards):
            raise unavailable

    # -- where a job goes -------------------------------------------------------------------------------------------------

    def shard_of(self, id: str, record_as: str) -> str:
        if id in self._published:
            return self._published[id].shard.name
        return owner(record_as, self._names) if record_as else ""

    def is_open(self, shard: str, needs: str) -> bool:
        if shard:
            return self._is_open(self._by_name[shard], needs)
        return any(self._is_open(self._by_name[name], needs) for name in self._names)

    def _is_open(self, shard: _GatewayShard, needs: str) -> bool:
        return shard.available and needs in shard.classes

    @property
    def stranded(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for shard in self._shards:
            found.update({needs: count for needs, count in shard.unanswered.items() if not self._is_open(shard, needs)})
        return found

    @property
    def states(self) -> dict[str, ShardState]:
        return {shard.name: ShardState(shard.available, shard.unanswered.total()) for shard in self._shards}

    def _choose(self, job: Job) -> _GatewayShard:
        """The shard of its record, or the one with the fewest unanswered jobs of those with a worker for it."""
        if name := self.shard_of(job.id, job.record_as):
            return self._by_name[name]
        shards = [self._by_name[name] for name in self._names]
        usable = [shard for shard in shards if self._is_open(shard, job.needs)] or [one for one in shards if one.available]
        return min(usable or shards, key=lambda shard: shard.unanswered.total())

    # -- jobs and answers -------------------------------------------------------------------------------------------------

    async def publish(self, jobs: Sequence[Job]) -> None:
        parts: dict[_GatewayShard, list[Job]] = {}
        for job in jobs:
            shard = self._choose(job)
            parts.setdefault(shard, []).append(job)
            self._note(job, shard)
        tasks = {shard: self._background.start(self._publish_on(shard, part), "not published") for shard, part in parts.items()}
        await wait_a_little(tasks.values())
        failed: dict[str, bool] = {}
        for shard, task in tasks.items():
            if task.done():
                failed |= task.result()
            else:
                shard.failed(f"{shard.name}: slow to take jobs")
                task.add_done_callback(self._published_late)
        if failed:
            names = sorted({shard.name for shard, task in tasks.items() if task.done() and task.result()})
            raise ShardsUnavailable(", ".join(names), failed)

    async def _publish_on(self, shard: _GatewayShard, jobs: list[Job]) -> dict[str, bool]:
        """The jobs that could not be published, and whether they may be there."""
        try:
            await shard.end.publish(jobs)
        except QueueUnavailable as error:
            shard.failed(str(error))
            for job in jobs:
                self._uncount(job.id) if error.sent else self._forget(job.id)
            return {job.id: error.sent for job in jobs}
        return {}

    def _published_late(self, task: asyncio.Task[dict[str, bool]]) -> None:
        if not task.cancelled() and (failed := task.result()):
            self._unpublished.update(failed)
            self._failed_late += 1  # so that somebody asks what is missing

    def _note(self, job: Job, shard: _GatewayShard) -> None:
        self._forget(job.id)
        self._published[job.id] = _Published(shard, job.needs, self._clock())
        shard.unanswered[job.needs] += 1

    def _forget(self, id: str) -> None:
        self._unpublished.discard(id)
        self._uncount(id)
        self._published.pop(id, None)

    def _uncount(self, id: str) -> None:
        published = self._published.get(id)
        if published is not None and published.counted:
            published.counted = False
            published.shard.unanswered[published.needs] -= 1

    async def publish_to(self, worker: str, job: Job, pin: str = "") -> None:
        """On the shard that the pin chooses of those that the worker reads. As long as it lives they are the same."""
        info = self._workers.get(worker)
        shards = [name for name in info.shards if name in self._by_name] if info is not None else []
        await self._by_name[owner(pin or worker, shards or self._names)].end.publish_to(worker, job)

    async def receive(self) -> list[Answer]:
        answers = [answer for _, answer in await self._answers.next()]
        for answer in answers:
            self._forget(answer.id)
        return answers

    async def _receive(self, shard: _GatewayShard) -> list[Answer]:
        try:
            return await shard.end.receive()
        except QueueUnavailable as error:
            shard.failed(str(error))
            raise

    async def cancel(self, ids: Sequence[str]) -> list[str]:
        of_shard: dict[_GatewayShard, list[str]] = {}
        for id in ids:
            if id in self._published:
                of_shard.setdefault(self._published[id].shard, []).append(id)
                self._forget(id)
        for shard in [shard for shard in of_shard if not shard.available]:
            shard.to_cancel += of_shard.pop(shard)
        found = await ask_each(list(of_shard), lambda shard: self._cancel_at(shard, of_shard[shard]), self._background)
        return [id for untaken in found.values() for id in untaken]

    async def _cancel_at(self, shard: _GatewayShard, ids: list[str]) -> list[str]:
        try:
            return await shard.end.cancel(ids) if ids else []
        except QueueUnavailable:
            shard.to_cancel += ids
            raise

    async def missing(self, ids: Sequence[str]) -> list[str]:
        now, lost = self._clock(), [id for id in ids if id in self._unpublished]
        of_shard: dict[_GatewayShard, list[str]] = {}
        for id in ids:
            published = self._published.get(id)
            if published is None or id in self._unpublished or not published.shard.available:
                continue
            # After a shard has forgotten, the caller also asks for younger jobs. Those of the other shards are not missing.
            if not self.forgotten or now - published.at >= (FORGOTTEN_S if published.shard.is_forgetful(now) else RECONCILE_S):
                of_shard.setdefault(published.shard, []).append(id)
        found = await ask_each(list(of_shard), lambda shard: shard.end.missing(of_shard[shard]), self._background)
        lost += [id for gone in found.values() for id in gone]
        for id in lost:
            self._uncount(id)
        return lost

    async def recorded(self, names: Sequence[str]) -> list[bytes | None]:
        ask_all = self._clock() < self._ask_all_until
        of_shard: dict[_GatewayShard, list[str]] = {}
        for name in names:
            first = self._by_name[owner(name, self._names)]
            for shard in self._available():
                if shard is first or shard.former or ask_all:
                    of_shard.setdefault(shard, []).append(name)
        answers = await ask_each(list(of_shard), lambda shard: shard.end.recorded(of_shard[shard]), self._background)
        found: dict[str, bytes] = {}
        for shard, records in answers.items():
            found |= {name: record for name, record in zip(of_shard[shard], records, strict=True) if record is not None}
        return [found.get(name) for name in names]

    # -- other gateways ---------------------------------------------------------------------------------------------------

    async def ask_others(self, selection: Selection) -> int:
        """All gateways listen at every shard, so one of them is enough."""
        for shard in self._available():
            try:
                return await shard.end.ask_others(selection)
            except QueueUnavailable as error:
                shard.failed(str(error))
        self._check_available()
        return 0

    async def asked(self) -> list[Ask]:
        found = await self._asked.next()
        self._asks.update((ask.id, shard) for shard, ask in found)
        return [ask for _, ask in found]

    async def tell(self, ask: Ask, cancelled: int) -> None:
        await self._asks.pop(ask.id).end.tell(ask, cancelled)

    async def leave(self) -> None:
        self._answers.close()
        self._asked.close()
        await asyncio.gather(*(shard.end.leave() for shard in self._shards))
        self._background.close()
