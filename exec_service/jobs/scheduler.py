"""Hands chunks of bulk jobs that no runner has to a chunk queue, a few at a time, one job after the other.

Every gateway has a scheduler. They do not coordinate: a chunk that is handed out twice counts once, and all of them together
keep the chunk queue short. A chunk that was lost with a Celery worker or Redis has no heartbeat and is handed out again.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, zip_longest
from typing import NoReturn, Protocol

from msgspec import Struct, field

from exec_service.jobs.chunks import ChunkOptions, run_chunk
from exec_service.jobs.store import Heartbeat, JobMeta, JobStore, NewerJob, NoSuchJob
from exec_wire.messages.jobs import ENDED
from exec_wire.queue.protocol import QueueUnavailable

log = logging.getLogger("exec_service.jobs.scheduler")

LOOK_S = 0.5
STALE_S = 5.0  # a chunk whose heartbeat does not change for this long has no runner
SENT_S = 5.0  # a chunk that was handed out and has no heartbeat by then is handed out again
TROUBLE_S = 10.0  # between two attempts of a job whose chunks cannot continue; each attempt is one chunk
SWEEP_S = 3600.0
PACE_S = 60.0

ChunkName = tuple[str, int]  # job, chunk


class ChunkQueue(Protocol):
    """Chunks that wait for a runner."""

    async def room(self) -> int:
        """How many more chunks it should hold."""
        ...

    async def put(self, job: str, chunk: int) -> None: ...

    async def close(self) -> None: ...


class LocalChunkQueue:
    """Runs chunks in threads of this process: for a service on one machine, without Redis and Celery."""

    def __init__(self, store: JobStore, options: ChunkOptions, at_once: int = 1) -> None:
        self._store, self._options, self._at_once = store, options, at_once
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="chunk")
        self._running: set[asyncio.Future[bool]] = set()
        self._stopping = threading.Event()

    async def room(self) -> int:
        return 2 * self._at_once - len(self._running)  # one waits for each that runs, so that no thread idles

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


def items_done(store: JobStore, meta: JobMeta, done: set[int], heartbeats: dict[int, Heartbeat]) -> int:
    begun = store.partly_done(meta.id) | {chunk: heartbeat.done for chunk, heartbeat in heartbeats.items()}
    in_unfinished = sum(items for chunk, items in begun.items() if chunk not in done)
    return sum(meta.chunks[chunk - 1] for chunk in done) + in_unfinished


class Pace:
    """Items per second in the last minute."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, done: int) -> None:
        now = time.monotonic()
        if self._seen and done < self._seen[-1][1]:  # a chunk was lost and starts over
            self._seen.clear()
        self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[1][0] < now - PACE_S:
            self._seen.popleft()

    def per_s(self) -> float | None:
        if len(self._seen) < 2:
            return None
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return (last - first) / (now - began) if last > first and now > began else None


class SeenJob(Struct):
    """What a scheduler knows of a job."""

    meta: JobMeta
    ended: bool = False
    pace: Pace = field(default_factory=Pace)
    heartbeats: dict[int, tuple[Heartbeat, float]] = {}  # the last one, and when it was first seen
    sent: dict[int, float] = {}  # when a chunk was last handed out
    tried: float = -TROUBLE_S  # when a job in trouble last got a chunk


