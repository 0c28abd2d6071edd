"""Keeps bulk jobs going: hands the chunks that nobody works on to whoever runs chunks, a few at a time, the jobs in turn.

Every gateway has one; they need not know of each other, because a chunk that is handed out twice counts once, and the line in
front of those who run chunks is kept short by all of them together. What was handed out and lost, with a Celery worker or with
Redis, is handed out again: nobody's heartbeat is seen.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, zip_longest
from typing import NoReturn, Protocol

from msgspec import Struct

from exec_service.jobs.chunks import ChunkOptions, run_chunk
from exec_service.jobs.store import Heartbeat, JobMeta, JobStore, NoSuchJob
from exec_wire.messages.jobs import ENDED
from exec_wire.queue.protocol import QueueAway

log = logging.getLogger("exec_service.jobs.store")

LOOK_S = 0.5
STALE_S = 5.0  # a chunk whose heartbeat does not change for so long has nobody who works on it
SENT_S = 5.0  # a chunk that was handed out and has no heartbeat by then is handed out again
TROUBLE_S = 10.0  # a job whose chunks cannot go on is tried so often, with one chunk
SWEEP_S = 3600.0
PACE_S = 60.0

ChunkName = tuple[str, int]  # job, chunk


class ChunkQueue(Protocol):
    """Where chunks wait for somebody who runs them."""

    async def room(self) -> int:
        """How many more it should hold."""
        ...

    async def put(self, job: str, chunk: int) -> None: ...

    async def close(self) -> None: ...


class LocalChunkQueue:
    """Chunks are run here, in a thread: for a service on one machine, without Redis and Celery."""

    def __init__(self, store: JobStore, options: ChunkOptions, at_once: int = 1) -> None:
        self._store, self._options, self._at_once = store, options, at_once
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="chunk")
        self._running: set[asyncio.Future[bool]] = set()
        self._stopping = threading.Event()

    async def room(self) -> int:
        return 2 * self._at_once - len(self._running)  # one waits for each that runs, so that no thread does

    async def put(self, job: str, chunk: int) -> None:
        loop = asyncio.get_running_loop()
        run = loop.run_in_executor(self._threads, run_chunk, self._store, job, chunk, self._options, self._stopping)
        self._running.add(run)
        run.add_done_callback(self._ended)

    def _ended(self, run: asyncio.Future[bool]) -> None:
        self._running.discard(run)
        if not run.cancelled() and (error := run.exception()) is not None:
            log.error("a chunk failed; it will be tried again", exc_info=error)

    async def close(self) -> None:
        self._stopping.set()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._threads.shutdown()


class Progress(Struct, frozen=True):
    """How far a job is."""

    chunks_done: int
    done: int  # items


class Pace:
    """Items per second of the last minute, as far as somebody looked."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, done: int) -> None:
        now = time.monotonic()
        if self._seen and done < self._seen[-1][1]:  # a chunk was lost and begins anew
            self._seen.clear()
        self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[1][0] < now - PACE_S:
            self._seen.popleft()

    def per_s(self) -> float | None:
        if len(self._seen) < 2:
            return None
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return (last - first) / (now - began) if last > first and now > began else None


def progress_of(store: JobStore, meta: JobMeta, done: set[int], heartbeats: dict[int, Heartbeat]) -> Progress:
    going = {chunk: heartbeat.done for chunk, heartbeat in heartbeats.items()}
    unfinished = {chunk: items for chunk, items in (store.left(meta.id) | going).items() if chunk not in done}
    return Progress(len(done), sum(meta.chunks[chunk - 1] for chunk in done) + sum(unfinished.values()))


