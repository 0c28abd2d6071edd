"""The worker's connection to one zygote: programs out, endings in, and a heartbeat that finds a wedged one."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Sequence

from worker.sandbox import protocol
from worker.sandbox.execution import Execution
from worker.sandbox.protocol import Ask, Say

HEARTBEAT_S = 1.0
SILENT_S = 3.0  # a zygote that owes an answer for longer is wedged; a fork takes milliseconds


class ZygoteLost(Exception):
    """The zygote died with the program in it; the program may be started again elsewhere."""


class NotStarted(ZygoteLost):
    """The zygote was gone, or did not listen, before it was told of the program."""


class ZygoteLink:
    """One event loop's side of the socket. A program is answered exactly once: by its end, or by `ZygoteLost`."""

    def __init__(self, number: int, profile: str, link: socket.socket) -> None:
        self.number, self.profile = number, profile
        self._link = link
        self._waiting: dict[int, asyncio.Future[Say]] = {}
        self._sessions: dict[int, asyncio.Future[Say]] = {}  # and their single processes: how each ended
        self._answers: dict[tuple[int, int], asyncio.Future[Say]] = {}  # by kind and process
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pinged_at: float | None = None
        self.lost = False
        self.retired = False  # another zygote has taken its place; it stays for its sessions
        link.setblocking(False)
        asyncio.get_running_loop().add_reader(link, self._read)

    @property
    def warm(self) -> bool:
        return not self.lost and self._ready.done()

    @property
    def ready(self) -> bool:
        """Can it be given something new?"""
        return self.warm and not self.retired

    @property
    def sessions(self) -> int:
        """Processes of sessions, and sessions: how much depends on this zygote."""
        return len(self._sessions)

    @property
    def load(self) -> int:
        return len(self._waiting)

    async def wait_ready(self) -> None:
        await asyncio.shield(self._ready)

    async def run(self, execution: Execution, slot: int) -> Say:
        """Start a program and wait for its end, however it comes. Cancelling this kills the program and waits for its death."""
        if self.lost:
            raise NotStarted
        ended: asyncio.Future[Say] = asyncio.get_running_loop().create_future()
        try:
            execution.send(self._link, slot)
        except OSError as error:
            if error.errno != errno.EAGAIN:  # it is dead, and must not be chosen again
                self.close()
            raise NotStarted from error
        self._waiting[execution.number] = ended
        try:
            return await ended
        except asyncio.CancelledError:
            await self._wait_for_death(execution.number, slot)
            raise

    async def _wait_for_death(self, number: int, slot: int) -> None:
        if number in self._waiting:  # with the future that was cancelled
            ended = self._waiting[number] = asyncio.get_running_loop().create_future()
            self.kill(number, slot)
            await asyncio.wait([ended])

    def kill(self, number: int, slot: int) -> None:
        self._tell(Ask(protocol.ASK_KILL, slot, number))

    # -- sessions: `slot` is the session's place, `member` one of its processes ---------------------------------------------

    def start_session(self, ask: Ask, uid: int, files: Sequence[int | None], fds: Sequence[int]) -> None:
        """Have a session's first process started in a place that the zygote learns of with it. Its end, and that of the whole
        session, are told by `ending`."""
        if self.lost:
            raise ZygoteLost
        try:
            protocol.send_ask(self._link, *protocol.slot_ask(ask.slot, uid, files))
            protocol.send_ask(self._link, ask, fds)
        except OSError as error:
            raise ZygoteLost from error

    def ending(self, number: int) -> asyncio.Future[Say]:
        """Done when this session, or this process of one, is dead; `ZygoteLost` if that cannot be known any more."""
        future: asyncio.Future[Say] = asyncio.get_running_loop().create_future()
        if self.lost:
            future.set_exception(ZygoteLost())
            future.exception()
        else:
            self._sessions[number] = future
        return future

    def forget(self, number: int) -> None:
        """It never was; nothing will be told of it."""
        self._sessions.pop(number, None)

    async def adopt(self, ask: Ask, fds: Sequence[int]) -> Say:
        return await self._ask(ask, protocol.SAY_MEMBER, fds)

    def begin_cell(self, slot: int, member: int) -> None:
        """From now on `usage` tells how long this cell has starved."""
        self._tell(Ask(protocol.ASK_USAGE, slot, flags=protocol.USAGE_BEGIN, member=member))

    async def usage(self, slot: int, member: int) -> Say:
        return await self._ask(Ask(protocol.ASK_USAGE, slot, member=member), protocol.SAY_USAGE)

    def allow_processes(self, number: int, slot: int, processes: int) -> None:
        """Of a whole session, from now on."""
        self._tell(Ask(protocol.ASK_PROCESSES, slot, number, processes=processes))

    def interrupt(self, slot: int, member: int) -> None:
        self._tell(Ask(protocol.ASK_INTERRUPT, slot, member=member))

    def end_member(self, slot: int, member: int) -> None:
        self._tell(Ask(protocol.ASK_END_MEMBER, slot, member=member))

    async def _ask(self, ask: Ask, kind: int, fds: Sequence[int] = ()) -> Say:
        if self.lost:
            raise ZygoteLost
        future = self._answers[kind, ask.member] = asyncio.get_running_loop().create_future()
        try:
            protocol.send_ask(self._link, ask, fds)
            return await asyncio.wait_for(future, SILENT_S)
        except (OSError, TimeoutError) as error:
            raise ZygoteLost from error
        finally:
            self._answers.pop((kind, ask.member), None)

    def _tell(self, ask: Ask) -> None:
        try:
            protocol.send_ask(self._link, ask)
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
        """One message; while there are more, the loop calls again."""
        try:
            data = self._link.recv(protocol.SAY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._hear(protocol.read_say(data))
        else:
            self.close()

    def _hear(self, say: Say) -> None:
        if say.kind in (protocol.SAY_ENDED, protocol.SAY_MEMBER_ENDED):
            ended = self._waiting.pop(say.call, None) or self._sessions.pop(say.call, None)
            if (gone := self._answers.pop((protocol.SAY_USAGE, say.call), None)) is not None and not gone.done():
                gone.set_result(say)  # it asks no more
            if ended is not None and not ended.done():
                ended.set_result(say)
        elif say.kind in (protocol.SAY_MEMBER, protocol.SAY_USAGE):
            answer = self._answers.pop((say.kind, say.call), None)
            if answer is not None and not answer.done():
                answer.set_result(say)
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
        for ended in (*self._waiting.values(), *self._sessions.values(), *self._answers.values()):
            if not ended.done():
                ended.set_exception(ZygoteLost())
                ended.exception()  # somebody may have stopped waiting
        for known in (self._waiting, self._sessions):
            known.clear()
        self._answers.clear()
