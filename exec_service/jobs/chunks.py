"""Runs one chunk of a bulk job: sends its items to a gateway, a bounded number at once, with the priority `bulk`.

Celery's tasks and `exec-service up` use the same code. Failures of the service are retried; a program's failure, or an
invalid item, is that item's result. A chunk that has to stop early (pause, cancel, shutdown, gateway unreachable for long)
saves its partial results, and the next runner continues from there.
"""

import asyncio
import logging
import secrets
import threading
from collections.abc import Iterator
from itertools import count

import msgspec
from msgspec import Struct

from exec_client import AsyncClient, CallerError, InfraFailure, Policy, ProtocolError, Unavailable
from exec_service.jobs.store import Heartbeat, JobStore, NewerJob
from exec_wire.messages.jobs import JobError, JobItem, JobResult, decode_item
from exec_wire.supervisor import stop

log = logging.getLogger("exec_service.jobs.chunks")

HEARTBEAT_S = 0.5
UNAVAILABLE_S = 30.0  # after this long without any answer a chunk stops, and another runner may try
DEADLINE_S = 7200.0  # of each item: nobody waits for a single one, and the gateway's queue may be long
ATTEMPTS = 3  # of an item that the service failed to run, each of several attempts of the client
PAUSE_S, PAUSE_MOST_S = 0.2, 5.0


class Blocked(Exception):
    """The chunk cannot continue in this process now; the message says why."""


class ChunkOptions(Struct, frozen=True):
    url: str  # of a gateway
    at_once: int = 32  # items of one chunk in flight


class Chunk:
    """One run of one chunk."""

    def __init__(self, store: JobStore, job: str, chunk: int, options: ChunkOptions, stopping: threading.Event) -> None:
        self._store, self._job, self._chunk, self._options, self._stopping = store, job, chunk, options, stopping
        self._runner = secrets.token_hex(4)
        self._results: dict[int, JobResult] = {}
        self._moved_at = 0.0  # when the service last answered, or was first asked
        self._why = ""
        self._in_trouble = True  # until the first answer

    async def run(self) -> bool:
        """True if the chunk is done now. False if it stopped early, or another runner has it."""
        store, job, chunk = self._store, self._job, self._chunk
        if store.is_done(job, chunk) or not store.is_to_run(job):
            return False
        try:
            first = sum(store.meta(job).chunks[: chunk - 1])
        except NewerJob as error:
            log.warning("left to a newer jobs worker", extra={"job": job, "chunk": chunk, "reason": str(error)})
            return False
        if not store.begin(job, chunk, self._heartbeat(0)):
            return False
        done = False
        try:
            done = await self._run_all(first)
        except Blocked as blocked:
            log.warning("a chunk cannot continue", extra={"job": job, "chunk": chunk, "reason": str(blocked)})
            store.set_trouble(job, str(blocked))
        finally:
            if not done and self._results and store.path(job).exists():
                store.save_partial(job, chunk, self._results.values())
            store.end(job, chunk)
        return done

    async def _run_all(self, first: int) -> bool:
        self._results = {result.item: result for result in self._store.partial(self._job, self._chunk)}
        items = enumerate(self._store.items(self._job, self._chunk), first)
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
        """Send a heartbeat every `HEARTBEAT_S` until all items are done; False if the chunk has to stop early."""
        for number in count(1):
            ended, going = await asyncio.wait(workers, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in ended:
                task.result()
            if not going:
                return True
            if self._stopping.is_set() or not self._store.is_to_run(self._job):
                return False
            if self._why and asyncio.get_running_loop().time() - self._moved_at > UNAVAILABLE_S:
                raise Blocked(self._why)
            self._store.heartbeat(self._job, self._chunk, self._heartbeat(number))
        raise AssertionError("unreachable")

    def _heartbeat(self, number: int) -> Heartbeat:
        return Heartbeat(self._runner, number, len(self._results))

    async def _work(self, client: AsyncClient, left: Iterator[tuple[int, bytes]]) -> None:
        for number, line in left:
            self._results[number] = await self._run_item(client, number, decode_item(line))
            self._moved_at, self._why = asyncio.get_running_loop().time(), ""
            if self._in_trouble:
                self._in_trouble = False
                self._store.set_trouble(self._job, "")

    async def _run_item(self, client: AsyncClient, number: int, item: JobItem) -> JobResult:
        """Retry until the answer is not the service's fault; wait for a service that cannot be reached."""
        failures = 0
        for attempt in count():
            try:
                result = await self._send(client, number, item)
                if not _retryable(result) or (failures := failures + 1) == ATTEMPTS:
                    return result
            except CallerError as error:
                if error.status == 401:
                    raise Blocked(f"the gateway {self._options.url} does not know this job: {error}") from error
                return JobResult(number, error=JobError(error.code or "refused", str(error), error.field))
            except InfraFailure as error:
                failures += 1
                if failures == ATTEMPTS:
                    failed = None if error.result else JobError("infra_failure", str(error))
                    return JobResult(number, call=error.result, error=failed)
            except Unavailable as error:
                self._why = str(error)
            except ProtocolError as error:
                raise Blocked(str(error)) from error
            await asyncio.sleep(min(PAUSE_MOST_S, PAUSE_S * 2 ** min(attempt, 10)))
        raise AssertionError("unreachable")

    async def _send(self, client: AsyncClient, number: int, item: JobItem) -> JobResult:
        if item.call is not None:
            # Every runner uses the same key: a gateway that has the result does not run the item again.
            call = msgspec.structs.replace(item.call, idempotency_key=f"{self._job}:{number}")
            result = await client.run(call, priority="bulk", deadline_s=DEADLINE_S)
            result.index = 0  # the position in the client's request means nothing here
            return JobResult(number, call=result)
        if item.judge is not None:
            return JobResult(number, judge=await client.judge(item.judge, priority="bulk", deadline_s=DEADLINE_S))
        assert item.verify is not None, "validated when the job was received"
        [verification] = await client.verify_many([item.verify], priority="bulk", deadline_s=DEADLINE_S)
        return JobResult(number, verify=verification)


def _retryable(result: JobResult) -> bool:
    found = result.call or result.judge or result.verify
    return found is not None and found.retryable


def run_chunk(store: JobStore, job: str, chunk: int, options: ChunkOptions, stopping: threading.Event) -> bool:
    """For a thread of its own, since it waits for files. Set `stopping` to stop it early. True if the chunk is done now."""
    return asyncio.run(Chunk(store, job, chunk, options, stopping).run())