class JobScheduler:
    def __init__(self, store: JobStore, queue: ChunkQueue, keep_s: float) -> None:
        self._store, self._queue, self._keep_s = store, queue, keep_s
        self._seen: dict[str, SeenJob] = {}
        self._unreadable: set[str] = set()
        self._swept_at = float("-inf")

    def per_s(self, job: str) -> float | None:
        seen = self._seen.get(job)
        return seen.pace.per_s() if seen is not None else None

    async def run_forever(self) -> NoReturn:
        while True:
            try:
                await self._hand_out()
            except (QueueUnavailable, OSError) as error:  # the folder or the broker is unavailable for now
                reason = f"{type(error).__name__}: {error}"
                log.warning("cannot schedule bulk jobs; trying again", extra={"reason": reason})
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        await self._queue.close()

    async def _hand_out(self) -> None:
        """Of each job one chunk, then the next of each, as far as the chunk queue has room."""
        jobs = await asyncio.to_thread(self._waiting)
        room = await self._queue.room() if jobs else 0
        in_turn = (name for name in chain.from_iterable(zip_longest(*jobs)) if name is not None)
        for job, chunk in islice(in_turn, max(0, room)):
            await self._queue.put(job, chunk)
            self._seen[job].sent[chunk] = time.monotonic()

    def _waiting(self) -> list[Iterator[ChunkName]]:
        """For each running job, the chunks that no runner has."""
        if time.monotonic() - self._swept_at > SWEEP_S:
            self._store.sweep()
            self._swept_at = time.monotonic()
        ids = self._store.ids()
        self._unreadable &= set(ids)
        self._store.forget_outcomes_except(ids)
        for job in self._seen.keys() - set(ids):
            del self._seen[job]
        found = []
        for job in ids:
            try:
                chunks = self._waiting_chunks(job)
            except (NewerJob, ValueError) as error:  # does not hold up the other jobs
                if job not in self._unreadable:
                    log.error("a bulk job cannot be read; it is left alone", extra={"job": job, "reason": str(error)})
                self._unreadable.add(job)
                continue
            except NoSuchJob:  # removed in the meantime
                continue
            if chunks is not None:
                found.append(chunks)
        return found

    def _waiting_chunks(self, job: str) -> Iterator[ChunkName] | None:
        """None if the job is not to run."""
        seen = self._seen.get(job)
        if seen is not None and seen.ended:
            if self._store.idle_s(job) > self._keep_s:
                self._store.remove(job)
            return None
        if seen is None:
            seen = self._seen[job] = SeenJob(self._store.meta(job))
        done, heartbeats = self._store.chunks_done(job), self._store.running(job)
        state = self._store.state(seen.meta, len(done))
        seen.pace.note(items_done(self._store, seen.meta, done, heartbeats))
        if state in ENDED:
            self._store.revoke_token(job)
            seen.ended = True
        in_trouble = state == "running" and bool(self._store.trouble(job))
        if state != "running" or in_trouble:  # the runners leave the chunks: all may be handed out when the job continues
            seen.sent.clear()
        if state != "running":
            seen.pace = Pace()
            return None
        busy = {chunk for chunk, heartbeat in heartbeats.items() if self._is_alive(seen, chunk, heartbeat)}
        free = self._free(seen, done | busy)
        return self._probe(seen, free) if in_trouble else free

    def _probe(self, seen: SeenJob, free: Iterator[ChunkName]) -> Iterator[ChunkName]:
        """One chunk every `TROUBLE_S`, to find out whether the trouble is over."""
        now = time.monotonic()
        if now - seen.tried >= TROUBLE_S:
            seen.tried = now
            yield from islice(free, 1)

    def _free(self, seen: SeenJob, taken: set[int]) -> Iterator[ChunkName]:
        now = time.monotonic()
        for chunk in range(1, len(seen.meta.chunks) + 1):
            if chunk in taken:
                seen.sent.pop(chunk, None)
            elif now - seen.sent.get(chunk, -SENT_S) >= SENT_S:
                yield seen.meta.id, chunk

    def _is_alive(self, seen: SeenJob, chunk: int, heartbeat: Heartbeat) -> bool:
        now = time.monotonic()
        last, since = seen.heartbeats.get(chunk, (None, now))
        if last != heartbeat:
            seen.heartbeats[chunk] = heartbeat, now
            return True
        if now - since < STALE_S:
            return True
        log.warning("a chunk sends no heartbeats; handing it out again", extra={"job": seen.meta.id, "chunk": chunk})
        self._store.end(seen.meta.id, chunk)
        del seen.heartbeats[chunk]
        return False
