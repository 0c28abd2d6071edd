"""The job queue on Redis or Valkey streams: any number of gateways and workers, one primary (7.0 or newer), no Redis Cluster.

    x:jobs:{class}        stream, group `workers`   released calls: one entry each, see below
    x:jobs@{worker}       stream, 120 s             jobs for one worker: the same entries; deleted when they were read
    x:reply@{gateway}     stream, 60 s, renewed     answers, see below; a dead gateway's is not made again
    x:worker:{id}         string, 6 s, renewed      `WorkerInfo` as JSON        x:workers    set of ids
    x:gateway:{id}        string, 6 s, renewed      `GatewayInfo` as JSON       x:gateways   set of ids
    x:idem:{digest}       string, 120 s             a fingerprint of 16 bytes, then a packed `Result`; see `record_name`
    x:cancel              channel (with the number of the database)   ids of jobs that their workers shall kill
    x:cancelled:{job}     string, 30 s              a worker whose subscription broke looks for those of its jobs
    x:cancel@gateways     channel (likewise)                          an `Ask` to all gateways, by tags
    x:cancel@requests     channel (likewise)                          an `Ask` to all gateways, by request: see `ask_others`
    x:cancel@{gateway}    channel (likewise)                          what one gateway tells another that asked

Fields of an entry: v = `WIRE_VERSION`, id = of the job, to = the gateway that waits for its answer, j = the packed `Job`. Of an
entry with answers: v, id = of all its jobs, with spaces between, a = the packed `Answer`s. Whoever cannot read the packed part
still knows from the others what to do.

Rules (`exec_wire.queue.protocol`) and how they are kept here:

  Take       A worker with free slots asks for exactly so many, over all streams that it can serve; only if there is nothing
             does it block. What a blocking read brings too much (it counts per stream) is handed back at once.
  Lease      An entry's idle time in the group. A renewal is an XCLAIM to oneself, done only if the entry is still one's own.
             Handing back is an XCLAIM to nobody that makes the entry look idle; its id stays, so its gateway can still find it.
  Answer     One script: XACK, XDEL, XADD NOMKSTREAM, SET. If the gateway's stream is not there, the worker keeps the answer for
             a while: after a FLUSHALL the gateway makes its stream again.
  Unreadable An entry of a newer version is handed back to the consumer `version N`; only workers that read N look there for
             lapsed leases.
  Time       How long an entry waited in its stream is told by the clock that stamped its id: the primary's own.
  Memory     In a script that has written once, Redis lets further writes pass although `maxmemory` is reached. So nothing new
             is published then, but whatever frees memory or keeps a lease alive still works.

A script is sent with its text (EVAL): a server that was restarted knows no hashes, and the text is small beside the payloads.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET

from exec_wire.messages.calls import Selection
from exec_wire.queue.connection import Command, Link, NoGroup, Subscription, Word, opener
from exec_wire.queue.protocol import (
    LEASE_S,
    NO_USE,
    RECORD_S,
    WIRE_VERSION,
    Answer,
    Ask,
    GatewayInfo,
    Job,
    QueueAway,
    TenantUse,
    WorkerInfo,
    fingerprint,
)
from exec_wire.supervisor import logged

log = logging.getLogger("exec_wire.redis")

T = TypeVar("T")

GROUP, NOBODY = "workers", "nobody"
DIRECTED_S = 120
DIRECTED_REMEMBERED = 4096  # ids: what was read and not deleted is not taken twice
REPLY_S = 60  # a gateway that is gone for longer finds its answers gone too
BLOCK_S = 1.0  # of a blocking read; between two of them lapsed leases are looked for
READ_COUNT = 256
LATELY_TURNS, LOOK_AROUND_TURNS = 64, 8  # of a worker's takes: see `_in_turn`
ANSWERS_AT_ONCE, ANSWER_BYTES_AT_ONCE = 512, 4 << 20
ASK_S = 1.5  # how long other gateways have to say what they cancelled
UNDELIVERED_PAUSE_S = 0.5
SWEEP_MS = 3_600_000
RECORDED_BYTES = 64 << 20  # of results that one worker keeps in Redis within `RECORD_S`
_LEASE_MS = round(LEASE_S * 1000)

_pack = msgspec.msgpack.Encoder().encode
_unpack_job = msgspec.msgpack.Decoder(Job).decode
_unpack_answers = msgspec.msgpack.Decoder(list[Answer]).decode
_unpack_ask = msgspec.msgpack.Decoder(Ask).decode
_unpack_told = msgspec.msgpack.Decoder(tuple[str, int]).decode
_UNREADABLE = (msgspec.DecodeError, ValueError)  # text that is not UTF-8 is a ValueError

# KEYS: streams. ARGV: the version, then the number of a stream, the id of a job, its gateway and the job, again and again.
PUBLISH = """
local ids = {}
for at = 2, #ARGV, 4 do
  ids[#ids + 1] = redis.call('XADD', KEYS[tonumber(ARGV[at])], '*',
    'v', ARGV[1], 'id', ARGV[at + 1], 'to', ARGV[at + 2], 'j', ARGV[at + 3])
