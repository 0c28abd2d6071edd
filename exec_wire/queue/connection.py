"""Connections to Redis or Valkey for the queue: few, shared, with short time limits.

redis-py only reads the URL. A `Link` writes the commands of all callers in one turn of the event loop with one system call and
hands out the answers as hiredis parses them: about ten times as many commands a second as a pool of connections.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from hiredis import HiredisError, Reader, pack_command
from redis.asyncio.connection import ConnectionPool, SSLConnection, UnixDomainSocketConnection

from exec_wire.queue.protocol import QueueUnavailable
from exec_wire.queue.urls import where

log = logging.getLogger("exec_wire.redis")

CONNECT_S = 3.0
ANSWER_S = 5.0  # a server that is silent for so long is unavailable
PAUSE_S, PAUSE_MOST_S = 0.05, 1.0  # between attempts to connect; doubled each time
PING_S = 2.0
REDIRECTIONS = 4  # attempts of a command whose keys move between servers of a cluster

Word = str | bytes | int | float
Command = tuple[Word, ...]

# The answers to a command of a group if the stream or the group does not exist. The second one ends a blocking XREADGROUP on
# Redis 7.0 when its stream is deleted; newer servers answer NOGROUP then too.
_GONE = ("NOGROUP", "UNBLOCKED the stream key no longer exists")
# The server did not execute the command: it is a replica, waits for its replicas or for a script, cannot write to its disk.
_NOT_DONE = ("MASTERDOWN", "NOREPLICAS", "BUSY", "MISCONF", "OOM", "READONLY", "TRYAGAIN", "CLUSTERDOWN", "UNBLOCKED")
_ELSEWHERE = ("MOVED ", "ASK ", "CROSSSLOT")  # nor these: it belongs to a cluster, and another server has the keys
# The connection is of no use: the server starts, wants another password or has too many clients.
_NO_SERVICE = ("LOADING", "NOAUTH", "WRONGPASS", "ERR max number of clients")
_NOT_ENOUGH = object()


class NoGroup(QueueUnavailable):
    """A stream or its group does not exist. A worker creates it; for all others the queue is unavailable."""

    def __init__(self, why: str) -> None:
        super().__init__(why, sent=False)


class ServerError(Exception):
    """The server answered with an error; the message begins with the server's code."""


def _packed(*commands: Command) -> bytes:
    return b"".join(pack_command(command) for command in commands)  # type: ignore[arg-type]


Host = tuple[str, int]


class Server:
    """Where the server is and how to log in, from its URL.

    Raises:
        ValueError: the URL is invalid.
    """

    def __init__(self, url: str) -> None:
        self._settings = settings = ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]
        self.name = where(url)
        self.database = int(settings.db or 0)
        self.login: list[Command] = []
        if settings.username or settings.password:
            user = (settings.username,) if settings.username else ()
            self.login.append(("AUTH", *user, settings.password or ""))
        if settings.client_name:
            self.login.append(("CLIENT", "SETNAME", settings.client_name))
        if self.database:
            self.login.append(("SELECT", self.database))
        # Always one answer: a proxy in front may accept connections for a server that is gone.
        self.login.append(("CLIENT", "ID"))

    async def connect(self, connection: Connection) -> None:
        if isinstance(self._settings, UnixDomainSocketConnection):
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, self._settings.path)
        else:
            await self.connect_to(connection, (self._settings.host, self._settings.port))

    async def connect_to(self, connection: Connection, host: Host) -> None:
        ssl = self._settings.ssl_context.get() if isinstance(self._settings, SSLConnection) else None
        await asyncio.get_running_loop().create_connection(lambda: connection, *host, ssl=ssl)

    def lost(self) -> None:
        """A connection broke, or none could be opened."""

    def moved(self, words: str) -> bool:
        """Whether a new connection leads to the server that this answer names."""
        return False

    def asked(self, words: str) -> Server | None:
        """The server that has to be asked this once, if the answer names one."""
        return None