class JobScheduler:
    def __init__(self, store: JobStore, line: ChunkQueue, keep_s: float) -> None:
        self._store, self._line, self._keep_s = store, line, keep_s
        self._metas: dict[str, JobMeta] = {}
        self._ended: set[str] = set()
        self._unreadable: set[str] = set()
        self._paces: dict[str, Pace] = {}
        self._heartbeats: dict[ChunkName, tuple[Heartbeat, float]] = {}  # as seen, and since when it has not changed
        self._sent: dict[ChunkName, float] = {}
        self._tried: dict[str, float] = {}  # when a job in trouble was last given a chunk
        self._swept_at = float("-inf")

    def per_s(self, job: str) -> float | None:
        pace = self._paces.get(job)
        return pace.per_s() if pace is not None else None

    async def run_forever(self) -> NoReturn:
        while True:
            try:
                await self._look()
            except (QueueAway, OSError) as error:  # the folder or the broker is unavailable, and comes back
                log.warning(
                    "bulk jobs cannot be looked after; trying again", extra={"reason": f"{type(error).__name__}: {error}"}
                )
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        await self._line.close()

    async def _look(self) -> None:
        waiting = await asyncio.to_thread(self._waiting)
        room = await self._line.room() if waiting else 0
        for job, chunk in _in_turn(waiting):
            if room <= 0:
                break
            await self._line.put(job, chunk)
            self._sent[job, chunk] = time.monotonic()
            room -= 1

    def _waiting(self) -> list[Iterator[ChunkName]]:
        """For each job that is to run, the chunks that nobody works on."""
        if time.monotonic() - self._swept_at > SWEEP_S:
            self._store.sweep()
            self._swept_at = time.monotonic()
        ids = self._store.ids()
        self._unreadable &= set(ids)
        self._store.forget_outcomes_except(ids)
        for job in self._metas.keys() - set(ids):
            self._forget(job)
        found = []
        for job in ids:
            try:
                chunks = self._examine(job)
            except NoSuchJob:  # removed meanwhile
                continue
            except ValueError as error:  # one job that cannot be read does not hold up the others
                if job not in self._unreadable:
                    log.error("a bulk job cannot be read; it is left alone", extra={"job": job, "reason": str(error)})
                self._unreadable.add(job)
                continue
            if chunks is not None:
                found.append(chunks)
        return found

    def _examine(self, job: str) -> Iterator[ChunkName] | None:
        if job in self._ended:
            if self._store.idle_s(job) > self._keep_s:
                self._store.remove(job)
            return None
        meta = self._metas.get(job) or self._metas.setdefault(job, self._store.meta(job))
        done, heartbeats = self._store.chunks_done(job), self._store.running(job)
        state = self._store.state(meta, len(done))
        self._paces.setdefault(job, Pace()).note(progress_of(self._store, meta, done, heartbeats).done)
        if state in ENDED:
            self._store.retire(job)
            self._ended.add(job)
        if state != "running":
            self._paces.pop(job)
            self._unsend(job)
            return None
        in_trouble = bool(self._store.trouble(job))
        if in_trouble:
            self._unsend(job)
        busy = {chunk for chunk, heartbeat in heartbeats.items() if self._is_alive(job, chunk, heartbeat)}
        free = self._free(meta, done | busy)
        return self._one_now_and_then(job, free) if in_trouble else free

    def _one_now_and_then(self, job: str, free: Iterator[ChunkName]) -> Iterator[ChunkName]:
        """Enough to see that the trouble is over."""
        now = time.monotonic()
        if now - self._tried.get(job, -TROUBLE_S) >= TROUBLE_S:
            self._tried[job] = now
            yield from islice(free, 1)

    def _free(self, meta: JobMeta, taken: set[int]) -> Iterator[ChunkName]:
        now = time.monotonic()
        for chunk in range(1, len(meta.chunks) + 1):
            name = (meta.id, chunk)
            if chunk in taken:
                self._sent.pop(name, None)
            elif now - self._sent.get(name, -SENT_S) >= SENT_S:
                yield name

    def _is_alive(self, job: str, chunk: int, heartbeat: Heartbeat) -> bool:
        now = time.monotonic()
        seen, since = self._heartbeats.get((job, chunk), (None, now))
        if seen != heartbeat:
            self._heartbeats[job, chunk] = heartbeat, now
            return True
        if now - since < STALE_S:
            return True
        log.warning("a chunk made no progress; it is handed out again", extra={"job": job, "chunk": chunk})
        self._store.end(job, chunk)
        del self._heartbeats[job, chunk]
        return False

    def _unsend(self, job: str) -> None:
        """What was handed out was left, or will be: it may be handed out anew as soon as the job goes on."""
        for name in [name for name in self._sent if name[0] == job]:
            del self._sent[name]

    def _forget(self, job: str) -> None:
        del self._metas[job]
        self._ended.discard(job)
        self._paces.pop(job, None)
        self._tried.pop(job, None)
        self._unsend(job)
        for name in [name for name in self._heartbeats if name[0] == job]:
            del self._heartbeats[name]


def _in_turn(jobs: list[Iterator[ChunkName]]) -> Iterator[ChunkName]:
    """One chunk of each job, then the next of each."""
    return (name for name in chain.from_iterable(zip_longest(*jobs)) if name is not None)
