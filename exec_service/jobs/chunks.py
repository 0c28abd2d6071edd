"""Runs one chunk of a bulk job: its items through a gateway, a bounded number at once, with the priority `bulk`.

The same for Celery's tasks and for `exec-service up`. What the service did wrong is tried again; what a program did, and what
is wrong with an item, is its result. A chunk that has to be left (pause, cancel, stop, a service that is away for long) keeps
what it has in a file, and whoever takes it up goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Iterator
from itertools import count

import msgspec
from msgspec import Struct

from exec_client import AsyncClient, CallerError, ExecError, InfraFailure, Policy, ProtocolError, Unavailable
from exec_service.jobs.store import Heartbeat, JobStore
from exec_wire.messages.calls import Result
from exec_wire.messages.jobs import JobError, JobItem, JobResult, decode_item
from exec_wire.messages.verifying import Verification
from exec_wire.supervisor import stop

log = logging.getLogger("exec_service.jobs.store")

HEARTBEAT_S = 0.5
AWAY_S = 30.0  # after so long without any answer a chunk is left, for whoever finds the service again
DEADLINE_S = 7200.0  # of each item: in bulk nobody waits for a single one, and the line may be long
ATTEMPTS = 3  # of an item that the service failed at, each of several attempts of the client
PAUSE_S, PAUSE_MOST_S = 0.2, 5.0


class Blocked(Exception):
    """The chunk cannot go on here and now; the message says why."""


class ChunkOptions(Struct, frozen=True):
    url: str  # of a gateway
    at_once: int = 32  # items of one chunk on their way


class Chunk:
    """One run of one chunk."""

    def __init__(self, store: JobStore, job: str, chunk: int, options: ChunkOptions, stopping: threading.Event) -> None:
        self._store, self._job, self._chunk, self._options, self._stopping = store, job, chunk, options, stopping
        self._runner = secrets.token_hex(4)
        self._results: dict[int, JobResult] = {}
        self._moved_at = 0.0  # when the service last answered, or was first asked
        self._why = ""
        self._in_trouble = True  # for all that is known; the first answer shows that it is over

    async def run(self) -> bool:
        """True if it is done now. False: left, or somebody else's."""
        store, job, chunk = self._store, self._job, self._chunk
        if store.is_done(job, chunk) or not store.is_to_run(job) or not store.begin(job, chunk, self._heartbeat(0)):
            return False
        done = False
        try:
            done = await self._run_all()
        except Blocked as blocked:
            log.warning("a chunk cannot go on", extra={"job": job, "chunk": chunk, "reason": str(blocked)})
            store.set_trouble(job, str(blocked))
        finally:
            if not done and self._results and store.path(job).exists():
                store.save_partial(job, chunk, self._results.values())
            store.end(job, chunk)
        return done

    async def _run_all(self) -> bool:
        first = sum(self._store.meta(self._job).chunks[: self._chunk - 1])
        items = [(first + index, line) for index, line in enumerate(self._store.items(self._job, self._chunk))]
        self._results = {result.item: result for result in self._store.partial(self._job, self._chunk)}
        left = iter([(number, line) for number, line in items if number not in self._results])
        self._moved_at = asyncio.get_running_loop().time()
        token = self._store.token(self._job)
        async with AsyncClient(self._options.url, api_key=token, policy=Policy(max_backoff_s=1.0)) as client:
            workers = [asyncio.create_task(self._work(client, left)) for _ in range(self._options.at_once)]
            try:
                if not await self._watch(workers):
                    return False
            finally:
                await stop(workers)
        self._store.save(self._job, self._chunk, self._results.values())
        return True

    async def _watch(self, workers: list[asyncio.Task[None]]) -> bool:
        """Until all is done, with a heartbeat every `HEARTBEAT_S`; False if it is to be left."""
        for heartbeat in count(1):
            ended, going = await asyncio.wait(workers, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in ended:
                task.result()
            if not going:
                return True
            if self._stopping.is_set() or not self._store.is_to_run(self._job):
                return False
            if self._why and asyncio.get_running_loop().time() - self._moved_at > AWAY_S:
                raise Blocked(self._why)
            self._store.heartbeat(self._job, self._chunk, self._heartbeat(heartbeat))
        raise AssertionError("count() ends never")

    def _heartbeat(self, number: int) -> Heartbeat:
        return Heartbeat(self._runner, number, len(self._results))

    async def _work(self, client: AsyncClient, left: Iterator[tuple[int, bytes]]) -> None:
        for number, line in left:
            self._results[number] = await self._insist(client, number, decode_item(line))
            self._moved_at, self._why = asyncio.get_running_loop().time(), ""
            if self._in_trouble:
                self._in_trouble = False
                self._store.set_trouble(self._job, "")

    async def _insist(self, client: AsyncClient, number: int, item: JobItem) -> JobResult:
        """Ask until there is an answer that is not our fault; a service that cannot be reached is waited for."""
        failures = 0
        for attempt in count():
            try:
                result = await self._ask(client, number, item)
                if not _our_fault(result) or (failures := failures + 1) == ATTEMPTS:
                    return result
            except CallerError as error:
                if error.status == 401:
                    raise Blocked(f"the gateway {self._options.url} does not know this job: {error}") from error
                return JobResult(number, error=JobError(error.code or "refused", str(error), error.field))
            except InfraFailure as error:
                failures += 1
                if failures == ATTEMPTS:
                    return JobResult(number, call=error.result, error=None if error.result else _failed(error))
            except Unavailable as error:
                self._why = str(error)
            except ProtocolError as error:
                raise Blocked(str(error)) from error
            await asyncio.sleep(min(PAUSE_MOST_S, PAUSE_S * 2 ** min(attempt, 10)))
        raise AssertionError("count() ends never")

    async def _ask(self, client: AsyncClient, number: int, item: JobItem) -> JobResult:
        if item.call is not None:
            # The same key whoever runs the chunk: what was answered lately is not run again.
            call = msgspec.structs.replace(item.call, idempotency_key=f"{self._job}:{number}")
            return JobResult(number, call=_own(await client.run(call, priority="bulk", deadline_s=DEADLINE_S)))
        if item.judge is not None:
            judgement = await client.judge(item.judge, priority="bulk", deadline_s=DEADLINE_S)
            return JobResult(number, judge=judgement)
        assert item.verify is not None, "checked when the job came in"
        [verification] = await client.verify_many([item.verify], priority="bulk", deadline_s=DEADLINE_S)
        return JobResult(number, verify=verification)


def _own(result: Result) -> Result:
    result.index = 0  # a place in a request that nobody sees
    return result


def _our_fault(result: JobResult) -> bool:
    if result.judge is not None:
        return result.judge.retryable
    found: Result | Verification | None = result.call or result.verify
    return found is not None and found.retryable


def _failed(error: ExecError) -> JobError:
    return JobError("infra_failure", str(error))


def run_chunk(store: JobStore, job: str, chunk: int, options: ChunkOptions, stopping: threading.Event) -> bool:
    """In a thread of its own: the files are waited for. Set `stopping` to have it leave. True if the chunk is done now."""
    return asyncio.run(Chunk(store, job, chunk, options, stopping).run())