class ClusterServer(Server):
    """The primary of a Redis Cluster that has a slot. Another one may have it soon: the slot moves, or the primary is lost."""

    def __init__(self, url: str, slot: int) -> None:
        parts = urlsplit(url)
        login, _, hosts = parts.netloc.rpartition("@")
        self._seeds = [_host(host) for host in hosts.split(",")]
        first = f"{login}@{hosts.split(',')[0]}" if login else hosts.split(",")[0]
        super().__init__(parts._replace(scheme=parts.scheme.removesuffix("+cluster"), netloc=first, path="").geturl())
        self.name, self._slot = f"slot {slot} of {where(url)}", slot
        self._nodes: list[Host] = []
        self._at: Host | None = None

    async def connect(self, connection: Connection) -> None:
        if self._at is None:
            self._at = await self._find()
        await self.connect_to(connection, self._at)

    async def _find(self) -> Host:
        """Ask any server of the cluster."""
        why: object = ""
        for host in [*random.sample(self._nodes, len(self._nodes)), *self._seeds]:
            probe = Connection()
            try:
                async with asyncio.timeout(CONNECT_S / 3):
                    await self.connect_to(probe, host)
                    probe.write(_packed(*self.login, ("CLUSTER", "SLOTS")))
                    *_, ranges = [await probe.next_answer() for _ in (*self.login, "ranges")]
            except OSError as error:
                why = error or type(error).__name__
                continue
            finally:
                probe.close()
            self._nodes = [_named(node, host) for _, _, *nodes in ranges for node in nodes]
            for first, last, primary, *_ in ranges:
                if first <= self._slot <= last:
                    return _named(primary, host)
            why = f"no primary has slot {self._slot}"
        raise ConnectionError(str(why))

    def lost(self) -> None:
        self._at = None

    def moved(self, words: str) -> bool:
        if not words.startswith("MOVED "):
            return False
        self._at = self._target(words)
        return True

    def asked(self, words: str) -> Server | None:
        return _OneOf(self, self._target(words)) if words.startswith("ASK ") else None

    def _target(self, words: str) -> Host:
        host, port = _host(words.split()[2])
        return host or (self._at or self._seeds[0])[0], port


class _OneOf(Server):
    """Another server of the same cluster."""

    def __init__(self, cluster: ClusterServer, host: Host) -> None:
        self._cluster, self._host, self.login = cluster, host, cluster.login
        self.name, self.database = f"{host[0]}:{host[1]}", 0

    async def connect(self, connection: Connection) -> None:
        await self._cluster.connect_to(connection, self._host)


def _host(text: str) -> Host:
    host, _, port = text.rpartition(":") if text.rpartition(":")[2].isdecimal() else (text, "", "6379")
    return host.strip("[]"), int(port)


def _named(node: Sequence[Any], asked: Host) -> Host:
    """A server that does not know its own address names none: it is the one that was asked."""
    return (node[0] or b"").decode() or asked[0], int(node[1])


