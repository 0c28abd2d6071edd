"""One process of a session, seen from the worker: its control socket and its end.

A session's messages are as untrusted as its output: they are short, of one kind, read one at a time, and a process that sends
anything else is killed. The worker gives no room for descriptors, so the kernel drops those that come with a message.
"""

from __future__ import annotations

import asyncio
import marshal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from worker.sandbox import protocol
from worker.sandbox.protocol import ZygoteReport, ZygoteRequest

if TYPE_CHECKING:
    from worker.sandbox.session_tree import SessionTree

REPLY_BYTES = 4096
REPLY_S = 10.0  # replies take milliseconds; copying a folder takes longest
GRACE_S = 0.5  # from an interrupt to the kill
DEATH_S = 5.0  # until the end of a killed process is reported
T = TypeVar("T")


class MemberReply(msgspec.Struct):
    """Every message of a session's process."""

    number: int
    code: int = 0
    why: str = ""
    files: bool = False


_decode_reply = msgspec.json.Decoder(MemberReply).decode


def decode_untrusted(decode: Callable[[bytes], T], data: bytes) -> T | None:
    """Decode what a session wrote. None if it is malformed in any way, also if it is nested too deeply."""
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class MemberEnded(Exception):
    """The process is dead."""


class Member:
    def __init__(self, tree: SessionTree, number: int, leaf: int, control: socket.socket, folder: str) -> None:
        self.tree, self.number, self.leaf = tree, number, leaf
        self.ended = tree.zygote.ending(number)
        self.folder = folder
        self.broken = ""  # which rule of the protocol it broke; it was killed for that
        self.cpu_ns = 0  # at the end of its last cell
        self._control = control
        self._pending: dict[int, asyncio.Future[MemberReply]] = {}
        control.setblocking(False)
        asyncio.get_running_loop().add_reader(control, self._read)
        self.ended.add_done_callback(lambda _: self.close())

    @property
    def alive(self) -> bool:
        return not self.ended.done()

    def send(self, what: str, arguments: dict[str, Any], fds: list[int]) -> asyncio.Future[MemberReply]:
        """Send a request. The caller still owns the descriptors."""
        number = next(self.tree.numbers)
        future = self.expect(number)
        try:
            socket.send_fds(self._control, [marshal.dumps((what, number, arguments), 2)], fds)
        except OSError:
            self._break("its control socket cannot be written to")
        return future

    def expect(self, number: int) -> asyncio.Future[MemberReply]:
        future: asyncio.Future[MemberReply] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        return future

    async def request(self, what: str, arguments: dict[str, Any], fds: list[int]) -> MemberReply:
        return await self.reply(self.send(what, arguments, fds))

    async def reply(self, pending: asyncio.Future[MemberReply]) -> MemberReply:
        """Wait for a reply. A process that does not reply in time is killed.

        Raises:
            MemberEnded: The process ended first.
        """
        either: set[asyncio.Future[Any]] = {pending, self.ended}
        await asyncio.wait(either, timeout=REPLY_S, return_when=asyncio.FIRST_COMPLETED)
        if pending.done():
            return pending.result()
        if self.alive:
            await self.end_because("it did not answer")
        raise MemberEnded(self.broken)

    def interrupt(self) -> None:
        self.tree.zygote.send(self._about(protocol.REQUEST_INTERRUPT))

    def kill(self) -> None:
        self.tree.zygote.send(self._about(protocol.REQUEST_END_MEMBER))

    def begin_cell(self) -> None:
        """From now on `usage` reports how long this cell has starved."""
        self.tree.zygote.send(self._about(protocol.REQUEST_USAGE, protocol.USAGE_BEGIN))

    async def usage(self) -> ZygoteReport:
        return await self.tree.zygote.request(self._about(protocol.REQUEST_USAGE), protocol.REPORT_USAGE)

    def _about(self, kind: int, flags: int = 0) -> ZygoteRequest:
        return ZygoteRequest(kind, self.tree.index, flags=flags, member=self.number)

    async def end_because(self, why: str) -> None:
        """Kill a process that broke the protocol."""
        self._break(why)
        await self.wait_dead()

    async def wait_dead(self) -> None:
        await asyncio.wait({self.ended}, timeout=DEATH_S)
        if self.alive:  # killing this process alone failed, so the whole session is killed
            await self.tree.kill()

    def _read(self) -> None:
        try:
            data = self._control.recv(REPLY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._closed()
        if (reply := decode_untrusted(_decode_reply, data)) is None:
            return self._break("it wrote to its control socket")
        future = self._pending.pop(reply.number, None)
        if future is None:
            return self._break("it answered a request that was not sent")
        if not future.done():
            future.set_result(reply)

    def _closed(self) -> None:
        """The process is about to end. Or its cell closed the socket: then it can take no more requests and is killed."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._control)
        loop.call_later(GRACE_S / 2, lambda: self._break("it closed its control socket") if self.alive else None)

    def _break(self, why: str) -> None:
        self.broken = self.broken or why
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control)
        self.kill()

    def close(self) -> None:
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
