"""The worker's connection to one zygote: programs out, endings in, and a heartbeat that finds a wedged one."""

from __future__ import annotations

import asyncio
import errno
import socket
import time

from worker.sandbox import protocol
from worker.sandbox.execution import Execution
from worker.sandbox.protocol import Ask, Say

HEARTBEAT_S = 1.0
SILENT_S = 3.0  # a zygote that owes an answer for longer is wedged; a fork takes milliseconds


class ZygoteLost(Exception):
    """The zygote died with the program in it; the program may be started again elsewhere."""


class ZygoteLink:
    """One event loop's side of the socket. A program is answered exactly once: by its end, or by `ZygoteLost`."""

    def __init__(self, number: int, profile: str, link: socket.socket) -> None:
        self.number, self.profile = number, profile
        self._link = link
        self._waiting: dict[int, asyncio.Future[Say]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pinged_at: float | None = None
        self.lost = False
        link.setblocking(False)
        asyncio.get_running_loop().add_reader(link, self._read)

    @property
    def ready(self) -> bool:
        return not self.lost and self._ready.done()

    @property
    def load(self) -> int:
        return len(self._waiting)

    async def wait_ready(self) -> None:
        await asyncio.shield(self._ready)

    async def run(self, execution: Execution, slot: int) -> Say:
        """Start a program and wait for its end, however it comes. Cancelling this kills the program and waits for its death."""
        if self.lost:
            raise ZygoteLost
        ended: asyncio.Future[Say] = asyncio.get_running_loop().create_future()
        try:
            execution.send(self._link, slot)
        except OSError as error:
            raise ZygoteLost from error
        self._waiting[execution.number] = ended
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            self.kill(execution.number, slot)
            await asyncio.wait([ended])
            raise

    def kill(self, number: int, slot: int) -> None:
        try:
            protocol.send_ask(self._link, Ask(protocol.ASK_KILL, slot, number))
        except OSError:
            pass  # lost: `_read` sees it

    def beat(self) -> bool:
        """Ask for a sign of life; False if the last one is overdue."""
        now = time.monotonic()
        if self._pinged_at is not None:
            return now - self._pinged_at < SILENT_S
        self._pinged_at = now
        try:
            protocol.send_ask(self._link, Ask(protocol.ASK_PING))
        except OSError as error:
            return error.errno != errno.EAGAIN  # a full socket is overdue by the next beat
        return True

    def _read(self) -> None:
        while True:
            try:
                data = self._link.recv(protocol.SAY_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                return self.close()
            self._hear(protocol.read_say(data))

    def _hear(self, say: Say) -> None:
        if say.kind == protocol.SAY_ENDED:
            ended = self._waiting.pop(say.call, None)
            if ended is not None and not ended.done():
                ended.set_result(say)
        elif say.kind == protocol.SAY_PONG:
            self._pinged_at = None
        elif say.kind == protocol.SAY_READY and not self._ready.done():
            self._ready.set_result(None)

    def close(self) -> None:
        if self.lost:
            return
        self.lost = True
        asyncio.get_running_loop().remove_reader(self._link)
        self._link.close()
        if not self._ready.done():
            self._ready.cancel()
        for ended in self._waiting.values():
            if not ended.done():
                ended.set_exception(ZygoteLost())
                ended.exception()  # somebody may have stopped waiting
        self._waiting.clear()
