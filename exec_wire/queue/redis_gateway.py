"""The gateway's end of the Redis queue."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import UNSET

from exec_wire.messages.calls import Selection
from exec_wire.queue import redis_entries as layout
from exec_wire.queue.connection import Command, Link, Subscription
from exec_wire.queue.protocol import (
    NO_USE,
    WIRE_VERSION,
    Answer,
    Ask,
    GatewayInfo,
    Job,
    QueueUnavailable,
    TenantUse,
    WorkerInfo,
)
from exec_wire.queue.redis_entries import BLOCK_S, GROUP, LEASE_MS, Address, Entry, Heartbeats, Streams, pack, script

log = logging.getLogger("exec_wire.redis")

T = TypeVar("T")

DIRECTED_S = 120
REPLY_S = 60  # the reply stream of a gateway expires after this time without a renewal
# While answers come this often, a read waits so long for others to come with them.
BUSY_S, GATHER_S = 0.004, 0.001
ASK_S = 1.5  # other gateways have so long to report how many calls they cancelled

_unpack_answers = msgspec.msgpack.Decoder(list[Answer]).decode
_unpack_ask = msgspec.msgpack.Decoder(Ask).decode
_unpack_told = msgspec.msgpack.Decoder(tuple[str, int]).decode


class RedisGatewayEnd:
    shared = True
    shards = None

    def __init__(self, queue: Address, name: str, shard_names: Sequence[str] = ()) -> None:
        """`shard_names`: of all servers of the queue, if there are several."""
        self.name = name
        self._shard_names = list(shard_names)
        self._queue = queue
        self._commands, self._reads = Link(queue.server), Link(queue.server)
        self._notes = Subscription(queue.server, [queue.asks, queue.asks_by_request, queue.told(name)])
        self._reply = queue.reply + name
        self._read: list[bytes] = []  # entries of the reply stream that `receive` has returned
        self._received_at = self._received_before = float("-inf")  # the last two reads that brought answers
        self._entries: dict[str, Entry] = {}  # of published jobs without an answer
        self._told: dict[str, asyncio.Queue[int]] = {}
        self._reply_made = False
        self.forgotten = 0
        self.unreadable: Counter[str] = Counter()
        self._workers = Heartbeats(WorkerInfo, "worker", queue.workers, queue.worker_key)
        self._gateways = Heartbeats(GatewayInfo, "gateway", queue.gateways, queue.gateway_key)

    async def announce(self, backlog: bool, tenants: Mapping[str, TenantUse] = NO_USE) -> list[GatewayInfo]:
        info = msgspec.json.encode(GatewayInfo(self.name, backlog, dict(tenants), self._shard_names))
        keys = [self._queue.gateway_key + self.name, self._queue.gateways]
        _, made, alive = await self._commands.call(
            script("announce", keys, self.name, info, LEASE_MS, even_if_full=True),
            script("keep_reply", [self._reply], REPLY_S, even_if_full=True),
            self._gateways.command(),
        )
        self.forgotten += self._reply_made and made  # a server that has lost our stream may have lost all others
        self._reply_made = True
        return [other for other in await self._alive(self._gateways, alive) if other.id != self.name]

    async def _alive(self, heartbeats: Heartbeats[T], answer: list[list[bytes]]) -> list[T]:
        """`answer`: of the command of these heartbeats. A script names its keys, so new ids need another one."""
        ids, values, lost = answer
        heartbeats.log_lost(lost)
        while not heartbeats.knows(ids):
            [(ids, values, lost)] = await self._commands.call(heartbeats.command())
            heartbeats.log_lost(lost)
        return heartbeats.read(values, self.unreadable)

    async def publish(self, jobs: Sequence[Job]) -> None:
        streams = Streams()
        for job in jobs:
            streams.add(self._queue.jobs + job.needs, job.id, job.reply_to, pack(job))
        [ids] = await self._commands.call(script("publish", streams.keys, WIRE_VERSION, *streams.arguments))
        for job, id in zip(jobs, ids, strict=True):
            self._entries[job.id] = Entry(self._queue.jobs + job.needs, id.decode())

    async def publish_to(self, worker: str, job: Job, pin: str = "") -> None:
        arguments = (WIRE_VERSION, job.id, job.reply_to, pack(job), DIRECTED_S)
        await self._commands.call(script("publish_to", [self._queue.directed + worker], *arguments))

    async def receive(self) -> list[Answer]:
        while True:
            # Each read first deletes the entries of the one before, so all that is left is unread and reading starts at 0:
            # a primary that took over with a slower clock may give smaller ids.
            commands: list[Command] = [("XDEL", self._reply, *self._read)] if self._read else []
            if self._entries and self._received_at - self._received_before < BUSY_S:
                await asyncio.sleep(self._received_at + GATHER_S - time.monotonic())
            commands.append(("XREAD", "COUNT", layout.READ_COUNT, "BLOCK", round(BLOCK_S * 1000), "STREAMS", self._reply, "0"))
            *_, streams = await self._reads.call(*commands, block_s=BLOCK_S)
            entries = streams[0][1] if streams else []
            self._read = [id for id, _ in entries]
            answers = [answer for _, fields in entries for answer in self._open_answers(fields)]
            for answer in answers:
                self._entries.pop(answer.id, None)
            if answers:
                self._received_before, self._received_at = self._received_at, time.monotonic()
                return answers

    def _open_answers(self, fields: list[bytes]) -> list[Answer]:
        """The answers of an entry; with an empty payload if only their ids can be read."""
        named = layout.named_fields(fields)
        try:
            if int(named[b"v"]) <= WIRE_VERSION:
                return _unpack_answers(named[b"a"])
        except (KeyError, *layout.UNREADABLE):
            pass
        self.unreadable["answer"] += 1
        ids = named.get(b"id", b"").decode(errors="replace").split()
        log.error("an answer cannot be read", extra={"jobs": ids, "version": named.get(b"v", b"").decode(errors="replace")})
        return [Answer(id, b"") for id in ids]

    async def cancel(self, ids: Sequence[str]) -> list[str]:
        streams = Streams()
        for id in ids:
            entry = self._entries.get(id, Entry(self._queue.jobs + "python", "-"))
            streams.add(entry.stream, entry.id, id)
        keys = [*streams.keys, *(self._queue.mark + id for id in ids)]
        arguments = (GROUP, self._queue.cancels, len(streams.keys), *streams.arguments)
        [untaken] = await self._commands.call(script("cancel", keys, *arguments, even_if_full=True))
        for id in ids:
            self._entries.pop(id, None)
        return [id.decode() for id in untaken]

    async def missing(self, ids: Sequence[str]) -> list[str]:
        known = [id for id in ids if id in self._entries]
        if not known:
            return []
        streams = Streams()
        for id in known:
            streams.add(self._entries[id].stream, self._entries[id].id)
        [gone] = await self._commands.call(script("missing", streams.keys, *streams.arguments))
        return [known[position] for position in gone]

    async def workers(self) -> list[WorkerInfo]:
        [alive] = await self._commands.call(self._workers.command())
        return sorted(await self._alive(self._workers, alive), key=lambda info: info.id)

    async def recorded(self, names: Sequence[str]) -> list[bytes | None]:
        [found] = await self._commands.call(("MGET", *(self._queue.record + name for name in names)))
        return list(found)

    async def ask_others(self, selection: Selection) -> int:
        # A channel of its own: a gateway of an older version would not see `request`, and cancel all calls of the tenant.
        channel = self._queue.asks if selection.request is UNSET else self._queue.asks_by_request
        ask = Ask(self.name, secrets.token_hex(8), selection)
        told = self._told[ask.id] = asyncio.Queue()
        total = 0
        try:
            await self._notes.listen()
            [listeners] = await self._commands.call(("PUBLISH", channel, pack(ask)))
            async with asyncio.timeout(ASK_S):
                for _ in range(listeners - 1):
                    total += await told.get()
        except TimeoutError:
            log.warning("not every gateway reported how many calls it cancelled within %g s", ASK_S)
        finally:
            del self._told[ask.id]
        return total

    async def asked(self) -> list[Ask]:
        while True:
            channel, data = await self._notes.message()
            try:
                if channel in (self._queue.asks, self._queue.asks_by_request):
                    ask = _unpack_ask(data)
                    if ask.asker != self.name:
                        return [ask]
                else:
                    id, cancelled = _unpack_told(data)
                    if id in self._told:
                        self._told[id].put_nowait(cancelled)
            except layout.UNREADABLE as error:
                self.unreadable["ask"] += 1
                log.error("a message of another gateway cannot be read: %s", error)

    async def tell(self, ask: Ask, cancelled: int) -> None:
        await self._commands.call(("PUBLISH", self._queue.told(ask.asker), pack((ask.id, cancelled))))

    async def leave(self) -> None:
        try:
            await self._commands.call(
                ("UNLINK", self._queue.gateway_key + self.name, self._reply), ("SREM", self._queue.gateways, self.name)
            )
        except QueueUnavailable as error:
            log.warning("%s; stopped without deregistering", error)
        for part in (self._commands, self._reads, self._notes):
            await part.close()
