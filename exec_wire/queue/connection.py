"""Connections to Redis or Valkey, as the queue needs them: few, shared, and quick to admit that the server is away.

redis-py finds the server and logs in. Its clients and pools are not used: a `Link` writes what all its callers say in one turn
of the loop with one system call, and hands out the answers as hiredis finds them in what the socket brings, about ten times as
many commands a second as a pool of connections. Time limits are ours too: redis-py's 5 s would end a blocking read.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from hiredis import HiredisError, Reader, pack_command
from redis._parsers.base import BaseParser
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

from exec_wire.queue.protocol import QueueUnavailable
from exec_wire.supervisor import logged

log = logging.getLogger("exec_wire.redis")

CONNECT_S = 3.0
ANSWER_S = 5.0  # a server that is silent for so long is away
PAUSE_S, PAUSE_MOST_S = 0.05, 1.0  # between attempts to connect; doubled each time
PING_S = 2.0

Word = str | bytes | int | float
Command = tuple[Word, ...]

# What a server answers to a command of a group if the stream or the group is not there. The second one ends a blocking
# XREADGROUP on Redis 7.0 when its stream is deleted; newer servers answer NOGROUP then too.
_GONE = ("NOGROUP", "UNBLOCKED the stream key no longer exists")
# The server did nothing: it starts, is a replica, waits for its replicas or for a script, cannot write to its disk.
_NOT_DONE = (
    *("LOADING", "MASTERDOWN", "NOREPLICAS", "BUSY", "MISCONF", "OOM", "READONLY", "TRYAGAIN", "CLUSTERDOWN", "UNBLOCKED"),
)


_NOT_ENOUGH = object()


class NoGroup(QueueUnavailable):
    """A stream or its group is not there (any more). To those who cannot make it again the queue is unavailable."""

    def __init__(self, why: str) -> None:
        super().__init__(why, sent=False)


def where(url: str) -> str:
    """The server's address, without the password."""
    parts = urlsplit(url)
    return (
        f"{parts.scheme}://{parts.path}" if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"
    )


def database(url: str) -> int:
    return opener(url)().db or 0


def opener(url: str) -> Callable[[], AbstractConnection]:
    """Makes connections; `ValueError` if the URL is none."""
    pool = ConnectionPool.from_url(
        url,
        protocol=2,  # plain lists, also for messages of a subscription
        socket_timeout=None,
        socket_connect_timeout=CONNECT_S,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
    )
    return pool.make_connection


class _Exchange:
    """Commands on their way, and the answers that have come."""

    __slots__ = ("answers", "count", "done")

    def __init__(self, count: int) -> None:
        self.count = count
        self.answers: list[Any] = []
        self.done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # the caller may be gone