class Connection(asyncio.Protocol):
    """One open connection. `on_answer` gets each answer, `on_lost` the reason when no more can come in order; until the caller
    of `open` sets them, `next_answer` returns both."""

    def __init__(self) -> None:
        self._reader = Reader(replyError=ServerError, notEnoughData=_NOT_ENOUGH)
        self._transport: Any = None
        self._lost = ""
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self.on_answer: Callable[[Any], None] = self._answers.put_nowait
        self.on_lost: Callable[[str], None] = lambda why: self._answers.put_nowait(ServerError(why))
        self.client_id = 0  # the server's id of this connection

    @classmethod
    async def open(cls, server: Server, channels: Sequence[str] = ()) -> Connection:
        """Connect, log in and subscribe. A caller that sets `on_answer` and `on_lost` does so before it awaits anything.

        Raises:
            OSError: no connection, no login or no answer within `CONNECT_S`.
        """
        connection = cls()
        try:
            async with asyncio.timeout(CONNECT_S):
                await server.connect(connection)
                connection.write(_packed(*server.login, *([("SUBSCRIBE", *channels)] if channels else [])))
                answers = [await connection.next_answer() for _ in (*server.login, *channels)]
                if connection._lost:
                    raise ConnectionError(connection._lost)
        except BaseException:
            connection.close()
            raise
        connection.client_id = answers[len(server.login) - 1]
        return connection

    async def next_answer(self, limit_s: float | None = None) -> Any:
        """Raises `ConnectionError` if it is an error, or if the connection is lost."""
        async with asyncio.timeout(limit_s):
            answer = await self._answers.get()
        if isinstance(answer, ServerError):
            raise ConnectionError(str(answer))
        return answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while not self._lost and (answer := self._reader.gets()) is not _NOT_ENOUGH:
                if isinstance(answer, ServerError) and str(answer).startswith(_NO_SERVICE):
                    return self.lose(str(answer))
                self.on_answer(answer)
        except HiredisError as error:
            self.lose(f"not the Redis protocol: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.lose(str(error or "closed by the server"))

    def lose(self, why: str) -> None:
        if not self._lost:
            self._lost = why
            self.close()
            self.on_lost(why)

    def close(self) -> None:
        """Without a call of `on_lost`."""
        self._lost = self._lost or "closed"
        if self._transport is not None:
            self._transport.abort()


class _Exchange(NamedTuple):
    """Commands under way, and the answers that have come."""

    commands: int
    answers: list[Any]
    done: asyncio.Future[list[Any]]


class Link:
    """One connection, opened at the first call. Callers share it; none waits for the answer to another one to send."""

    def __init__(self, server: Server | str) -> None:
        self._server = server if isinstance(server, Server) else Server(server)
        self._asked: dict[str, Link] = {}  # to servers of a cluster that have a part of a slot that moves
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._pause_s = PAUSE_S
        self._not_before = 0.0
        self._outgoing: list[bytes] = []
        self._exchanges: deque[_Exchange] = deque()

    @property
    def client_id(self) -> int:
        return self._connection.client_id if self._connection is not None else 0

    async def call(self, *commands: Command, block_s: float = 0.0) -> list[Any]:
        """The answers of the server, in order.

        Args:
            block_s: how long the server may block before it answers.

        Raises:
            QueueUnavailable: there is no answer, or one is an error. `NoGroup` is a kind of it.
        """
        for _ in range(REDIRECTIONS):
            answers = await self.try_(*commands, block_s=block_s)
            if isinstance(answers[0], ServerError) and (other := self._server.asked(str(answers[0]))) is not None:
                answers = await self._ask(other, commands, block_s)
            if not (isinstance(answers[0], ServerError) and self._follow(str(answers[0]))):
                break
        for answer in answers:
            if isinstance(answer, ServerError):
                raise self._translated(str(answer))
        return answers

    async def _ask(self, server: Server, commands: Sequence[Command], block_s: float) -> list[Any]:
        link = self._asked.setdefault(server.name, Link(server))
        asking: list[Command] = [part for command in commands for part in (("ASKING",), command)]
        return (await link.try_(*asking, block_s=block_s))[1::2]

    def _follow(self, words: str) -> bool:
        """Whether the next attempt goes to another server, because this one did not execute the command."""
        if not words.startswith("MOVED "):
            return False
        if self._connection is not None:
            self._connection.lose(words)
        return self._server.moved(words)

    async def try_(self, *commands: Command, block_s: float = 0.0) -> list[Any]:
        """As `call`, but returns a `ServerError` among the answers."""
        while (connection := self._connection) is None:
            await self._connect()
        loop, limit_s = asyncio.get_running_loop(), block_s + ANSWER_S
        exchange = _Exchange(len(commands), [], loop.create_future())
        self._exchanges.append(exchange)
        if not self._outgoing:
            loop.call_soon(self._flush, connection)
        self._outgoing.append(_packed(*commands))
        timer = loop.call_later(limit_s, connection.lose, f"no answer within {limit_s} s")
        try:
            return await exchange.done
        finally:
            timer.cancel()

    def _flush(self, connection: Connection) -> None:
        if connection is self._connection:
            connection.write(b"".join(self._outgoing))
            self._outgoing = []

    async def _connect(self) -> None:
        async with self._opening:
            if self._connection is not None:
                return
            if time.monotonic() < self._not_before:
                raise QueueUnavailable(f"{self._server.name} refused connections a moment ago", sent=False)
            try:
                connection = await Connection.open(self._server)
            except OSError as error:  # a TimeoutError is an OSError
                self._server.lost()
                self._not_before = time.monotonic() + self._pause_s * random.uniform(0.7, 1.3)
                self._pause_s = min(2 * self._pause_s, PAUSE_MOST_S)
                why = f"cannot connect to {self._server.name}: {error or type(error).__name__}"
                raise QueueUnavailable(why, sent=False) from error
            self._pause_s = PAUSE_S
            self._connection = connection
            connection.on_answer, connection.on_lost = partial(self._take_answer, connection), self._drop

    def _take_answer(self, connection: Connection, answer: Any) -> None:
        if not self._exchanges:
            return connection.lose("an answer without a command")
        exchange = self._exchanges[0]
        exchange.answers.append(answer)
        if len(exchange.answers) == exchange.commands:
            self._exchanges.popleft()
            if not exchange.done.done():  # else the caller is gone
                exchange.done.set_result(exchange.answers)

    def _drop(self, why: str) -> None:
        self._server.lost()
        self._connection = None
        self._outgoing = []
        exchanges, self._exchanges = self._exchanges, deque()
        for exchange in exchanges:
            if not exchange.done.done():
                exchange.done.set_exception(QueueUnavailable(f"{self._server.name}: {why}", sent=True))
                exchange.done.exception()  # the caller may be gone

    def _translated(self, words: str) -> QueueUnavailable:
        """The meaning of an error of the server. An unknown one may have come after the server did a part of the work."""
        if any(gone in words for gone in _GONE):
            return NoGroup(words)
        if words.startswith(_ELSEWHERE) and not isinstance(self._server, ClusterServer):
            words = f"{words} (EXEC_REDIS names a server of a cluster: use redis+cluster://{self._server.name}/?shards=N)"
        if words.startswith("READONLY") and self._connection is not None:
            self._connection.lose(words)  # a new connection may lead to the new primary
        if words.startswith(_NOT_DONE + _ELSEWHERE):
            return QueueUnavailable(f"{self._server.name}: {words}", sent=False)
        log.error("the server refused a command: %s", words)
        return QueueUnavailable(f"{self._server.name} refused a command: {words}", sent=True)

    async def close(self) -> None:
        self._not_before = float("inf")
        for link in self._asked.values():
            await link.close()
        if self._connection is not None:
            self._connection.lose("closed")
            await asyncio.sleep(0)  # the transport closes its socket in the next turn


class Subscription:
    """Messages of some channels. Messages published while the connection is broken are lost."""

    def __init__(self, server: Server | str, channels: Sequence[str]) -> None:
        self._server, self._channels = server if isinstance(server, Server) else Server(server), list(channels)
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()

    async def listen(self) -> Connection:
        """Receive every message from now on.

        Raises:
            QueueUnavailable: the server cannot be reached.
        """
        async with self._opening:
            if self._connection is None:
                try:
                    self._connection = await Connection.open(self._server, self._channels)
                except OSError as error:
                    self._server.lost()
                    raise self._unavailable(error) from error
            return self._connection

    async def message(self) -> tuple[str, bytes]:
        """The next message, with its channel.

        Raises:
            QueueUnavailable: the connection broke; the next call opens a new one.
        """
        while True:
            connection = await self.listen()
            try:
                answer = await self._next_answer(connection)
            except OSError as error:
                await self.close()
                raise self._unavailable(error) from error
            if answer[0] == b"message":
                return answer[1].decode(), answer[2]

    async def _next_answer(self, connection: Connection) -> list[bytes]:
        """Anything from the server. A silent server gets a PING."""
        try:
            return list(await connection.next_answer(PING_S))
        except TimeoutError:
            if self._connection is connection:  # else it was closed
                connection.write(_packed(("PING",)))
        return list(await connection.next_answer(ANSWER_S))

    def _unavailable(self, error: OSError) -> QueueUnavailable:
        return QueueUnavailable(f"cannot subscribe at {self._server.name}: {error or 'no answer'}", sent=False)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            await asyncio.sleep(0)
