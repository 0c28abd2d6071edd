"""Keys, scripts and entries of the Redis queue (`exec_wire.queue.redis` lists them)."""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from exec_wire.queue.connection import ClusterServer, Command, Server, Word
from exec_wire.queue.protocol import LEASE_S
from exec_wire.queue.urls import slot_of

log = logging.getLogger("exec_wire.redis")

T = TypeVar("T")

# The layout of keys and channels. A layout that today's readers would misunderstand gets the next number. Its workers then
# serve the streams of both numbers for one version, so that gateways and workers can be upgraded one by one.
LAYOUT_VERSION = 1
PREFIX = f"x{LAYOUT_VERSION}:"
GROUP, NOBODY = "workers", "nobody"  # leave.lua and cancel.lua name `nobody` too
BLOCK_S = 1.0  # duration of a blocking read; a worker looks for expired leases between two of them
READ_COUNT = 256
LEASE_MS = round(LEASE_S * 1000)

pack = msgspec.msgpack.Encoder().encode
UNREADABLE = (msgspec.DecodeError, ValueError)  # text that is not UTF-8 is a ValueError


def _load(path: Path) -> str:
    """The script without its leading comment."""
    return "".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith("--"))


SCRIPTS = {path.stem: _load(path) for path in Path(__file__).with_name("scripts").glob("*.lua")}
# After one write Redis permits the others although memory is full. This one changes nothing.
_WRITE_FIRST = "redis.call('EXPIRE', KEYS[1], 1000000000, 'XX', 'LT')\n"


def script(name: str, keys: Sequence[Word], *arguments: Word, even_if_full: bool = False) -> Command:
    text = _WRITE_FIRST + SCRIPTS[name] if even_if_full else SCRIPTS[name]
    return ("EVAL", text, len(keys), *keys, *arguments)


class Address:
    """The server, and the names of keys and channels there. Redis does not separate channels by database, so these name it."""

    def __init__(self, url: str, tag: str = "") -> None:
        """`tag`: in a cluster, of all names, so that one primary has all keys."""
        self.server = ClusterServer(url, slot_of(tag)) if tag else Server(url)
        self._database = self.server.database
        self.prefix = prefix = f"{PREFIX}{{{tag}}}:" if tag else PREFIX
        self.workers, self.worker_key = f"{prefix}workers", f"{prefix}worker:"
        self.gateways, self.gateway_key = f"{prefix}gateways", f"{prefix}gateway:"
        self.jobs, self.directed, self.reply = f"{prefix}jobs:", f"{prefix}jobs@", f"{prefix}reply@"
        self.record, self.mark = f"{prefix}idem:", f"{prefix}cancelled:"
        self.cancels = f"{prefix}cancel:{self._database}"
        self.handed_back = f"{prefix}handed_back:{self._database}"
        self.asks = f"{prefix}cancel@gateways:{self._database}"
        self.asks_by_request = f"{prefix}cancel@requests:{self._database}"

    def told(self, gateway: str) -> str:
        return f"{self.prefix}cancel@{gateway}:{self._database}"


class Entry(NamedTuple):
    """The position of a job in its stream, and how often it was started from there, with the start to come.

    counted: the server has counted that start.
    """

    stream: str
    id: str
    deliveries: int = 1
    counted: bool = True


class Envelope(NamedTuple):
    """The fields of an entry beside its packed part."""

    version: int
    id: str
    reply_to: str


def named_fields(fields: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(fields[::2], fields[1::2], strict=True))


def read_envelope(named: dict[bytes, bytes]) -> Envelope | None:
    """None if a field is missing or no gateway can have written it."""
    try:
        envelope = Envelope(int(named[b"v"]), named[b"id"].decode(), named[b"to"].decode())
    except (KeyError, ValueError):
        return None
    return envelope if envelope.version > 0 and envelope.id and envelope.reply_to else None


class Streams:
    """Collects the keys of a script, each once, and the arguments that refer to them by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.arguments: list[Word] = []

    def add(self, stream: str, *arguments: Word) -> None:
        self.arguments.append(self._numbers.setdefault(stream, len(self._numbers) + 1))
        self.arguments += arguments

    @property
    def keys(self) -> list[str]:
        return list(self._numbers)


class Heartbeats(Generic[T]):
    """The heartbeats of all gateways or workers. Ignores unreadable ones; counts and logs each of them once."""

    def __init__(self, kind: type[T], who: str, ids: str, key: str) -> None:
        """`ids`: the key of their set; `key`: of a heartbeat, without the id."""
        self._decode, self._who, self._set, self._key = msgspec.json.Decoder(kind).decode, who, ids, key
        self._ids: list[bytes] = []  # in the set when it was read last
        self._unreadable: set[bytes] = set()

    def command(self) -> Command:
        return script("alive", [self._set, *(self._key.encode() + id for id in self._ids)], *self._ids)

    def knows(self, ids: Sequence[bytes]) -> bool:
        """Whether the last command read these heartbeats; the next one does."""
        missed = set(ids).difference(self._ids)
        self._ids = list(ids)
        return not missed

    def log_lost(self, ids: Sequence[bytes]) -> None:
        """Only the first reader gets these: reading removes them from the set."""
        for id in ids:
            words = "a %s was lost: it sent no heartbeat for %g s and did not deregister"
            log.warning(words, self._who, LEASE_S, extra={self._who: id.decode(errors="replace")})

    def read(self, values: Sequence[bytes], unreadable: Counter[str]) -> list[T]:
        infos: list[T] = []
        for value in values:
            try:
                infos.append(self._decode(value))
            except UNREADABLE as error:
                if value not in self._unreadable:
                    unreadable["heartbeat"] += 1
                    self._unreadable.add(value)
                    log.error("the heartbeat of a %s cannot be read; the %s is ignored: %s", self._who, self._who, error)
        self._unreadable &= set(values)
        return infos