class _Answers(asyncio.Protocol):
    """What the server says, answer by answer. What it refuses is an answer too; other errors are the connection's end."""

    def __init__(self, take: Callable[[Any], None], lost: Callable[[str], None]) -> None:
        self._take, self._lost = take, lost
        self._reader = Reader(replyError=BaseParser.parse_error, notEnoughData=_NOT_ENOUGH)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (answer := self._reader.gets()) is not _NOT_ENOUGH:
                if isinstance(answer, RedisError) and not isinstance(answer, ResponseError):
                    return self._lost(str(answer))
                self._take(answer)
        except HiredisError as error:
            self._lost(f"it does not speak Redis: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._lost(str(error or "closed by the server"))


class Link:
    """One connection, opened when it is needed. Callers share it; nobody waits for another one's answer to send."""

    def __init__(self, url: str) -> None:
        self._open, self._where = opener(url), where(url)
        self._connection: AbstractConnection | None = None
        self._opening = asyncio.Lock()
        self._pause_s = PAUSE_S
        self._not_before = 0.0
        self._outgoing: list[bytes] = []
        self._exchanges: deque[_Exchange] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self.client_id = 0  # of the connection, as the server knows it

    async def call(self, *commands: Command, block_s: float = 0.0) -> list[Any]:
        """The answers of the server, in order. Raises `QueueUnavailable` if there are none or one is an error; `NoGroup` too.

        `block_s`: how long the server may wait before it answers.
        """
        answers = await self.try_(*commands, block_s=block_s)
        for answer in answers:
            if isinstance(answer, ResponseError):
                raise self._translated(answer)
        return answers

    async def try_(self, *commands: Command, block_s: float = 0.0) -> list[Any]:
        """As `call`, but what the server refuses is an answer like any other."""
        while (connection := self._connection) is None:
            await self._connect()
        exchange = _Exchange(len(commands))
        self._exchanges.append(exchange)
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush, connection)
        self._outgoing.extend(pack_command(command) for command in commands)  # type: ignore[arg-type]
        limit_s = block_s + ANSWER_S
        timer = asyncio.get_running_loop().call_later(limit_s, self._drop, connection, f"no answer within {limit_s} s")
        try:
            return await exchange.done
        finally:
            timer.cancel()

    def _flush(self, connection: AbstractConnection) -> None:
        if connection is self._connection and connection._writer is not None:
            connection._writer.transport.write(b"".join(self._outgoing))
            self._outgoing = []

    async def _connect(self) -> None:
        async with self._opening:
            if self._connection is not None:
                return
            if time.monotonic() < self._not_before:
                raise QueueUnavailable(f"{self._where} was not there a moment ago", sent=False)
            connection = self._open()
            try:
                async with asyncio.timeout(CONNECT_S):
                    await connection.connect()  # type: ignore[no-untyped-call]
                    # An answer to a command of our own: a proxy in front may take connections for a server that is gone.
                    await connection.send_command("CLIENT", "ID", check_health=False)
                    self.client_id = await connection.read_response()
            except (RedisError, OSError) as error:  # a TimeoutError is an OSError
                await connection.disconnect(nowait=True)
                self._not_before = time.monotonic() + self._pause_s * random.uniform(0.7, 1.3)
                self._pause_s = min(2 * self._pause_s, PAUSE_MOST_S)
                raise QueueUnavailable(
                    f"cannot connect to {self._where}: {error or type(error).__name__}", sent=False
                ) from error
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
            self._pause_s = PAUSE_S
            self._connection = connection
            assert connection._writer is not None
            answers = _Answers(partial(self._take_answer, connection), partial(self._drop, connection))
            connection._writer.transport.set_protocol(answers)

    def _take_answer(self, connection: AbstractConnection, answer: Any) -> None:
        if connection is not self._connection or not self._exchanges:
            return self._drop(connection, "it answered what nobody had asked")
        exchange = self._exchanges[0]
        exchange.answers.append(answer)
        if len(exchange.answers) == exchange.count:
            self._exchanges.popleft()
            if not exchange.done.done():  # else the caller is gone
                exchange.done.set_result(exchange.answers)

    def _drop(self, connection: AbstractConnection, why: str) -> None:
        """Nothing more can come in order from this connection."""
        if connection is not self._connection:
            return
        self._connection = None
        self._outgoing = []
        exchanges, self._exchanges = self._exchanges, deque()
        for exchange in exchanges:
            exchange.fail(QueueUnavailable(f"{self._where}: {why}", sent=True))
        self._hold(connection.disconnect(nowait=True))

    def _translated(self, error: ResponseError) -> QueueUnavailable:
        """The one place that says what an error of the server means: the stream or its group is gone, or the queue is
        unavailable. An error that is not known here may have come after a part of the work was done."""
        words = str(error)
        if any(gone in words for gone in _GONE):
            return NoGroup(words)
        if isinstance(error, ReadOnlyError) or words.startswith("READONLY"):
            # The address may lead to the new primary when it is asked again.
            if self._connection is not None:
                self._drop(self._connection, words)
            return QueueUnavailable(f"{self._where}: {words}", sent=False)
        if isinstance(error, OutOfMemoryError) or words.startswith(_NOT_DONE):
            return QueueUnavailable(f"{self._where}: {words}", sent=False)
        log.error("the server refused a command: %s", words)
        return QueueUnavailable(f"{self._where} refused a command: {words}", sent=True)

    def _hold(self, coroutine: Any) -> None:
        task = logged(asyncio.ensure_future(coroutine), "a connection to the job queue was not closed properly")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._connection is not None:
            self._drop(self._connection, "closed")
        self._not_before = float("inf")
        tasks = list(self._tasks)
        await asyncio.wait(tasks, timeout=1.0) if tasks else None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Subscription:
    """What is said on some channels. A message that is said while the connection is broken is lost."""

    def __init__(self, url: str, channels: Sequence[str]) -> None:
        self._open, self._channels = opener(url), list(channels)
        self._connection: AbstractConnection | None = None
        self._opening = asyncio.Lock()

    async def listen(self) -> None:
        """Hear everything from now on. `QueueUnavailable` if that cannot be."""
        try:
            await self._listen()
        except (RedisError, OSError) as error:
            raise QueueUnavailable(f"cannot listen: {error or type(error).__name__}", sent=False) from error

    async def message(self) -> tuple[str, bytes]:
        """The next one, with its channel. `QueueUnavailable` if the connection breaks; the next call makes a new one."""
        try:
            connection = await self._listen()
            while True:
                said = await self._read(connection)
                if said[0] == b"message":
                    return said[1].decode(), said[2]
        except (RedisError, OSError) as error:
            await self.close()
            raise QueueUnavailable(f"cannot listen: {error or type(error).__name__}", sent=False) from error

    async def _listen(self) -> AbstractConnection:
        async with self._opening:
            if self._connection is None:
                self._connection = await self._subscribe()
            return self._connection

    async def _subscribe(self) -> AbstractConnection:
        connection = self._open()
        try:
            async with asyncio.timeout(CONNECT_S):
                await connection.connect()  # type: ignore[no-untyped-call]
                await connection.send_command("SUBSCRIBE", *self._channels, check_health=False)
                for _ in self._channels:
                    await connection.read_response(disable_decoding=True)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

    async def _read(self, connection: AbstractConnection) -> list[bytes]:
        """Anything at all; a silent connection is asked whether it lives."""
        said = await connection.read_response(disable_decoding=True, timeout=PING_S, disconnect_on_error=False)
        if said is None:
            await connection.send_command("PING", check_health=False)
            said = await connection.read_response(disable_decoding=True, timeout=ANSWER_S, disconnect_on_error=False)
        if said is None:
            raise TimeoutError(f"no answer within {ANSWER_S} s")
        answer: list[bytes] = said
        return answer

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)
