"""The worker's connection to one zygote: requests, reports, and a heartbeat that finds a hung zygote."""

import asyncio
import errno
import socket
from collections.abc import Sequence

from worker.sandbox import protocol
from worker.sandbox.execution import Execution
from worker.sandbox.protocol import ZygoteReport, ZygoteRequest

HEARTBEAT_S = 1.0
# A zygote that does not answer so many heartbeats hangs. Fork bombs on a busy machine delay its own forks by many seconds: all
# its descendants share the lock of its memory (anon_vma).
MAX_UNANSWERED = 30


class ZygoteLost(Exception):
    """The zygote died with the program. The program may be started again elsewhere."""


class NotStarted(ZygoteLost):
    """The zygote was dead, or did not read, before the program was sent."""


class ZygoteClient:
    """Each program gets exactly one answer: the report of its end, or `ZygoteLost`."""

    def __init__(self, number: int, profile: str, socket_: socket.socket) -> None:
        self.number, self.profile = number, profile
        self._socket = socket_
        self._waiting: dict[int, asyncio.Future[ZygoteReport]] = {}
        self._sessions: dict[int, asyncio.Future[ZygoteReport]] = {}  # of sessions and of their processes
        self._replies: dict[tuple[int, int], asyncio.Future[ZygoteReport]] = {}  # by kind and process
        self.warmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unanswered = 0  # heartbeats
        self.lost = False
        self.retired = False  # another zygote replaces it; it stays for its sessions
        socket_.setblocking(False)
        asyncio.get_running_loop().add_reader(socket_, self._read)

    @property
    def warm(self) -> bool:
        return not self.lost and self.warmed.done()

    @property
    def ready(self) -> bool:
        """It accepts new programs and sessions."""
        return self.warm and not self.retired

    @property
    def sessions(self) -> int:
        """How many sessions and processes of sessions this zygote has."""
        return len(self._sessions)

    @property
    def load(self) -> int:
        return len(self._waiting)

    async def run(self, execution: Execution, slot: int) -> ZygoteReport:
        """Start a program and wait for its end. Cancelling this kills the program and waits for its death."""
        if self.lost:
            raise NotStarted
        ended: asyncio.Future[ZygoteReport] = asyncio.get_running_loop().create_future()
        try:
            execution.send(self._socket, slot)
        except OSError as error:
            if error.errno != errno.EAGAIN:  # it is dead and must not be chosen again
                self.close()
            raise NotStarted from error
        self._waiting[execution.number] = ended
        try:
            return await ended
        except asyncio.CancelledError:
            if execution.number in self._waiting:  # its future was cancelled
                ended = self._waiting[execution.number] = asyncio.get_running_loop().create_future()
                self.kill(execution.number, slot)
                await asyncio.wait([ended])
            raise

    def kill(self, number: int, slot: int) -> None:
        self.send(ZygoteRequest(protocol.REQUEST_KILL, slot, number))

    def start_session(self, request: ZygoteRequest, uid: int, files: Sequence[int | None], fds: Sequence[int]) -> None:
        """Register the session slot and start the session's first process in it. `ending` reports its end and that of the whole
        session."""
        if self.lost:
            raise ZygoteLost
        try:
            protocol.send_request(self._socket, *protocol.slot_request(request.slot, uid, files))
            protocol.send_request(self._socket, request, fds)
        except OSError as error:
            raise ZygoteLost from error

    def ending(self, number: int) -> asyncio.Future[ZygoteReport]:
        """Done when this session, or this process of one, is dead; fails with `ZygoteLost` if the zygote dies first."""
        future: asyncio.Future[ZygoteReport] = asyncio.get_running_loop().create_future()
        if self.lost:
            future.set_exception(ZygoteLost())
            future.exception()
        else:
            self._sessions[number] = future
        return future

    def forget(self, number: int) -> None:
        """It was not started, so no report comes."""
        self._sessions.pop(number, None)

    async def request(self, request: ZygoteRequest, kind: int, fds: Sequence[int] = ()) -> ZygoteReport:
        """Send a request about a process of a session and wait for its report, of this kind."""
        if self.lost:
            raise ZygoteLost
        future = self._replies[kind, request.member] = asyncio.get_running_loop().create_future()
        try:
            protocol.send_request(self._socket, request, fds)
            return await asyncio.wait_for(future, MAX_UNANSWERED * HEARTBEAT_S)
        except (OSError, TimeoutError) as error:
            raise ZygoteLost from error
        finally:
            self._replies.pop((kind, request.member), None)

    def send(self, request: ZygoteRequest) -> None:
        try:
            protocol.send_request(self._socket, request)
        except OSError:
            pass  # the zygote is lost; `_read` sees it

    def ping(self) -> bool:
        """Send a ping, once per heartbeat. False if too many were not answered; a worker that was itself held up counts one."""
        self._unanswered += 1
        self.send(ZygoteRequest(protocol.REQUEST_PING))
        return self._unanswered <= MAX_UNANSWERED

    def _read(self) -> None:
        """Read one report; the event loop calls again while there are more."""
        try:
            data = self._socket.recv(protocol.REPORT_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._handle(protocol.read_report(data))
        else:
            self.close()

    def _handle(self, report: ZygoteReport) -> None:
        if report.kind in (protocol.REPORT_ENDED, protocol.REPORT_MEMBER_ENDED):
            ended = self._waiting.pop(report.call, None) or self._sessions.pop(report.call, None)
            if (gone := self._replies.pop((protocol.REPORT_USAGE, report.call), None)) is not None and not gone.done():
                gone.set_result(report)  # a dead process reports no usage
            if ended is not None and not ended.done():
                ended.set_result(report)
        elif report.kind in (protocol.REPORT_MEMBER, protocol.REPORT_USAGE):
            reply = self._replies.pop((report.kind, report.call), None)
            if reply is not None and not reply.done():
                reply.set_result(report)
        elif report.kind == protocol.REPORT_PONG:
            self._unanswered = 0
        elif report.kind == protocol.REPORT_READY and not self.warmed.done():
            self.warmed.set_result(None)

    def close(self) -> None:
        if self.lost:
            return
        self.lost = True
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        if not self.warmed.done():
            self.warmed.cancel()
        for ended in (*self._waiting.values(), *self._sessions.values(), *self._replies.values()):
            if not ended.done():
                ended.set_exception(ZygoteLost())
                ended.exception()  # marks it as retrieved: the waiter may be cancelled
        for waiting in (self._waiting, self._sessions, self._replies):
            waiting.clear()
