"""The worker's end of a queue that is several Redis servers (`exec_wire.queue.shards`).

Taking must not bring more jobs than were asked for. So the servers are asked one after the other, without waiting, until there
are enough jobs. If there are none, a read waits at every server. While there is room for a job of every server, these reads go
on after one has brought a job; else they are ended. What one brings all the same is handed back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from exec_wire.queue.protocol import Answer, Job, QueueUnavailable, WorkerInfo
from exec_wire.queue.redis_worker import RedisWorkerEnd
from exec_wire.queue.shards import RETRY_S, Background, Merged, Shard, all_unavailable, ask_each

SILENT_S = 0.1  # a server that does not answer within this time is asked beside the others
UNTAKEN_S = 0.1  # a job that a read brings while nobody takes jobs is handed back after this time


class _WorkerShard(Shard[RedisWorkerEnd]):
    def __init__(self, name: str, end: RedisWorkerEnd) -> None:
        super().__init__(name, end)
        self.read: asyncio.Task[list[Job]] | None = None  # its jobs were not returned yet
        self.waiting = False  # the read waits for a job
        self.unsent: set[str] = set()  # jobs whose answer could not be sent


class ShardedWorkerEnd:
    def __init__(self, ends: Mapping[str, RedisWorkerEnd]) -> None:
        """`ends`: by the names of their shards."""
        self.unreadable: Counter[str] = Counter()
        self._shards = [_WorkerShard(name, end) for name, end in ends.items()]
        for shard in self._shards:
            shard.end.unreadable = self.unreadable
        self._turn = 0
        self._taking = self._left = False
        self._background = Background()
        self._directed = Merged(self._shards, lambda shard: shard.end.take_directed())
        self._cancels = Merged(self._shards, lambda shard: shard.end.cancelled())

    @property
    def stranded(self) -> int:
        return sum(len(shard.unsent) for shard in self._shards)

    @property
    def states(self) -> dict[str, bool]:
        return {shard.name: shard.available for shard in self._shards}

    async def announce(self, info: WorkerInfo) -> None:
        info = replace(info, shards=[shard.name for shard in self._shards])

        async def heartbeat(shard: _WorkerShard) -> None:
            await shard.end.announce(info)
            shard.reached()

        await ask_each(self._shards, heartbeat, self._background)
        self._check_available()

    def _check_available(self) -> None:
        if unavailable := all_unavailable(self._shards):
            raise unavailable

    # -- taking -----------------------------------------------------------------------------------------------------------

    async def take(self, most: int, *, hold: int = 0, wait: bool = True) -> list[Job]:
        self._taking = True
        try:
            jobs = await self._take(most, hold, wait)
        finally:
            self._taking = False
        if most - len(jobs) < len(self._shards):
            for shard in self._shards:
                if shard.waiting:
                    self._end_read(shard)
        return jobs

    async def _take(self, most: int, hold: int, wait: bool) -> list[Job]:
        while not self._left:
            if jobs := self._read_jobs(most + hold) or await self._ask_in_turn(most, hold):
                return jobs
            if not wait:
                return []
            for shard in self._idle():
                self._start_read(shard, 1, 0, wait=True)
            await self._wait_for_read()
            if not (jobs := self._read_jobs(most + hold)):
                self._check_available()
            else:
                return jobs
        return await asyncio.Future()  # no jobs after `leave`

    async def _wait_for_read(self) -> None:
        """Until one ends; not for long while some server is not read, because it may be usable again."""
        reads = {shard.read for shard in self._shards if shard.read is not None}
        some = len(reads) < len(self._shards)
        if reads:
            await asyncio.wait(reads, timeout=RETRY_S if some else None, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(RETRY_S)

    async def _ask_in_turn(self, most: int, hold: int) -> list[Job]:
        """Jobs that are there now, of one shard after the other: it is each one's turn to be the first."""
        jobs: list[Job] = []
        self._turn += 1
        idle = self._idle()
        for shard in idle[self._turn % max(1, len(idle)) :] + idle[: self._turn % max(1, len(idle))]:
            if len(jobs) == most + hold:
                break
            starts = max(0, most - len(jobs))
            read = self._start_read(shard, starts, most + hold - len(jobs) - starts, wait=False)
            if shard.available:
                await asyncio.wait({read}, timeout=SILENT_S)
            jobs += self._read_jobs(most + hold - len(jobs))
        return jobs

    def _idle(self) -> list[_WorkerShard]:
        """Those to read from. One that cannot be sent the answers of its jobs gives no more."""
        return [shard for shard in self._shards if shard.read is None and not shard.unsent]

    def _start_read(self, shard: _WorkerShard, most: int, hold: int, wait: bool) -> asyncio.Task[list[Job]]:
        shard.waiting = wait
        shard.read = read = asyncio.create_task(self._read(shard, most, hold, wait))
        read.add_done_callback(lambda _: self._read_ended(shard, read))
        return read

    async def _read(self, shard: _WorkerShard, most: int, hold: int, wait: bool) -> list[Job]:
        try:
            return await shard.end.take(most, hold=hold, wait=wait)
        except QueueUnavailable as error:
            shard.failed(str(error))
            await asyncio.sleep(RETRY_S)
            return []

    def _read_jobs(self, most: int) -> list[Job]:
        """The jobs of the reads that have ended. What is more than `most` is handed back."""
        jobs: list[Job] = []
        for shard in self._shards:
            if shard.read is not None and shard.read.done() and not shard.read.cancelled():
                found, shard.read, shard.waiting = shard.read.result(), None, False
                room = most - len(jobs)
                jobs += found[:room]
                if found[room:]:
                    ids = [job.id for job in found[room:]]
                    self._background.start(shard.end.hand_back(ids), "surplus jobs were not handed back, their leases expire")
        return jobs

    def _read_ended(self, shard: _WorkerShard, read: asyncio.Task[list[Job]]) -> None:
        def hand_back() -> None:
            if shard.read is read and not self._taking:
                self._read_jobs(0)

        if not self._taking and not read.cancelled() and read.result():
            asyncio.get_running_loop().call_later(UNTAKEN_S, hand_back)

    def _end_read(self, shard: _WorkerShard) -> None:
        shard.waiting = False
        self._background.start(self._stop_waiting(shard), "a read was not ended")

    async def _stop_waiting(self, shard: _WorkerShard) -> None:
        try:
            await shard.end.stop_waiting()
        except QueueUnavailable as error:
            shard.failed(str(error))

    async def started(self, ids: Sequence[str]) -> None:
        for shard in self._shards:
            if own := [id for id in ids if shard.end.has(id)]:
                await shard.end.started(own)

    async def hand_back(self, ids: Sequence[str]) -> list[str]:
        held = {shard: own for shard in self._shards if (own := [id for id in ids if shard.end.has(id)])}
        answers = await ask_each(held, lambda shard: shard.end.hand_back(held[shard]), self._background)
        return [id for back in answers.values() for id in back]

    async def take_directed(self) -> list[Job]:
        return [job for _, job in await self._directed.next()]

    # -- leases, answers --------------------------------------------------------------------------------------------------

    async def renew(self, ids: Sequence[str]) -> None:
        for shard in self._shards:
            shard.unsent.intersection_update(ids)
        await ask_each(self._shards, lambda shard: shard.end.renew(ids), self._background)
        self._check_available()

    async def answer(self, answers: Sequence[Answer]) -> None:
        for shard in self._shards:
            if own := [answer for answer in answers if shard.end.has(answer.id)]:
                await self._answer(shard, own)

    async def _answer(self, shard: _WorkerShard, answers: list[Answer]) -> None:
        ids = [answer.id for answer in answers]
        try:
            await shard.end.answer(answers)
        except QueueUnavailable as error:
            shard.failed(str(error))
            shard.unsent.update(ids)
            raise
        shard.unsent.difference_update(ids)

    async def cancelled(self) -> list[str]:
        return [id for _, id in await self._cancels.next()]

    async def leave(self) -> None:
        self._left = True
        self._directed.close()
        self._cancels.close()
        await asyncio.gather(*(shard.end.leave() for shard in self._shards))
        for shard in self._shards:
            if shard.read is not None:
                shard.read.cancel()
        self._background.close()
