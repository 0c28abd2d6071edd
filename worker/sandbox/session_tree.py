"""A session's sandbox, seen from the worker: its first process and its forks, one sandbox and one trust domain.

A session's messages are as untrusted as its output: they are short, of one kind, read one at a time, and a process that sends
anything else is killed. The worker gives no room for descriptors, so the kernel drops those that come with a message.
"""

import asyncio
import contextlib
import errno
import itertools
import marshal
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from exec_wire import Limits
from exec_wire.messages.sessions import Got
from worker.sandbox import protocol
from worker.sandbox.execution import decode_files, run_request
from worker.sandbox.inside.payload import Payload
from worker.sandbox.large_results import LargeResults
from worker.sandbox.memory_files import base64_of, close_all, output, page_file, sealed
from worker.sandbox.protocol import ZygoteReport, ZygoteRequest
from worker.sandbox.runner_client import Leaf, RunnerClient
from worker.sandbox.verdict import OWN_LIMIT_REACHED, judge, setup_failed
from worker.sandbox.zygote_client import ZygoteClient, ZygoteLost

REPLY_BYTES = 4096
REPLY_S = 10.0  # replies take milliseconds; copying a folder takes longest
GRACE_S = 0.5  # from an interrupt to the kill
DEATH_S = 5.0  # until the end of a killed process is reported
WHY_CHARS = 200  # of the reason why a file was not fetched
FIRST_FOLDER = "0"
FORKS_AT_ONCE = 16  # each needs four descriptors, of which a session has 256
NEVER_CPU_S = 1_000_000_000  # cells have a wall limit instead: a session's CPU time only grows
_decode_index = msgspec.json.Decoder(list[tuple[str, int, str]]).decode
T = TypeVar("T")


class NotForkable(Exception):
    """The message says why."""


class SessionSlotBusy(Exception):
    """Nothing was started: processes of a lost zygote are still dying in this session slot."""


class StartFailed(Exception):
    """A session's sandbox could not be set up; the message names the step. `by_request`: the request's contents caused it."""

    def __init__(self, message: str, *, by_request: bool) -> None:
        super().__init__(message)
        self.by_request = by_request


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
    def __init__(self, tree: "SessionTree", number: int, leaf: int, control: socket.socket, folder: str) -> None:
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


