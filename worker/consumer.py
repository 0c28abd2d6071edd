"""Takes jobs from the queue as slots become free, has them run, and answers each exactly once.

What was lost with its zygote is started again, at most `MAX_STARTS` times over all workers that had it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from exec_wire import MAX_STARTS, Result, pack, unpack_call, verdict
from exec_wire.queue import RENEW_S, Answer, Job, WorkerInfo, WorkerQueue
from worker import languages
from worker.pool import Pool, SlotBusy, ZygoteLost

log = logging.getLogger("worker")

BUSY_PAUSE_S = 0.02


class Consumer:
    def __init__(self, name: str, pool: Pool, queue: WorkerQueue) -> None:
        self._name, self._pool, self._queue = name, pool, queue
        self._running: dict[str, asyncio.Task[None]] = {}
        self._slot_free = asyncio.Event()
        self._slot_free.set()
        self._background: list[asyncio.Task[None]] = []
        self._draining = False

    async def __aenter__(self) -> Consumer:
        await self._queue.announce(self._info())
        self._take_task = asyncio.create_task(self._take_forever())
        self._background = [asyncio.create_task(loop()) for loop in (self._renew_forever, self._cancel_forever)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain(patience_s=0)
        for task in self._background:
            task.cancel()
        await self._queue.leave()

    async def drain(self, patience_s: float) -> None:
        """Stop taking; finish what runs, or after `patience_s` hand it back to be run elsewhere."""
        self._draining = True
        self._take_task.cancel()
        if self._running and patience_s > 0:
            await asyncio.wait(self._running.values(), timeout=patience_s)
        for task in list(self._running.values()):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running.values())

    async def _take_forever(self) -> None:
        while True:
            await self._slot_free.wait()
            jobs = await self._queue.take(self._pool.free_slots)
            for job in jobs:
                slot = self._pool.take_slot()
                task = asyncio.create_task(self._work(job, slot))
                self._running[job.id] = task
                task.add_done_callback(self._ended(job.id, slot))
            if not self._pool.free_slots:
                self._slot_free.clear()

    def _ended(self, id: str, slot: int) -> Callable[[asyncio.Task[None]], None]:
        def end(task: asyncio.Task[None]) -> None:
            del self._running[id]
            self._pool.give_back(slot)
            self._slot_free.set()
            if not task.cancelled() and task.exception() is not None:
                log.error("a job was not answered", exc_info=task.exception())

        return end

    async def _work(self, job: Job, slot: int) -> None:
        received = time.monotonic()
        try:
            result = await self._run(job, slot, received)
        except asyncio.CancelledError:
            if self._draining:
                raise  # handed back with the lease, to be run elsewhere
            result = verdict("cancelled")
        except Exception as error:  # the outermost place that can act: the job is answered, whatever happened
            log.exception("a call failed inside the worker")
            result = verdict("internal_error", error=f"{type(error).__name__} in the worker")
        result.worker = self._name
        stay_ms = (time.monotonic() - received) * 1000
        await self._queue.answer([Answer(job.id, pack(result), stay_ms)])

    async def _run(self, job: Job, slot: int, received: float) -> Result:
        call = unpack_call(job.payload)
        starts = job.deliveries - 1  # by workers that did not come back
        while True:
            remaining_s = job.remaining_ms / 1000 - (time.monotonic() - received)
            if starts >= MAX_STARTS:
                return verdict("worker_lost", starts=starts, error="every worker that started this program was lost")
            if remaining_s <= 0:
                return verdict("expired", error="the deadline passed before the program started")
            try:
                return await self._pool.run(call, slot, remaining_s)
            except ZygoteLost:
                starts += 1
            except SlotBusy:
                await asyncio.sleep(BUSY_PAUSE_S)
            except TimeoutError:
                return verdict("expired", error="no warm interpreter before the deadline")

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._queue.renew(list(self._running))
            if not self._draining and self._pool.alive:  # else the gateways see us go, and say so
                await self._queue.announce(self._info())

    async def _cancel_forever(self) -> None:
        while True:
            for id in await self._queue.cancelled():
                if id in self._running:
                    self._running[id].cancel()

    def _info(self) -> WorkerInfo:
        pool = self._pool
        return WorkerInfo(
            self._name,
            pool.slots,
            pool.slots - pool.free_slots,
            needs=languages.installed(),
            tier=pool.sandbox.tier,
            layers=pool.sandbox.layers,
            profiles=pool.profiles,
            missing_layers=list(pool.missing),
        )
