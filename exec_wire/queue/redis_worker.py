"""The worker's end of the Redis queue."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from exec_wire.queue import redis_entries as layout
from exec_wire.queue.connection import Command, Link, NoGroup, Subscription, Word
from exec_wire.queue.protocol import LEASE_S, RECORD_S, WIRE_VERSION, Answer, Job, QueueUnavailable, WorkerInfo, fingerprint
from exec_wire.queue.redis_entries import BLOCK_S, GROUP, LEASE_MS, NOBODY, Address, Entry, Envelope, Streams, pack, script
from exec_wire.supervisor import logged

log = logging.getLogger("exec_wire.redis")

DIRECTED_REMEMBERED = 4096  # ids of directed jobs that were read but not deleted yet, so that none is taken twice
RECENT_TURNS, LOOK_AROUND_TURNS = 64, 8  # of a worker's takes: see `_in_turn`
GATHER_S = 0.001  # while all slots are busy, an answer waits so long for others to travel with it
ANSWERS_AT_ONCE, ANSWER_BYTES_AT_ONCE = 512, 4 << 20
UNDELIVERED_PAUSE_S = 0.5
UNBLOCK_PAUSE_S = 0.01
SWEEP_MS = 3_600_000
RECORDED_BYTES = 64 << 20  # of results that one worker keeps in Redis within `RECORD_S`

_unpack_job = msgspec.msgpack.Decoder(Job).decode


def _rotated(streams: list[str], by: int) -> list[str]:
    at = by % max(1, len(streams))
    return streams[at:] + streams[:at]


class _Taken(msgspec.Struct):
    """A job that this worker has taken, with all its entries: the same job may be published twice."""

    job: Job
    entries: list[Entry]
    at: float
    fingerprint: bytes = b""


class _Outgoing(NamedTuple):
    answer: Answer
    reply_to: str
    sent: asyncio.Future[None]


class RedisWorkerEnd:
    stranded = 0
    states: Mapping[str, bool] = {}

    def __init__(self, queue: Address, name: str) -> None:
        self._queue, self._name = queue, name
        self._commands, self._blocking = Link(queue.server), Link(queue.server)
        self._notes = Subscription(queue.server, [queue.cancels, queue.handed_back])
        self._streams = [queue.jobs + "python"]
        self._turn = 0
        self._gave_in_turn: dict[str, int] = {}  # the turn in which a stream last had a job
        self._claimed_at = float("-inf")
        self._may_be_more = True  # the last look for jobs did not find the streams empty
        self._blocked = False  # a blocking read is under way, so there are free slots and no jobs
        self.unreadable: Counter[str] = Counter()
        self._taken: dict[str, _Taken] = {}
        self._missed_cancels = False  # the subscription broke; messages since then are lost
        self._directed = Link(queue.server)
        self._directed_read: list[bytes] = []
        self._directed_ids: deque[str] = deque(maxlen=DIRECTED_REMEMBERED)
        self._taking: asyncio.Task[list[Job]] | None = None
        self._waits = False
        self._left = False
        self._outbox: deque[_Outgoing] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._sending_soon: asyncio.TimerHandle | None = None
        self._undelivered: set[asyncio.Task[None]] = set()
        self._recorded: deque[tuple[float, int]] = deque()  # time and size of each record
        self._recorded_bytes = 0

    async def announce(self, info: WorkerInfo) -> None:
        self._streams = [self._queue.jobs + needs for needs in info.classes]
        heartbeat = msgspec.json.encode(info)
        keys = [self._queue.worker_key + self._name, self._queue.workers]
        await self._commands.call(script("announce", keys, self._name, heartbeat, LEASE_MS, even_if_full=True))

    # -- taking -----------------------------------------------------------------------------------------------------------

    async def take(self, most: int, *, hold: int = 0, wait: bool = True) -> list[Job]:
        # In a task of its own: when the caller is cancelled, the jobs that the server hands out meanwhile are kept.
        if self._taking is None:
            self._waits = wait
            self._taking = asyncio.create_task(self._take(most, hold))
        await asyncio.wait({self._taking})
        if self._left:
            await asyncio.Future()  # no jobs after `leave`
        taking, self._taking = self._taking, None
        jobs = taking.result()
        if len(jobs) > most + hold:
            try:
                await self.hand_back([job.id for job in jobs[most + hold :]])
            except QueueUnavailable as error:
                log.warning("%s; surplus jobs were not handed back, their leases expire", error)
        return jobs[: most + hold]

    async def stop_waiting(self) -> None:
        """Have a `take` that waits return: with what it has got already, or nothing."""
        self._waits = False
        await self._end_blocking_read()

    def has(self, id: str) -> bool:
        """Whether this end took the job and has not answered it."""
        return id in self._taken

    async def _take(self, most: int, hold: int) -> list[Job]:
        await self._notes.listen()  # before the first job, so that no cancellation of it is missed
        while not self._left:
            try:
                if self._waits and not self._may_be_more and time.monotonic() < self._claimed_at + BLOCK_S:
                    jobs = await self._wait(most + hold)
                else:
                    jobs = await self._take_now(most, hold)
                if jobs or not self._waits:
                    return jobs
            except NoGroup:
                await self._make_groups()
        return []

    async def _take_now(self, most: int, hold: int) -> list[Job]:
        look_for_expired = time.monotonic() >= self._claimed_at + BLOCK_S
        streams, certain = self._in_turn()
        if not most and certain and not look_for_expired:
            streams = streams[:certain]  # jobs of the other classes wait for a free slot or a look around
        numbers = (most, hold, LEASE_MS if look_for_expired else 0, WIRE_VERSION, certain)
        self._send_now()  # answers travel with this
        [(now, *found)] = await self._commands.call(script("take", streams, GROUP, self._name, *numbers))
        self._may_be_more = len(found) == most + hold
        if look_for_expired:
            self._claimed_at = time.monotonic()
        return await self._open(
            [
                (Entry(streams[number - 1], id.decode(), deliveries, bool(counted)), fields)
                for number, id, fields, deliveries, counted in found
            ],
            int(now),
        )

    async def take_directed(self) -> list[Job]:
        """Each read first deletes the entries of the one before; `_directed_ids` stops a second delivery if that failed."""
        stream = self._queue.directed + self._name
        while not self._left:
            commands: list[Command] = [("XDEL", stream, *self._directed_read)] if self._directed_read else []
            read = ("XREAD", "COUNT", layout.READ_COUNT, "BLOCK", round(BLOCK_S * 1000), "STREAMS", stream, "0")
            *_, streams, (seconds, micros) = await self._directed.call(*commands, read, ("TIME",), block_s=BLOCK_S)
            entries = streams[0][1] if streams else []
            self._directed_read = [id for id, _ in entries]
            now_ms = int(seconds) * 1000 + int(micros) // 1000
            if jobs := [job for id, fields in entries if (job := self._take_once(id, fields, now_ms)) is not None]:
                return jobs
        return await asyncio.Future()

    def _take_once(self, id: bytes, fields: list[bytes], now_ms: int) -> Job | None:
        named = layout.named_fields(fields)
        if (envelope := layout.read_envelope(named)) is None:
            self._count_unaddressed(1)
            return None
        job = self._open_job(envelope, named)
        if job.id in self._directed_ids:
            return None
        self._directed_ids.append(job.id)
        waited_ms = max(0, now_ms - int(id.partition(b"-")[0]))
        job = msgspec.structs.replace(job, remaining_ms=job.remaining_ms - waited_ms)
        self._taken[job.id] = _Taken(job, [], time.monotonic())
        return job

    def _in_turn(self) -> tuple[list[str], int]:
        """All streams, those with recent jobs first and in rotation; every `LOOK_AROUND_TURNS`-th time they come last. Then the
        number of streams that are read in any case; the others only if these have no job.

        There is a stream for every language and tier, and reading an empty one costs the server as much as a job.
        """
        self._turn += 1
        since = self._turn - RECENT_TURNS
        recent = [stream for stream in self._streams if self._gave_in_turn.get(stream, since) > since]
        others = [stream for stream in self._streams if stream not in recent]
        if self._turn % LOOK_AROUND_TURNS == 0:
            return _rotated(others, self._turn // LOOK_AROUND_TURNS) + _rotated(recent, self._turn), len(self._streams)
        return _rotated(recent, self._turn) + _rotated(others, self._turn), len(recent)

    async def _wait(self, most: int) -> list[Job]:
        """Block until a job arrives, or until it is time to look for expired leases. `most`: of each stream."""
        places = [">"] * len(self._streams)
        read = ("XREADGROUP", "GROUP", GROUP, self._name, "COUNT", most, "BLOCK", round(BLOCK_S * 1000), "STREAMS")
        self._turn += 1
        self._blocked = True
        self._send_now()
        try:
            streams, (seconds, micros) = await self._blocking.call((*read, *self._streams, *places), ("TIME",), block_s=BLOCK_S)
        finally:
            self._blocked = False
        self._may_be_more = any(len(entries) == most for _, entries in streams or [])
        now = int(seconds) * 1000 + int(micros) // 1000
        found = [(Entry(stream.decode(), id.decode()), fields) for stream, entries in streams or [] for id, fields in entries]
        return await self._open(found, now)

    async def _open(self, found: list[tuple[Entry, list[bytes]]], now_ms: int) -> list[Job]:
        """The jobs of these entries. Entries of a newer version are handed back, entries without an envelope removed."""
        jobs: list[Job] = []
        newer: list[tuple[Entry, str]] = []
        unaddressed: list[Entry] = []
        for entry, fields in found:
            self._gave_in_turn[entry.stream] = self._turn
            named = layout.named_fields(fields)
            if (envelope := layout.read_envelope(named)) is None:
                unaddressed.append(entry)
            elif envelope.version > WIRE_VERSION:
                newer.append((entry, f"version {envelope.version}"))
            else:
                jobs.append(self._keep(entry, self._open_job(envelope, named), now_ms))
        try:
            if newer:
                self.unreadable["newer"] += len(newer)
                log.warning("%d jobs of a newer wire version were left to other workers", len(newer))
                await self._give_to(newer)
            if unaddressed:
                self._count_unaddressed(len(unaddressed))
                streams = Streams()
                for entry in unaddressed:
                    streams.add(entry.stream, entry.id)
                await self._commands.call(script("remove", streams.keys, GROUP, *streams.arguments))
        except QueueUnavailable as error:  # return the readable jobs all the same
            log.warning("%s; unreadable entries stay until their leases expire", error)
        return jobs

    def _open_job(self, envelope: Envelope, named: dict[bytes, bytes]) -> Job:
        """The job; with an empty payload, which the worker answers `internal_error`, if only its envelope can be read."""
        if envelope.version <= WIRE_VERSION:
            try:
                return _unpack_job(named.get(b"j", b""))
            except layout.UNREADABLE:
                pass
        self.unreadable["payload"] += 1
        log.error("a job cannot be read", extra={"job": envelope.id, "version": envelope.version})
        return Job(envelope.id, b"", 0, envelope.reply_to)

    def _count_unaddressed(self, count: int) -> None:
        self.unreadable["unaddressed"] += count
        log.error("%d entries without job id, gateway or version were removed", count)

    def _keep(self, entry: Entry, job: Job, now_ms: int) -> Job:
        deliveries = entry.deliveries
        waited_ms = max(0, now_ms - int(entry.id.partition("-")[0]))
        job = msgspec.structs.replace(
            job,
            remaining_ms=job.remaining_ms - waited_ms,
            deliveries=job.deliveries + deliveries - 1,
            waited_ms=job.waited_ms + waited_ms,
        )
        before = self._taken.get(job.id)
        entries = [entry, *(other for other in (before.entries if before else ()) if other.id != entry.id)]
        self._taken[job.id] = _Taken(job, entries, time.monotonic(), fingerprint(job.payload) if job.record_as else b"")
        return job

    async def _make_groups(self) -> None:
        """Start the groups at 0, so that they include jobs published before."""
        make: list[Command] = [("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM") for stream in self._streams]
        for answer in await self._commands.try_(*make):
            if isinstance(answer, Exception) and "BUSYGROUP" not in str(answer):
                raise QueueUnavailable(f"cannot create a consumer group: {answer}", sent=False)
        await self._commands.call(script("sweep", self._streams, GROUP, SWEEP_MS))

    async def _give_to(self, entries: Sequence[tuple[Entry, str]]) -> list[Entry]:
        """Hand each entry to a consumer, to be claimed from there. Returns those that were ours to give."""
        streams = Streams()
        for entry, consumer in entries:
            streams.add(entry.stream, entry.id, entry.deliveries - 1, consumer)
        arguments = (GROUP, self._name, 2 * LEASE_MS, self._queue.handed_back, *streams.arguments)
        [given] = await self._commands.call(script("hand_back", streams.keys, *arguments, even_if_full=True))
        return [entries[position][0] for position in given]

    # -- holding ----------------------------------------------------------------------------------------------------------

    async def started(self, ids: Sequence[str]) -> None:
        streams = Streams()
        taken = [self._taken[id] for id in ids if id in self._taken]
        for entry in [entry for job in taken for entry in job.entries if not entry.counted]:
            streams.add(entry.stream, entry.id, entry.deliveries)
        if streams.keys:
            try:
                await self._commands.call(
                    script("started", streams.keys, GROUP, self._name, *streams.arguments, even_if_full=True)
                )
            except NoGroup:
                return  # the server has lost the job, which the gateway publishes again
            for job in taken:
                job.entries = [entry._replace(counted=True) for entry in job.entries]

    async def hand_back(self, ids: Sequence[str]) -> list[str]:
        held = {entry: id for id in ids if id in self._taken for entry in self._taken[id].entries}
        if not held:
            return []
        given = await self._give_to([(entry, NOBODY) for entry in held])
        back = list(dict.fromkeys(held[entry] for entry in given))
        for id in back:
            del self._taken[id]
        return back

    async def _look_for_handed_back(self) -> None:
        """Jobs were handed back: look for them now. A blocking read hears only of new ones, so it is ended."""
        self._claimed_at = float("-inf")
        await self._end_blocking_read()

    async def _end_blocking_read(self) -> None:
        while self._blocked:
            [ended] = await self._commands.call(("CLIENT", "UNBLOCK", self._blocking.client_id))
            if ended:
                break
            await asyncio.sleep(UNBLOCK_PAUSE_S)  # it is on its way to the server

    # -- leases -----------------------------------------------------------------------------------------------------------

    async def renew(self, ids: Sequence[str]) -> None:
        wanted = set(ids)
        expired_at = time.monotonic() - 2 * LEASE_S  # taken before this and not running: another worker has them
        for id in [id for id, taken in self._taken.items() if id not in wanted and taken.at < expired_at]:
            del self._taken[id]
        streams = Streams()
        for id in wanted & self._taken.keys():
            for entry in self._taken[id].entries:
                streams.add(entry.stream, entry.id)
        if streams.keys:
            try:
                await self._commands.call(script("renew", streams.keys, GROUP, self._name, *streams.arguments))
            except NoGroup:
                await self._make_groups()

    # -- answering --------------------------------------------------------------------------------------------------------

    async def answer(self, answers: Sequence[Answer]) -> None:
        sent = []
        for answer in answers:
            taken = self._taken.get(answer.id)
            if taken is not None:
                sent.append(asyncio.get_running_loop().create_future())
                self._outbox.append(_Outgoing(answer, taken.job.reply_to, sent[-1]))
        self._send_soon()
        if len(sent) == 1:  # the usual case; gather() costs 6 µs of the 55 µs that a call takes here
            await sent[0]
        else:
            await asyncio.gather(*sent)

    def _send_soon(self) -> None:
        """At once while this worker waits for jobs, or has none but these; else with all answers of the next `GATHER_S`."""
        if self._blocked or len(self._taken) <= len(self._outbox):
            self._send_now()
        elif self._sending_soon is None and self._sending is None and self._outbox:
            self._sending_soon = asyncio.get_running_loop().call_later(GATHER_S, self._send_now)

    def _send_now(self) -> None:
        if self._sending_soon is not None:
            self._sending_soon.cancel()
            self._sending_soon = None
        if self._outbox and self._sending is None:
            self._sending = asyncio.create_task(self._send_part(self._next_part()))

    async def _send_part(self, part: list[_Outgoing]) -> None:
        """Answers that come while a script is under way go with the next one."""
        failed = None
        try:
            await self._send(part)
        except Exception as error:
            failed = error
        finally:
            self._sending = None
        for sent in [outgoing.sent for outgoing in part if not outgoing.sent.done()]:
            sent.set_result(None) if failed is None else sent.set_exception(failed)
        self._send_soon()

    def _next_part(self) -> list[_Outgoing]:
        part: list[_Outgoing] = []
        size = 0
        while self._outbox and len(part) < ANSWERS_AT_ONCE and size < ANSWER_BYTES_AT_ONCE:
            part.append(self._outbox.popleft())
            size += len(part[-1].answer.payload)
        return part

    async def _send(self, part: Sequence[_Outgoing]) -> None:
        entries: dict[str, list[str]] = {}
        replies: dict[str, list[Answer]] = {}
        records: dict[str, bytes] = {}
        for answer, reply_to, _ in part:
            replies.setdefault(reply_to, []).append(answer)
            taken = self._taken.get(answer.id)
            if taken is None:
                continue  # answered twice
            for entry in taken.entries:
                entries.setdefault(entry.stream, []).append(entry.id)
            if taken.job.record_as and answer.record and self._may_record(len(answer.payload)):
                records[self._queue.record + taken.job.record_as] = taken.fingerprint + answer.payload
        packed = {gateway: (" ".join(answer.id for answer in answers), pack(answers)) for gateway, answers in replies.items()}
        arguments: list[Word] = [GROUP, RECORD_S, len(entries), len(packed), WIRE_VERSION]
        for ids in entries.values():
            arguments += (len(ids), *ids)
        for words in packed.values():
            arguments += words
        keys = [*entries, *(self._queue.reply + gateway for gateway in packed), *records]
        [delivered] = await self._commands.call(script("answer", keys, *arguments, *records.values()))
        for answer, _, _ in part:
            self._taken.pop(answer.id, None)
        for gateway, there in zip(packed, delivered, strict=True):
            if not there:
                self._keep_trying(gateway, *packed[gateway])

    def _may_record(self, size: int) -> bool:
        """Whether this worker's records that have not expired leave room for another one."""
        now = time.monotonic()
        while self._recorded and self._recorded[0][0] < now - RECORD_S:
            self._recorded_bytes -= self._recorded.popleft()[1]
        if self._recorded_bytes + size > RECORDED_BYTES:
            return False
        self._recorded.append((now, size))
        self._recorded_bytes += size
        return True

    def _keep_trying(self, gateway: str, ids: str, packed: bytes) -> None:
        """Retry while the gateway's stream is missing: a live gateway creates it again, a dead one needs no answer."""

        arguments = (GROUP, RECORD_S, 0, 1, WIRE_VERSION, ids, packed)

        async def deliver() -> None:
            give_up = time.monotonic() + LEASE_S
            while time.monotonic() < give_up:
                await asyncio.sleep(UNDELIVERED_PAUSE_S)
                try:
                    [[delivered]] = await self._commands.call(
                        script("answer", [self._queue.reply + gateway], *arguments, even_if_full=True)
                    )
                except QueueUnavailable:
                    continue
                if delivered:
                    return
            log.warning("answers for a lost gateway were dropped", extra={"gateway": gateway})

        task = logged(asyncio.create_task(deliver()), "answers were not delivered")
        self._undelivered.add(task)
        task.add_done_callback(self._undelivered.discard)

    # -- cancellation, leaving --------------------------------------------------------------------------------------------

    async def cancelled(self) -> list[str]:
        if self._missed_cancels:
            await self._notes.listen()
            ids = list(self._taken)
            [marks] = await self._commands.call(("MGET", self._queue.prefix, *(self._queue.mark + id for id in ids)))
            self._missed_cancels = False
            if missed := [id for id, mark in zip(ids, marks[1:], strict=True) if mark is not None]:
                return missed
        try:
            while True:
                channel, data = await self._notes.message()
                if channel == self._queue.cancels:
                    return data.decode(errors="replace").split()
                await self._look_for_handed_back()
        except QueueUnavailable:
            self._missed_cancels = True
            raise

    async def leave(self) -> None:
        self._left = True
        try:
            await self._stop_taking()
            keys = [self._queue.worker_key + self._name, self._queue.workers, *self._streams]
            await self._commands.call(script("leave", keys, GROUP, self._name, 2 * LEASE_MS, self._queue.handed_back))
        except QueueUnavailable as error:
            log.warning("%s; stopped without deregistering, its jobs are reclaimed when their leases expire", error)
        for task in [*self._undelivered, *([self._taking] if self._taking else [])]:
            task.cancel()
        for part in (self._commands, self._blocking, self._directed, self._notes):
            await part.close()

    async def _stop_taking(self) -> None:
        """Let the answers under way through, then have the server end the blocking read, so that it hands out nothing more."""
        self._send_now()
        if self._sending is not None:
            await asyncio.wait({self._sending}, timeout=BLOCK_S)
        if self._taking is not None:
            await self._commands.call(("CLIENT", "UNBLOCK", self._blocking.client_id))
            await asyncio.wait({self._taking}, timeout=BLOCK_S + 1)