class SessionTree:
    """The processes of a session in their session slot (a uid and a control group)."""

    def __init__(
        self,
        zygote: ZygoteClient,
        runner: RunnerClient,
        index: int,
        limits: Limits,
        numbers: Iterator[int],
        results: LargeResults,
    ) -> None:
        self.results = results
        self.zygote, self.index, self.limits, self.numbers = zygote, index, limits, numbers
        self._runner = runner
        self.number = next(numbers)
        self._leaf_numbers = itertools.count()
        self._free_leaves: list[int] = []
        self.dead_folders: list[str] = []  # names of folders whose owners are dead
        self._counters: list[int | None] = [None, None, None]  # memory in use, CPU time used, kills for lack of memory
        self.started = False
        self.cpu_seen_s = self.idle_cpu_s = 0.0  # for the check of idle sessions
        self.members: set[Member] = set()

    async def start(self, env: dict[str, str], files: dict[str, str]) -> Member:
        """Start the first process. It has entered its control group when this returns."""
        member = await self._start_member(env, files)
        try:
            with contextlib.closing(await self._runner.leaf(self.index, member.leaf)) as leaf:
                # The reply means that set-up is over: until then the process moves itself between control groups.
                await self.files(member, {}, [])
                await self._enter_leaf(member, leaf, None)
        except BaseException as error:
            await self.kill()
            raise self._start_failed() if isinstance(error, MemberEnded) else error from None
        return member

    async def _start_member(self, env: dict[str, str], files: dict[str, str]) -> Member:
        slot = await self._runner.session_slot(self.index)
        self._counters = slot.counters
        self.ended = self.zygote.ending(self.number)
        self.started = True
        self.ended.add_done_callback(self._close)
        cgroup, fds = [fd for fd in slot.files if fd is not None], list[int]()
        try:
            payload = Payload("", [], env, decode_files(files), False, session=True)
            fds += [output("stdout")]  # one by one: if opening one fails, the others are closed
            fds += [output("stderr")]
            fds += [page_file(payload)]
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            fds.append(theirs.detach())
            member = self._member(ours, FIRST_FOLDER, self._next_leaf())
            fields = {"cpu_s": NEVER_CPU_S, "flags": protocol.HAS_CONTROL, "member": member.number}
            request = run_request(self.limits, self.index, self.number, **fields)
            self.zygote.start_session(request, slot.uid, slot.files, fds)
            return member
        except BaseException:
            for number, ended in [(self.number, self.ended), *((one.number, one.ended) for one in self.members)]:
                self.zygote.forget(number)
                ended.cancel()
            raise
        finally:
            close_all(fds)
            close_all(cgroup)

    def _start_failed(self) -> Exception:
        if not self.ended.done() or self.ended.exception() is not None:
            return ZygoteLost()
        report = self.ended.result()
        if report.step != 0 and report.error == errno.EBUSY:
            return SessionSlotBusy()
        if report.ended_by == protocol.BY_REQUEST:  # the worker killed it because it did not reply in time
            return ZygoteLost()
        how = judge(report, self.limits, steps := self._runner.ready.steps)
        full = report.memory_peak >= OWN_LIMIT_REACHED * (self.limits.memory_mb << 20)
        killed = os.WIFSIGNALED(report.status) and os.WTERMSIG(report.status) == signal.SIGKILL
        in_prepare = setup_failed(report) and report.step == len(steps) and (full or not killed)
        return StartFailed(how.error or "it ended at once", by_request=in_prepare or how.blame == "model")

    def _member(self, control: socket.socket, folder: str | None, leaf: int) -> Member:
        number = next(self.numbers)
        member = Member(self, number, leaf, control, str(number) if folder is None else folder)
        self.members.add(member)
        member.ended.add_done_callback(lambda _: self._member_ended(member))
        return member

    def _member_ended(self, member: Member) -> None:
        self.members.discard(member)
        self._free_leaves.append(member.leaf)
        self._allow_processes()

    def _allow_processes(self) -> None:
        """Forks do not count towards the session's process limit: each raises it by one."""
        if self.members:
            processes = self.limits.processes + len(self.members) - 1
            self.zygote.send(ZygoteRequest(protocol.REQUEST_PROCESSES, self.index, self.number, processes=processes))

    async def _enter_leaf(self, member: Member, leaf: Leaf, hello: socket.socket | None) -> None:
        flags = protocol.HAS_LEAF * bool(leaf.fds) | protocol.HAS_HELLO * (hello is not None)
        flags |= protocol.LEAF_BY_PIDS * leaf.by_pids | protocol.LEAF_JOINED * (hello is not None and bool(leaf.join_fds))
        request = ZygoteRequest(protocol.REQUEST_MEMBER, self.index, self.number, flags=flags, member=member.number)
        fds = [*([hello.fileno()] if hello is not None else []), *leaf.fds]
        report = await self.zygote.request(request, protocol.REPORT_MEMBER, fds)
        if report.error and hello is not None:
            raise NotForkable(f"its sandbox does not allow it ({os.strerror(report.error)})")

    # -- forks ----------------------------------------------------------------------------------------------------------------

    async def fork(self, parent: Member, count: int) -> list[Member]:
        """Fork a process `count` times, each fork in a copy of its folder. All of them, or `NotForkable`."""
        forks: list[Member] = []
        while len(forks) < count:
            try:
                forks += (await self._fork(parent, min(FORKS_AT_ONCE, count - len(forks)), None))[0]
            except NotForkable:
                await self.end(*forks)
                raise
        try:
            replies = await asyncio.gather(*(fork.request("settle", {"name": fork.folder}, []) for fork in forks))
        except MemberEnded:
            replies = []
        if (failed := next((reply.why for reply in replies if reply.code), None)) is not None or not replies:
            await self.end(*forks)
            raise NotForkable(failed or "a fork ended at once")
        return forks

    async def checkpoint(self, parent: Member, copy_most: int) -> tuple[Member, bool]:
        """Make a fork that waits. Returns it, and whether the files were copied too."""
        forks, files = await self._fork(parent, 1, copy_most)
        return forks[0], files

    async def _fork(self, parent: Member, count: int, copy_most: int | None) -> tuple[list[Member], bool]:
        leaves = await self._leaves(count)
        with contextlib.ExitStack() as closing:
            for _, leaf in leaves:
                closing.callback(leaf.close)
            controls = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in leaves]
            hellos = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in leaves]
            theirs = [closing.enter_context(pair[1]) for pair in (*controls, *hellos)]
            for hello, _ in hellos:
                closing.enter_context(hello)
                hello.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # the kernel passes the sender's credentials
            folder = None if copy_most is None else parent.folder
            forks = [self._member(ours, folder, number) for (ours, _), (number, _) in zip(controls, leaves, strict=True)]
            self._allow_processes()
            greetings = [fork.expect(fork.number) for fork in forks]
            try:
                fds = []
                for control, hello, (_, leaf) in zip(theirs, theirs[count:], leaves, strict=False):
                    fds += [control.fileno(), hello.fileno(), *leaf.join_fds]
                gone, self.dead_folders = self.dead_folders, []
                arguments = {"names": [fork.number for fork in forks], "gone": gone, "copy_most": copy_most}
                pending = parent.send("fork", arguments | {"fds_each": len(fds) // len(forks)}, fds)
                for one in theirs:
                    one.close()
                reply = await parent.reply(pending)
                if reply.code:
                    raise NotForkable(reply.why)
                await asyncio.gather(*(fork.reply(greeting) for fork, greeting in zip(forks, greetings, strict=True)))
                entering = zip(forks, leaves, hellos, strict=True)
                await asyncio.gather(*(self._enter_leaf(fork, leaf, hello[0]) for fork, (_, leaf), hello in entering))
            except BaseException as error:
                for fork in forks:  # not made, or the zygote does not know it: then it ends when its socket is closed
                    fork.kill()
                    if fork.alive:
                        self.zygote.forget(fork.number)
                        fork.ended.cancel()
                if isinstance(error, MemberEnded):
                    raise NotForkable(str(error) or "the session's process ended") from error
                raise
        return forks, reply.files

    async def _leaves(self, count: int) -> list[tuple[int, Leaf]]:
        """Make `count` leaves, or none: a cancelled caller keeps no descriptor."""
        numbers = [self._next_leaf() for _ in range(count)]
        leaves: list[tuple[int, Leaf]] = []

        async def make(number: int) -> None:
            leaves.append((number, await self._runner.leaf(self.index, number)))

        try:
            async with asyncio.TaskGroup() as group:
                for number in numbers:
                    group.create_task(make(number))
        except BaseException as error:
            for _, leaf in leaves:
                leaf.close()
            self._free_leaves += numbers
            if isinstance(error, Exception):
                raise NotForkable("creating a control group failed") from error
            raise
        return leaves

    def _next_leaf(self) -> int:
        return self._free_leaves.pop() if self._free_leaves else next(self._leaf_numbers)

    async def restore(self, checkpoint: Member, files: bool) -> bool:
        """Make the checkpoint the session's process. Returns whether it restored the files."""
        reply = await checkpoint.request("restore", {"files": files}, [])
        return files and reply.code == 0

    # -- end -----------------------------------------------------------------------------------------------------------------

    async def end(self, *members: Member) -> None:
        """Kill these processes with those that they started, and nothing else; the whole session if none is left."""
        for member in members:
            member.kill()
        for member in members:
            await member.wait_dead()
        if not self.members:
            await self.kill()

    async def kill(self) -> None:
        self.zygote.kill(self.number, self.index)
        await asyncio.wait({self.ended}, timeout=DEATH_S)

    def _close(self, ended: asyncio.Future[ZygoteReport]) -> None:
        for member in list(self.members):  # those that were never started have no report of their own
            self.zygote.forget(member.number)
            if member.alive and not ended.cancelled() and ended.exception() is None:
                member.ended.set_result(ended.result())
        close_all([fd for fd in self._counters if fd is not None])
        self._counters = [None, None, None]

    @property
    def memory_bytes(self) -> int:
        """In use by the whole session; 0 without control groups."""
        return int((_words_in(self._counters[0]) or [b"0"])[0])

    @property
    def cpu_s(self) -> float:
        """Used by the whole session so far; 0 without control groups. Version 1 has nanoseconds, version 2 microseconds."""
        words = _words_in(self._counters[1]) or [b"0"]
        return int(words[1]) / 1e6 if len(words) > 1 else int(words[0]) / 1e9

    @property
    def oom_kills(self) -> int:
        """How often the kernel killed one of its processes for lack of memory; 0 without control groups."""
        words = _words_in(self._counters[2])
        return int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0

    # -- files ----------------------------------------------------------------------------------------------------------------

    async def files(self, member: Member, put: dict[str, str], fetch: list[str]) -> Got | str:
        """Put files, then fetch files; all of these fit in `file_mb` and one result. Returns why putting failed as a string."""
        most = min((self.limits.file_mb << 20) - (64 << 10), self.results.max_bytes_each * 3 // 4)
        fds = [sealed("files", marshal.dumps((decode_files(put), fetch), 2)), output("out")]
        try:
            reply = await member.request("files", {"most": most}, fds)
            if reply.code:
                return reply.why or "writing the files failed"
            size = min(os.fstat(fds[1]).st_size, most)
            found = await self.results.make(size, lambda: _read_files(fds[1], set(fetch), most))
            if found is None:
                await member.end_because("its answer about files cannot be read")
                raise MemberEnded(member.broken)
            return found
        finally:
            close_all(fds)


def _words_in(fd: int | None) -> list[bytes]:
    """The words of a control group file; none if the file does not exist any more."""
    try:
        return os.pread(fd, 512, 0).split() if fd is not None else []
    except OSError:  # ENODEV: the groups of a dead runner are gone
        return []


def _read_files(fd: int, wanted: set[str], most: int) -> Got | None:
    """Parse an index (name, length, reason why it is missing) and the contents behind it. None if it is malformed."""
    index_most = sum(12 * len(path) + 12 * WHY_CHARS + 64 for path in wanted) + 2
    size = min(os.fstat(fd).st_size, 8 + index_most + most)
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    index = decode_untrusted(_decode_index, os.pread(fd, length, 8)) if 0 < length <= min(size - 8, index_most) else None
    if index is None:
        return None
    found, at = Got({}, {}), 8 + length
    for path, count, why in index:
        if path not in wanted:
            continue
        if why:
            found.files_missing[path] = why[:WHY_CHARS]
        elif 0 <= count <= size - at:
            found.files[path] = base64_of(os.pread(fd, count, at))
            at += count
    return found