end
return ids
"""
# KEYS: the stream of one worker. ARGV: the version, the id of a job, its gateway, the job, seconds that it is kept if nobody
# reads it.
PUBLISH_TO = """
redis.call('XADD', KEYS[1], '*', 'v', ARGV[1], 'id', ARGV[2], 'to', ARGV[3], 'j', ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
"""
# KEYS: streams, in the order in which they are served. ARGV: group, consumer, how many, idle time from which a lease has lapsed
# (0: do not look for any), version. Gives the time, then {stream, id, fields, deliveries} of each. What was handed back as
# newer than this version is passed over.
TAKE = """
local group, me, left, lease, version = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = redis.call('TIME')
local found = {string.format('%d', now[1] * 1000 + math.floor(now[2] / 1000))}
local function add(number, entry, deliveries)
  found[#found + 1] = {number, entry[1], entry[2], deliveries}
  left = left - 1
end
for number, stream in ipairs(KEYS) do
  local first = '-'
  while lease > 0 and left > 0 and first do
    local page = redis.call('XPENDING', stream, group, 'IDLE', lease, first, '+', left)
    first = #page == left and '(' .. page[#page][1]
    for _, pending in ipairs(page) do
      if (tonumber(string.match(pending[2], '^version (%d+)$')) or 0) <= version then
        local claimed = redis.call('XCLAIM', stream, group, me, lease, pending[1])
        if claimed[1] and claimed[1][2] then add(number, claimed[1], pending[4] + 1) end
      end
    end
  end
end
for number, stream in ipairs(KEYS) do
  if left > 0 then
    local read = redis.call('XREADGROUP', 'GROUP', group, me, 'COUNT', left, 'STREAMS', stream, '>')
    for _, entry in ipairs(read and read[1][2] or {}) do add(number, entry, 1) end
  end
end
return found
"""
# KEYS: streams. ARGV: group, consumer, then the number of a stream and an id, again and again.
RENEW = """
for at = 3, #ARGV, 2 do
  local stream, id = KEYS[tonumber(ARGV[at])], ARGV[at + 1]
  if #redis.call('XPENDING', stream, ARGV[1], id, id, 1, ARGV[2]) > 0 then
    redis.call('XCLAIM', stream, ARGV[1], ARGV[2], 0, id, 'JUSTID')
  end
end
"""
# As if it had not been delivered. KEYS: streams. ARGV: group, consumer, idle time to set, then stream, id, the deliveries
# before this one and to whom, again and again.
HAND_BACK = """
for at = 4, #ARGV, 4 do
  local stream, id = KEYS[tonumber(ARGV[at])], ARGV[at + 1]
  if #redis.call('XPENDING', stream, ARGV[1], id, id, 1, ARGV[2]) > 0 then
    redis.call('XCLAIM', stream, ARGV[1], ARGV[at + 3], 0, id, 'IDLE', ARGV[3], 'RETRYCOUNT', ARGV[at + 2], 'JUSTID')
  end
end
"""
# Entries that nobody can read or answer. KEYS: streams. ARGV: group, then stream and id, again and again.
REMOVE = """
for at = 2, #ARGV, 2 do
  redis.call('XACK', KEYS[tonumber(ARGV[at])], ARGV[1], ARGV[at + 1])
  redis.call('XDEL', KEYS[tonumber(ARGV[at])], ARGV[at + 1])
end
"""
# All that a worker has. A consumer is deleted only when nothing is pending with it: what is would never be delivered again.
# KEYS: its value, the set of all, streams. ARGV: group, consumer, idle time to set.
LEAVE = """
redis.call('UNLINK', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[2])
for number = 3, #KEYS do
  local pending = redis.pcall('XPENDING', KEYS[number], ARGV[1], '-', '+', 100, ARGV[2])
  while not pending.err and #pending > 0 do
    for _, entry in ipairs(pending) do
      redis.call('XCLAIM', KEYS[number], ARGV[1], 'nobody', 0, entry[1], 'IDLE', ARGV[3], 'JUSTID')
    end
    pending = redis.call('XPENDING', KEYS[number], ARGV[1], '-', '+', 100, ARGV[2])
  end
  if not pending.err then redis.call('XGROUP', 'DELCONSUMER', KEYS[number], ARGV[1], ARGV[2]) end
end
"""
# Consumers of workers that died long ago. KEYS: streams. ARGV: group, idle time.
SWEEP = """
for _, stream in ipairs(KEYS) do
  for _, facts in ipairs(redis.call('XINFO', 'CONSUMERS', stream, ARGV[1])) do
    local of = {}
    for at = 1, #facts, 2 do of[facts[at]] = facts[at + 1] end
    if of.pending == 0 and of.idle > tonumber(ARGV[2]) then redis.call('XGROUP', 'DELCONSUMER', stream, ARGV[1], of.name) end
  end
end
"""
# KEYS: job streams, reply streams, records. ARGV: group, seconds of a record, how many job streams and reply streams, the
# version, then for each job stream how many ids and the ids, for each reply stream the ids of its jobs and its answers, for
# each record its value. Gives for each reply stream whether it was there.
ANSWER = """
local jobs, replies, at, delivered = tonumber(ARGV[3]), tonumber(ARGV[4]), 6, {}
for number = 1, jobs do
  local last = at + tonumber(ARGV[at])
  redis.call('XACK', KEYS[number], ARGV[1], unpack(ARGV, at + 1, last))
  redis.call('XDEL', KEYS[number], unpack(ARGV, at + 1, last))
  at = last + 1
end
for number = jobs + 1, jobs + replies do
  delivered[#delivered + 1] = redis.call('XADD', KEYS[number], 'NOMKSTREAM', '*',
    'v', ARGV[5], 'id', ARGV[at], 'a', ARGV[at + 1]) and 1 or 0
  at = at + 2
end
for number = jobs + replies + 1, #KEYS do
  redis.call('SET', KEYS[number], ARGV[at], 'EX', ARGV[2])
  at = at + 1
end
return delivered
"""
# KEYS: streams. ARGV: group, channel, then stream, entry and job, again and again; entry - if it is not known.
# Gives the jobs that were with no worker; the workers are told of the others.
CANCEL = """
local untaken, taken = {}, {}
for at = 3, #ARGV, 3 do
  local stream, id, job = KEYS[tonumber(ARGV[at])], ARGV[at + 1], ARGV[at + 2]
  local pending, removed = {}, 0
  if id ~= '-' then
    pending = redis.pcall('XPENDING', stream, ARGV[1], id, id, 1)
    removed = redis.call('XDEL', stream, id)
  end
  if removed == 1 and (pending.err or #pending == 0) then
    untaken[#untaken + 1] = job
  else
    if removed == 1 then redis.call('XACK', stream, ARGV[1], id) end
    taken[#taken + 1] = job
    redis.call('SET', 'x:cancelled:' .. job, '', 'EX', 30)
  end
end
if #taken > 0 then redis.call('PUBLISH', ARGV[2], table.concat(taken, ' ')) end
return untaken
"""
# KEYS: streams. ARGV: stream and entry, again and again. Gives the positions of those that are gone, from 0.
MISSING = """
local gone = {}
for at = 1, #ARGV, 2 do
  if #redis.call('XRANGE', KEYS[tonumber(ARGV[at])], ARGV[at + 1], ARGV[at + 1]) == 0 then gone[#gone + 1] = (at - 1) / 2 end
end
return gone
"""
# KEYS: the value of this one, the set of all. ARGV: its id, its value, how long it is seen (ms).
ANNOUNCE = """
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
"""
# KEYS: the reply stream of this gateway. ARGV: seconds it lives. Gives 1 if it was not there.
KEEP_REPLY = """
if redis.call('EXPIRE', KEYS[1], ARGV[1]) == 1 then return 0 end
redis.call('XDEL', KEYS[1], redis.call('XADD', KEYS[1], '*', 'a', ''))
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
"""
# KEYS: a set of ids. ARGV: what their keys begin with. Gives the values of those that are alive; '' of one that is no text.
ALIVE = """
local values, lost = {}, {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local value = redis.pcall('GET', ARGV[1] .. id)
  if type(value) == 'table' then value = '' end
  if value then values[#values + 1] = value
  else
    redis.call('SREM', KEYS[1], id)
    lost[#lost + 1] = id
  end
end
return {values, lost}
"""
# Written first in a script that must work although memory is full: see the top of this file.
_FREELY = "redis.call('UNLINK', 'x:')\n"


def _warn_of_lost(kind: str, ids: Sequence[bytes]) -> None:
    """Told to the first who looks; the others do not see them any more."""
    for id in ids:
        words = "a %s was lost: it sent no heartbeat for %g s and had not left"
        log.warning(words, kind, LEASE_S, extra={kind: id.decode(errors="replace")})


def script(text: str, keys: Sequence[Word], *arguments: Word) -> Command:
    return ("EVAL", text, len(keys), *keys, *arguments)


def jobs_key(needs: str) -> str:
    return f"x:jobs:{needs}"


def directed_key(worker: str) -> str:
    return f"x:jobs@{worker}"


def reply_key(gateway: str) -> str:
    return f"x:reply@{gateway}"


def record_key(name: str) -> str:
    return f"x:idem:{name}"


class Entry(NamedTuple):
    """Where a job is in its stream, and how often it was delivered from there."""

    stream: str
    id: str
    deliveries: int = 1


class Envelope(NamedTuple):
    """What an entry says beside its packed part."""

    version: int
    id: str
    reply_to: str


def _named(fields: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(fields[::2], fields[1::2], strict=True))


def _envelope(named: dict[bytes, bytes]) -> Envelope | None:
    """None if a part of it is missing, or is nothing that a gateway has written."""
    try:
        envelope = Envelope(int(named[b"v"]), named[b"id"].decode(), named[b"to"].decode())
    except (KeyError, ValueError):
        return None
    return envelope if envelope.version > 0 and envelope.id and envelope.reply_to else None


def _rotated(streams: list[str], by: int) -> list[str]:
    at = by % max(1, len(streams))
    return streams[at:] + streams[:at]


class Streams:
    """The keys of a script, each once, and the number by which the script knows it."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, stream: str) -> int:
        return self.numbers.setdefault(stream, len(self.numbers) + 1)

    @property
    def keys(self) -> list[str]:
        return list(self.numbers)


class RedisQueue:
    """`gateway()` and `worker()` open the two ends. `ValueError` if the URL is none."""

    def __init__(self, url: str) -> None:
        database = opener(url)().db or 0
        self.url = url
        self.cancels = f"x:cancel:{database}"
        self.asks = f"x:cancel@gateways:{database}"
        self.asks_by_request = f"x:cancel@requests:{database}"

    def told(self, gateway: str) -> str:
        return f"x:cancel@{gateway}:{self.asks.rpartition(':')[2]}"

    def gateway(self, name: str) -> RedisGatewayEnd:
        return RedisGatewayEnd(self, name)

    def worker(self, name: str) -> RedisWorkerEnd:
        return RedisWorkerEnd(self, name)


class Heartbeats(Generic[T]):
    """What those who announce themselves say. One that cannot be read is ignored; it is counted and logged once."""

    def __init__(self, kind: type[T], who: str) -> None:
        self._decode, self._who = msgspec.json.Decoder(kind).decode, who
        self._unreadable: set[bytes] = set()

    def read(self, values: Sequence[bytes], unreadable: Counter[str]) -> list[T]:
        infos: list[T] = []
        for value in values:
            try:
                infos.append(self._decode(value))
            except _UNREADABLE as error:
                if value not in self._unreadable:
                    unreadable["heartbeat"] += 1
                    self._unreadable.add(value)
                    log.error("the heartbeat of a %s cannot be read; the %s is ignored: %s", self._who, self._who, error)
        self._unreadable &= set(values)
        return infos


class RedisGatewayEnd:
    shared = True

    def __init__(self, queue: RedisQueue, name: str) -> None:
        self.name = name
        self._queue = queue
        self._commands, self._reads = Link(queue.url), Link(queue.url)
        self._notes = Subscription(queue.url, [queue.asks, queue.asks_by_request, queue.told(name)])
        self._reply = reply_key(name)
        self._read: list[bytes] = []  # entries of the reply stream that were handed out
        self._entries: dict[str, Entry] = {}  # of published jobs that were not answered
        self._told: dict[str, asyncio.Queue[int]] = {}
        self._reply_made = False
        self.forgotten = 0
        self.unreadable: Counter[str] = Counter()
        self._workers, self._gateways = Heartbeats(WorkerInfo, "worker"), Heartbeats(GatewayInfo, "gateway")

    async def announce(self, backlog: bool, tenants: Mapping[str, TenantUse] = NO_USE) -> list[GatewayInfo]:
        info = msgspec.json.encode(GatewayInfo(self.name, backlog, dict(tenants)))
        _, made, (values, lost) = await self._commands.call(
            script(_FREELY + ANNOUNCE, [f"x:gateway:{self.name}", "x:gateways"], self.name, info, _LEASE_MS),
            script(_FREELY + KEEP_REPLY, [self._reply], REPLY_S),
            script(ALIVE, ["x:gateways"], "x:gateway:"),
        )
        self.forgotten += self._reply_made and made  # whoever has lost our stream may have lost all others
        self._reply_made = True
        _warn_of_lost("gateway", lost)
        return [other for other in self._gateways.read(values, self.unreadable) if other.id != self.name]

    async def publish(self, jobs: Sequence[Job]) -> None:
        streams = Streams()
        arguments: list[Word] = [WIRE_VERSION]
        for job in jobs:
            arguments += (streams.number(jobs_key(job.needs)), job.id, job.reply_to, _pack(job))
        [ids] = await self._commands.call(script(PUBLISH, streams.keys, *arguments))
        for job, id in zip(jobs, ids, strict=True):
            self._entries[job.id] = Entry(jobs_key(job.needs), id.decode())

    async def publish_to(self, worker: str, job: Job) -> None:
        arguments = (WIRE_VERSION, job.id, job.reply_to, _pack(job), DIRECTED_S)
        await self._commands.call(script(PUBLISH_TO, [directed_key(worker)], *arguments))

    async def receive(self) -> list[Answer]:
        while True:
            # What was handed out is deleted with the next read. All that is there is unread, so reading starts at 0: ids
            # of a primary that took over with a slower clock may be smaller than those before.
            commands: list[Command] = [("XDEL", self._reply, *self._read)] if self._read else []
            commands.append(("XREAD", "COUNT", READ_COUNT, "BLOCK", round(BLOCK_S * 1000), "STREAMS", self._reply, "0"))
            *_, streams = await self._reads.call(*commands, block_s=BLOCK_S)
            self._read = []
            if not streams:
                continue
            entries = streams[0][1]
            self._read = [id for id, _ in entries]
            answers = [answer for _, fields in entries for answer in self._open_answers(fields)]
            for answer in answers:
                self._entries.pop(answer.id, None)
            if answers:
                return answers

    def _open_answers(self, fields: list[bytes]) -> list[Answer]:
        """Answers without contents, if this is all that can be known of them."""
        named = _named(fields)
        try:
            if int(named[b"v"]) <= WIRE_VERSION:
                return _unpack_answers(named[b"a"])
        except (KeyError, *_UNREADABLE):
            pass
        self.unreadable["answer"] += 1
        ids = named.get(b"id", b"").decode(errors="replace").split()
        log.error("an answer cannot be read", extra={"jobs": ids, "version": named.get(b"v", b"").decode(errors="replace")})
        return [Answer(id, b"") for id in ids]

    async def cancel(self, ids: Sequence[str]) -> list[str]:
        streams = Streams()
        arguments: list[Word] = []
        for id in ids:
            entry = self._entries.get(id, Entry(jobs_key("python"), "-"))
            arguments += (streams.number(entry.stream), entry.id, id)
        [untaken] = await self._commands.call(script(_FREELY + CANCEL, streams.keys, GROUP, self._queue.cancels, *arguments))
        for id in ids:
            self._entries.pop(id, None)
        return [id.decode() for id in untaken]

    async def missing(self, ids: Sequence[str]) -> list[str]:
        known = [id for id in ids if id in self._entries]
        streams = Streams()
        arguments: list[Word] = []
        for id in known:
            entry = self._entries[id]
            arguments += (streams.number(entry.stream), entry.id)
        if not known:
            return []
        [gone] = await self._commands.call(script(MISSING, streams.keys, *arguments))
        return [known[position] for position in gone]

    async def workers(self) -> list[WorkerInfo]:
        [(values, lost)] = await self._commands.call(script(ALIVE, ["x:workers"], "x:worker:"))
        _warn_of_lost("worker", lost)
        return sorted(self._workers.read(values, self.unreadable), key=lambda info: info.id)

    async def recorded(self, names: Sequence[str]) -> list[bytes | None]:
        [found] = await self._commands.call(("MGET", *map(record_key, names)))
        return list(found)

    async def ask_others(self, selection: Selection) -> int:
        # A channel of its own: a gateway of an older version would not see `request`, and cancel all calls of the tenant.
        channel = self._queue.asks if selection.request is UNSET else self._queue.asks_by_request
        ask = Ask(self.name, secrets.token_hex(8), selection)
        told = self._told[ask.id] = asyncio.Queue()
        total = 0
        try:
            await self._notes.listen()
            [listeners] = await self._commands.call(("PUBLISH", channel, _pack(ask)))
            async with asyncio.timeout(ASK_S):
                for _ in range(listeners - 1):
                    total += await told.get()
        except TimeoutError:
            log.warning("not every gateway said what it cancelled")
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
            except _UNREADABLE as error:
                self.unreadable["ask"] += 1
                log.error("a message of another gateway cannot be read: %s", error)

    async def tell(self, ask: Ask, cancelled: int) -> None:
        await self._commands.call(("PUBLISH", self._queue.told(ask.asker), _pack((ask.id, cancelled))))

    async def leave(self) -> None:
        try:
            await self._commands.call(("UNLINK", f"x:gateway:{self.name}", self._reply), ("SREM", "x:gateways", self.name))
        except QueueAway as away:
            log.warning("left without a word: %s", away)
        for part in (self._commands, self._reads, self._notes):
            await part.close()


class _Taken(msgspec.Struct):
    """A job that this worker has, wherever it was published."""

    job: Job
    entries: list[Entry]
    at: float
    fingerprint: bytes = b""


class _Outgoing(NamedTuple):
    answer: Answer
    reply_to: str
    sent: asyncio.Future[None]


class RedisWorkerEnd:
    def __init__(self, queue: RedisQueue, name: str) -> None:
        self._queue, self._name = queue, name
        self._commands, self._blocking = Link(queue.url), Link(queue.url)
        self._notes = Subscription(queue.url, [queue.cancels])
        self._streams = [jobs_key("python")]
        self._turn = 0
        self._gave_in_turn: dict[str, int] = {}  # when a stream last had a job
        self._claimed_at = float("-inf")
        self.unreadable: Counter[str] = Counter()
        self._taken: dict[str, _Taken] = {}
        self._missed_cancels = False  # the subscription broke, and what was said meanwhile is lost
        self._directed = Link(queue.url)
        self._directed_read: list[bytes] = []
        self._directed_ids: deque[str] = deque(maxlen=DIRECTED_REMEMBERED)
        self._taking: asyncio.Task[list[Job]] | None = None
        self._left = False
        self._outbox: deque[_Outgoing] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._undelivered: set[asyncio.Task[None]] = set()
        self._recorded: deque[tuple[float, int]] = deque()  # when, and how many bytes
        self._recorded_bytes = 0

    async def announce(self, info: WorkerInfo) -> None:
        self._streams = [jobs_key(needs) for needs in info.classes]
        await self._commands.call(
            script(
                _FREELY + ANNOUNCE, [f"x:worker:{self._name}", "x:workers"], self._name, msgspec.json.encode(info), _LEASE_MS
            )
        )

    # -- taking -----------------------------------------------------------------------------------------------------------

    async def take(self, most: int, *, wait: bool = True) -> list[Job]:
        # In a task of its own: a caller that is cancelled must not lose what the server has handed out meanwhile.
        if self._taking is None:
            self._taking = asyncio.create_task(self._take(most, wait))
        await asyncio.wait({self._taking})
        if self._left:
            await asyncio.Future()  # whoever asks after leaving waits in vain
        taking, self._taking = self._taking, None
        jobs = taking.result()
        if len(jobs) > most:
            try:
                await self._hand_back(jobs[most:])
            except QueueAway as away:
                log.warning("jobs were not handed back, their leases expire: %s", away)
        return jobs[:most]

    async def _take(self, most: int, wait: bool) -> list[Job]:
        await self._notes.listen()  # before anything is taken that may be cancelled
        while not self._left:
            try:
                if (jobs := await self._take_now(most) or (await self._wait() if wait else [])) or not wait:
                    return jobs
            except NoGroup:
                await self._make_groups()
        return []

    async def _take_now(self, most: int) -> list[Job]:
        look_for_lapsed = time.monotonic() >= self._claimed_at + BLOCK_S
        streams = self._in_turn()
        [(now, *found)] = await self._commands.call(
            script(TAKE, streams, GROUP, self._name, most, _LEASE_MS if look_for_lapsed else 0, WIRE_VERSION)
        )
        if look_for_lapsed:
            self._claimed_at = time.monotonic()
        return await self._open(
            [(Entry(streams[number - 1], id.decode(), deliveries), fields) for number, id, fields, deliveries in found],
            int(now),
        )

    async def take_directed(self) -> list[Job]:
        """As a gateway reads its answers: what was handed out is deleted with the next read, and never handed out again."""
        stream = directed_key(self._name)
        while not self._left:
            commands: list[Command] = [("XDEL", stream, *self._directed_read)] if self._directed_read else []
            read = ("XREAD", "COUNT", READ_COUNT, "BLOCK", round(BLOCK_S * 1000), "STREAMS", stream, "0")
            *_, streams, (seconds, micros) = await self._directed.call(*commands, read, ("TIME",), block_s=BLOCK_S)
            entries = streams[0][1] if streams else []
            self._directed_read = [id for id, _ in entries]
            now_ms = int(seconds) * 1000 + int(micros) // 1000
            if jobs := [job for id, fields in entries if (job := self._take_once(id, fields, now_ms)) is not None]:
                return jobs
        return await asyncio.Future()

    def _take_once(self, id: bytes, fields: list[bytes], now_ms: int) -> Job | None:
        named = _named(fields)
        if (envelope := _envelope(named)) is None:
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

    def _in_turn(self) -> list[str]:
        """All streams. Those that had jobs lately come first, each as often as any other; now and then they come last.

        There are many, for every language and tier, and to look into an empty one costs the server as much as a job.
        """
        self._turn += 1
        since = self._turn - LATELY_TURNS
        lately = [stream for stream in self._streams if self._gave_in_turn.get(stream, since) > since]
        others = [stream for stream in self._streams if stream not in lately]
        if self._turn % LOOK_AROUND_TURNS == 0:
            return _rotated(others, self._turn // LOOK_AROUND_TURNS) + _rotated(lately, self._turn)
        return _rotated(lately, self._turn) + _rotated(others, self._turn)

    async def _wait(self) -> list[Job]:
        """For the first job to come, as long as lapsed leases need not be looked for."""
        places = [">"] * len(self._streams)
        read = ("XREADGROUP", "GROUP", GROUP, self._name, "COUNT", 1, "BLOCK", round(BLOCK_S * 1000), "STREAMS")
        streams, (seconds, micros) = await self._blocking.call((*read, *self._streams, *places), ("TIME",), block_s=BLOCK_S)
        now = int(seconds) * 1000 + int(micros) // 1000
        found = [(Entry(stream.decode(), id.decode()), fields) for stream, entries in streams or [] for id, fields in entries]
        return await self._open(found, now)

    async def _open(self, found: list[tuple[Entry, list[bytes]]], now_ms: int) -> list[Job]:
        """The jobs of these entries. Those of a newer version are handed back, those that say nothing of their job removed."""
        jobs: list[Job] = []
        newer: list[tuple[Entry, str]] = []
        unaddressed: list[Entry] = []
        for entry, fields in found:
            self._gave_in_turn[entry.stream] = self._turn
            named = _named(fields)
            if (envelope := _envelope(named)) is None:
                unaddressed.append(entry)
            elif envelope.version > WIRE_VERSION:
                newer.append((entry, f"version {envelope.version}"))
            else:
                jobs.append(self._keep(entry, self._open_job(envelope, named), now_ms))
        try:
            if newer:
                self.unreadable["newer"] += len(newer)
                log.warning("%d jobs of a newer version were left to other workers", len(newer))
                await self._give_away(newer)
            if unaddressed:
                self._count_unaddressed(len(unaddressed))
                await self._remove(unaddressed)
        except QueueAway as away:  # the jobs that can be read must not be lost for those that cannot
            log.warning("entries that cannot be read stay for a while: %s", away)
        return jobs

    def _open_job(self, envelope: Envelope, named: dict[bytes, bytes]) -> Job:
        """The job; with an empty payload, which no worker can read, if nothing else can be known of it."""
        if envelope.version <= WIRE_VERSION:
            try:
                return _unpack_job(named.get(b"j", b""))
            except _UNREADABLE:
                pass
        self.unreadable["payload"] += 1
        log.error("a job cannot be read", extra={"job": envelope.id, "version": envelope.version})
        return Job(envelope.id, b"", 0, envelope.reply_to)

    def _count_unaddressed(self, count: int) -> None:
        self.unreadable["unaddressed"] += count
        log.error("%d entries without id, gateway and version were removed", count)

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
        """From 0, so that what was published before the group was there is not passed over."""
        make: list[Command] = [("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM") for stream in self._streams]
        for answer in await self._commands.try_(*make):
            if isinstance(answer, Exception) and "BUSYGROUP" not in str(answer):
                raise QueueAway(f"cannot make a group: {answer}", sent=False)
        await self._commands.call(script(SWEEP, self._streams, GROUP, SWEEP_MS))

    async def _hand_back(self, jobs: Sequence[Job]) -> None:
        await self._give_away([(entry, NOBODY) for job in jobs for entry in self._taken.pop(job.id).entries])

    async def _give_away(self, entries: Sequence[tuple[Entry, str]]) -> None:
        streams = Streams()
        arguments: list[Word] = []
        for entry, consumer in entries:
            arguments += (streams.number(entry.stream), entry.id, entry.deliveries - 1, consumer)
        await self._commands.call(script(HAND_BACK, streams.keys, GROUP, self._name, 2 * _LEASE_MS, *arguments))

    async def _remove(self, entries: Sequence[Entry]) -> None:
        streams = Streams()
        arguments: list[Word] = []
        for entry in entries:
            arguments += (streams.number(entry.stream), entry.id)
        await self._commands.call(script(REMOVE, streams.keys, GROUP, *arguments))

    # -- leases -----------------------------------------------------------------------------------------------------------

    async def renew(self, ids: Sequence[str]) -> None:
        wanted = set(ids)
        lapsed_at = time.monotonic() - 2 * LEASE_S  # nobody can be running these
        for id in [id for id, taken in self._taken.items() if id not in wanted and taken.at < lapsed_at]:
            del self._taken[id]
        streams = Streams()
        arguments: list[Word] = []
        for id in wanted & self._taken.keys():
            for entry in self._taken[id].entries:
                arguments += (streams.number(entry.stream), entry.id)
        if arguments:
            try:
                await self._commands.call(script(RENEW, streams.keys, GROUP, self._name, *arguments))
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
        if sent and self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        if len(sent) == 1:  # as always with a worker; gathering one costs 6 µs of the 55 that a call takes here
            await sent[0]
        else:
            await asyncio.gather(*sent)

    async def _send_all(self) -> None:
        """What is answered while one script is on its way goes with the next one."""
        try:
            while self._outbox:
                part = self._next_part()
                try:
                    await self._send(part)
                except Exception as error:
                    for outgoing in part:
                        if not outgoing.sent.done():
                            outgoing.sent.set_exception(error)
                else:
                    for outgoing in part:
                        if not outgoing.sent.done():
                            outgoing.sent.set_result(None)
        finally:
            self._sending = None

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
                records[record_key(taken.job.record_as)] = taken.fingerprint + answer.payload
        packed = {gateway: (" ".join(answer.id for answer in answers), _pack(answers)) for gateway, answers in replies.items()}
        arguments: list[Word] = [GROUP, RECORD_S, len(entries), len(packed), WIRE_VERSION]
        for ids in entries.values():
            arguments += (len(ids), *ids)
        for words in packed.values():
            arguments += words
        keys = [*entries, *map(reply_key, packed), *records]
        [delivered] = await self._commands.call(script(ANSWER, keys, *arguments, *records.values()))
        for answer, _, _ in part:
            self._taken.pop(answer.id, None)
        for gateway, there in zip(packed, delivered, strict=True):
            if not there:
                self._keep_trying(gateway, *packed[gateway])

    def _may_record(self, size: int) -> bool:
        """Within the budget: what this worker has recorded and is not forgotten yet."""
        now = time.monotonic()
        while self._recorded and self._recorded[0][0] < now - RECORD_S:
            self._recorded_bytes -= self._recorded.popleft()[1]
        if self._recorded_bytes + size > RECORDED_BYTES:
            return False
        self._recorded.append((now, size))
        self._recorded_bytes += size
        return True

    def _keep_trying(self, gateway: str, ids: str, packed: bytes) -> None:
        """Its stream is not there. If the gateway lives it makes the stream again; if not, nobody waits for this."""

        async def deliver() -> None:
            give_up = time.monotonic() + LEASE_S
            while time.monotonic() < give_up:
                await asyncio.sleep(UNDELIVERED_PAUSE_S)
                try:
                    [[delivered]] = await self._commands.call(
                        script(_FREELY + ANSWER, [reply_key(gateway)], GROUP, RECORD_S, 0, 1, WIRE_VERSION, ids, packed)
                    )
                except QueueAway:
                    continue
                if delivered:
                    return
            log.warning("answers for a gateway that is gone were dropped", extra={"gateway": gateway})

        task = logged(asyncio.create_task(deliver()), "answers were not delivered")
        self._undelivered.add(task)
        task.add_done_callback(self._undelivered.discard)

    # -- cancellation, leaving --------------------------------------------------------------------------------------------

    async def cancelled(self) -> list[str]:
        if self._missed_cancels:
            await self._notes.listen()
            ids = list(self._taken)
            [marks] = await self._commands.call(("MGET", "x:", *(f"x:cancelled:{id}" for id in ids)))
            self._missed_cancels = False
            if missed := [id for id, mark in zip(ids, marks[1:], strict=True) if mark is not None]:
                return missed
        try:
            _, data = await self._notes.message()
        except QueueAway:
            self._missed_cancels = True
            raise
        return data.decode(errors="replace").split()

    async def leave(self) -> None:
        self._left = True
        try:
            await self._stop_taking()
            keys = [f"x:worker:{self._name}", "x:workers", *self._streams]
            await self._commands.call(script(LEAVE, keys, GROUP, self._name, 2 * _LEASE_MS))
        except QueueAway as away:
            log.warning("left without a word; others take what ran here when its lease has lapsed: %s", away)
        for task in [*self._undelivered, *([self._taking] if self._taking else [])]:
            task.cancel()
        for part in (self._commands, self._blocking, self._directed, self._notes):
            await part.close()

    async def _stop_taking(self) -> None:
        """The server ends the blocking read, so that it hands out nothing after this. Answers on their way are let through."""
        if self._sending is not None:
            await asyncio.wait({self._sending}, timeout=BLOCK_S)
        if self._taking is not None:
            await self._commands.call(("CLIENT", "UNBLOCK", self._blocking.client_id))
            await asyncio.wait({self._taking}, timeout=BLOCK_S + 1)
