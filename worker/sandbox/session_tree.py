"""A session outside of its sandbox: its first process and its forks, one sandbox and one trust domain.

What comes out of a member's control socket is as untrusted as its output: messages are short, of one kind, read one at a time,
and whoever sends another is killed. No room is given for descriptors, so the kernel drops those that come along.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import itertools
import marshal
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from exec_wire import Display, Limits, Result, Timings, Usage, verdict
from exec_wire.messages.bounds import normal_path
from worker.sandbox import protocol
from worker.sandbox.execution import (
    KILL_AT_OUTPUT,
    OPEN_FILES,
    OWN_LIMIT_REACHED,
    Outcome,
    base64_of,
    close_all,
    judge,
    output,
    page_file,
    sealed,
    setup_failed,
    text,
)
from worker.sandbox.inside import payload as payload_
from worker.sandbox.large_results import LargeResults
from worker.sandbox.protocol import Ask, Say
from worker.sandbox.runner_client import Leaf, RunnerLink
from worker.sandbox.zygote_client import ZygoteLink, ZygoteLost

ANSWER_BYTES = 4096
ANSWER_S = 10.0  # for what takes milliseconds; copying a folder is the longest of it
GRACE_S = 0.5  # from an interrupt to the kill
DEATH_S = 5.0  # for the dying of a killed process to be told
LOOK_S = 0.05  # between two looks at a running cell: its output, and how long it has starved
LOOK_AGAIN_S = 0.005  # after a look at a cell that has nearly used up its time
WHY_CHARS = 200  # of why a file is not fetched
SAID_BYTES = 16 << 20  # of a cell's value and display data
SAID_NAMES = 10_000  # of fields and formats in it: to decode millions would stall the event loop
VALUE_CHARS = 64 << 10  # as inside/session.py cuts it
FIRST_FOLDER = "0"
FORKS_AT_ONCE = 16  # each needs four descriptors, of which a session has 256
NEVER_CPU_S = 1_000_000_000  # cells are limited by wall time: a session's CPU time only grows


class Answer(msgspec.Struct):
    """What a session says, all of it."""

    number: int
    code: int = 0
    why: str = ""
    files: bool = False


class Said(msgspec.Struct):
    """What a cell leaves besides its output."""

    value: str | None = None
    display: list[Display] = []
    completed: bool = False


_decode_answer = msgspec.json.Decoder(Answer).decode
_decode_said = msgspec.json.Decoder(Said).decode
_decode_index = msgspec.json.Decoder(list[tuple[str, int, str]]).decode
T = TypeVar("T")


def untrusted(decode: Callable[[bytes], T], data: bytes) -> T | None:
    """What a session wrote; None if it is no such message, in whatever way: also nested too deeply."""
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class NotForkable(Exception):
    """The message says why."""


class MemberEnded(Exception):
    """The process that was asked is dead."""


class PlaceBusy(Exception):
    """Processes of a lost zygote are still dying in this place; nothing was started."""


class StartFailed(Exception):
    """A session's sandbox could not be set up; the message says at which step. `by_request`: for what the request contained."""

    def __init__(self, words: str, *, by_request: bool) -> None:
        super().__init__(words)
        self.by_request = by_request


class Member:
    """One process of a session."""

    def __init__(self, tree: Tree, number: int, leaf: int, control: socket.socket, folder: str) -> None:
        self.tree, self.number, self.leaf = tree, number, leaf
        self.ended = tree.link.ending(number)
        self.folder = folder
        self.broken = ""  # why it was killed: it did not keep to the protocol
        self.cpu_ns = 0  # when its last cell ended
        self._control = control
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        control.setblocking(False)
        asyncio.get_running_loop().add_reader(control, self._read)
        self.ended.add_done_callback(lambda _: self.close())

    @property
    def alive(self) -> bool:
        return not self.ended.done()

    def tell(self, what: str, arguments: dict[str, Any], fds: list[int]) -> asyncio.Future[Answer]:
        """Have something done. The descriptors stay the caller's."""
        number = next(self.tree.numbers)
        future = self.expect(number)
        try:
            socket.send_fds(self._control, [marshal.dumps((what, number, arguments), 2)], fds)
        except OSError:
            self._break("its control socket cannot be written to")
        return future

    def expect(self, number: int) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        return future

    async def ask(self, what: str, arguments: dict[str, Any], fds: list[int]) -> Answer:
        return await self.answer(self.tell(what, arguments, fds))

    async def answer(self, asked: asyncio.Future[Answer], patience_s: float = ANSWER_S) -> Answer:
        either: set[asyncio.Future[Any]] = {asked, self.ended}
        await asyncio.wait(either, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        if self.alive:
            await self.end_because("it did not answer")
        raise MemberEnded(self.broken)

    def interrupt(self) -> None:
        self.tree.link.interrupt(self.tree.index, self.number)

    def kill(self) -> None:
        self.tree.link.end_member(self.tree.index, self.number)

    async def end_because(self, why: str) -> None:
        """It did not keep to the protocol."""
        self._break(why)
        await self.wait_dead()

    async def wait_dead(self) -> None:
        await asyncio.wait({self.ended}, timeout=DEATH_S)
        if self.alive:  # what cannot be killed alone goes with the whole session
            await self.tree.kill()

    def _read(self) -> None:
        try:
            data = self._control.recv(ANSWER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._closed()
        if (answer := untrusted(_decode_answer, data)) is None:
            return self._break("it wrote to its control socket")
        future = self._asked.pop(answer.number, None)
        if future is None:
            return self._break("it answered what was not asked")
        if not future.done():
            future.set_result(answer)

    def _closed(self) -> None:
        """It is about to end; or its cell closed the socket, and nothing can be asked of it any more."""
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


class Tree:
    """A session's sandbox: a place of its own (uid, control group), and the processes in it."""

    def __init__(
        self,
        link: ZygoteLink,
        runner: RunnerLink,
        index: int,
        limits: Limits,
        numbers: Iterator[int],
        results: LargeResults | None = None,
    ) -> None:
        self.results = results or LargeResults()
        self.link, self.index, self.limits, self.numbers = link, index, limits, numbers
        self._runner = runner
        self.number = next(numbers)
        self._leaf_numbers = itertools.count()
        self._free_leaves: list[int] = []
        self._gone: list[str] = []  # names of folders whose owners are dead
        self._memory_fd: int | None = None
        self._cpu_fd: int | None = None
        self._events_fd: int | None = None
        self.started = False
        self.cpu_seen_s = self.idle_cpu_s = 0.0  # for whoever looks after idle sessions
        self.members: set[Member] = set()

    async def start(self, env: dict[str, str], files: dict[str, str]) -> Member:
        place = await self._runner.place(self.index)
        self._memory_fd, self._cpu_fd, self._events_fd = place.memory_fd, place.cpu_fd, place.events_fd
        self.ended = self.link.ending(self.number)
        self.started = True
        self.ended.add_done_callback(self._close)
        cgroup, fds, started = [fd for fd in place.files if fd is not None], list[int](), list[Member]()
        try:
            payload = payload_.Payload("", [], env, _contents(files), False, session=True)
            fds += [output("stdout")]  # one by one: what was opened is closed if the next one fails
            fds += [output("stderr")]
            fds += [page_file(payload_.pack(payload))]
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            fds.append(theirs.detach())
            started.append(self._member(ours, FIRST_FOLDER, self._next_leaf()))
            [member] = started
            self.link.start_session(self._ask(member), place.uid, place.files, fds)
        except BaseException:
            self._never_was(*started)
            raise
        finally:
            close_all(fds)
            close_all(cgroup)
        leaf = await self._leaf_of(member)
        empty = [sealed("files", marshal.dumps(({}, []), 2)), output("out")]
        try:
            # Its answer says that set-up is over: until then it moves itself between control groups.
            await member.ask("files", {"most": 0}, list(empty))
            await self._enter_leaf(member, leaf, None)
        except MemberEnded:
            await self.kill()
            raise self._start_failed() from None
        except BaseException:
            await self.kill()
            raise
        finally:
            close_all(empty)
            leaf.close()
        return member

    async def _leaf_of(self, member: Member) -> Leaf:
        try:
            return await self._runner.leaf(self.index, member.leaf)
        except BaseException:
            await self.kill()
            raise

    def _never_was(self, *members: Member) -> None:
        mortal: list[Tree | Member] = [self, *members]
        for one in mortal:
            self.link.forget(one.number)
            one.ended.cancel()

    def _start_failed(self) -> Exception:
        if not self.ended.done() or self.ended.exception() is not None:
            return ZygoteLost()
        say = self.ended.result()
        if say.step != 0 and say.error == errno.EBUSY:
            return PlaceBusy()
        steps = self._runner.steps
        if say.ended_by == protocol.BY_REQUEST:  # ours: it did not answer in time
            return ZygoteLost()
        how = judge(Outcome(say, 0, 0), self.limits, steps)
        full = say.memory_peak >= OWN_LIMIT_REACHED * (self.limits.memory_mb << 20)
        killed = os.WIFSIGNALED(say.status) and os.WTERMSIG(say.status) == signal.SIGKILL
        in_prepare = setup_failed(say) and say.step == len(steps) and (full or not killed)
        return StartFailed(how.error or "it ended at once", by_request=in_prepare or how.blame == "model")

    def _ask(self, member: Member) -> Ask:
        limits = self.limits
        return Ask(
            protocol.ASK_RUN,
            self.index,
            self.number,
            cpu_s=NEVER_CPU_S,
            memory_bytes=limits.memory_mb << 20,
            file_bytes=max(limits.file_mb << 20, (limits.output_kb << 10) * KILL_AT_OUTPUT * 2),
            folder_bytes=limits.file_mb << 20,
            processes=limits.processes,
            open_files=OPEN_FILES,
            flags=protocol.HAS_CONTROL,
            member=member.number,
        )

    def _member(self, control: socket.socket, folder: str | None, leaf: int) -> Member:
        number = next(self.numbers)
        member = Member(self, number, leaf, control, str(number) if folder is None else folder)
        self.members.add(member)
        member.ended.add_done_callback(lambda _: self._buried(member))
        return member

    def _buried(self, member: Member) -> None:
        self.members.discard(member)
        self._free_leaves.append(member.leaf)
        self._allow_processes()

    def _allow_processes(self) -> None:
        """Its forks do not count: each of them is one process more."""
        if self.members:
            self.link.allow_processes(self.number, self.index, self.limits.processes + len(self.members) - 1)

    async def _enter_leaf(self, member: Member, leaf: Leaf, hello: socket.socket | None) -> None:
        flags = protocol.HAS_LEAF * bool(leaf.fds) | protocol.HAS_HELLO * (hello is not None)
        flags |= protocol.LEAF_BY_PIDS * leaf.by_pids | protocol.LEAF_JOINED * (hello is not None and bool(leaf.join_fds))
        ask = Ask(protocol.ASK_MEMBER, self.index, self.number, flags=flags, member=member.number)
        said = await self.link.adopt(ask, [*([hello.fileno()] if hello is not None else []), *leaf.fds])
        if said.error and hello is not None:
            raise NotForkable(f"its sandbox does not allow it ({os.strerror(said.error)})")

    # -- forks ----------------------------------------------------------------------------------------------------------------

    async def fork(self, parent: Member, count: int) -> list[Member]:
        """Forks that have begun a life of their own. All of them, or `NotForkable`."""
        forks: list[Member] = []
        while len(forks) < count:
            try:
                forks += (await self._fork(parent, min(FORKS_AT_ONCE, count - len(forks)), None))[0]
            except NotForkable:
                await self.end(*forks)
                raise
        try:
            answers = await asyncio.gather(*(fork.ask("settle", {"name": fork.folder}, []) for fork in forks))
        except MemberEnded:
            answers = []
        if (failed := next((answer.why for answer in answers if answer.code), None)) is not None or not answers:
            await self.end(*forks)
            raise NotForkable(failed or "a fork ended at once")
        return forks

    async def checkpoint(self, parent: Member, copy_most: int) -> tuple[Member, bool]:
        """A fork that waits; were the files copied too?"""
        forks, files = await self._fork(parent, 1, copy_most)
        return forks[0], files

    async def _fork(self, parent: Member, count: int, copy_most: int | None) -> tuple[list[Member], bool]:
        leaves = await self._leaves(count)
        try:
            return await self._fork_into(leaves, parent, copy_most)
        finally:
            for _, leaf in leaves:
                leaf.close()

    async def _fork_into(
        self, leaves: list[tuple[int, Leaf]], parent: Member, copy_most: int | None
    ) -> tuple[list[Member], bool]:
        count = len(leaves)
        controls = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        hellos = [_hello_pair() for _ in range(count)]
        folder = None if copy_most is None else parent.folder
        forks = [self._member(ours, folder, leaf) for (ours, _), (leaf, _) in zip(controls, leaves, strict=True)]
        self._allow_processes()
        greetings = [fork.expect(fork.number) for fork in forks]
        fds = []
        for control, hello, (_, leaf) in zip(controls, hellos, leaves, strict=True):
            fds += [control[1].fileno(), hello[1].fileno(), *leaf.join_fds]
        gone, self._gone = self._gone, []
        arguments = {
            "names": [fork.number for fork in forks],
            "gone": gone,
            "copy_most": copy_most,
            "fds_each": len(fds) // count,
        }
        try:
            asked = parent.tell("fork", arguments, fds)
            for pair in (*controls, *hellos):
                pair[1].close()
            answer = await parent.answer(asked)
            if answer.code:
                raise NotForkable(answer.why)
            await asyncio.gather(*(fork.answer(greeting) for fork, greeting in zip(forks, greetings, strict=True)))
            entering = zip(forks, leaves, hellos, strict=True)
            await asyncio.gather(*(self._enter_leaf(fork, leaf, hello[0]) for fork, (_, leaf), hello in entering))
        except BaseException as error:
            for fork in forks:
                self._unborn(fork)
            if isinstance(error, MemberEnded):
                raise NotForkable(str(error) or "the session's process ended") from error
            raise
        finally:
            for pair in (*controls, *hellos):
                pair[1].close()
            for hello in hellos:
                hello[0].close()
        return forks, answer.files

    async def _leaves(self, count: int) -> list[tuple[int, Leaf]]:
        """All of them, or none: whoever stops waiting keeps no descriptor."""
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
                raise NotForkable("no control group could be made") from error
            raise
        return leaves

    def _next_leaf(self) -> int:
        return self._free_leaves.pop() if self._free_leaves else next(self._leaf_numbers)

    def _unborn(self, fork: Member) -> None:
        """It was not made, or the zygote does not know it: it ends when it finds its socket closed."""
        fork.kill()
        if fork.alive:
            self.link.forget(fork.number)
            fork.ended.cancel()

    async def restore(self, checkpoint: Member, files: bool) -> bool:
        """The checkpoint takes the place of what was forked from it; did it put the files back?"""
        answer = await checkpoint.ask("restore", {"files": files}, [])
        return files and answer.code == 0

    # -- the end --------------------------------------------------------------------------------------------------------------

    async def end(self, *members: Member) -> None:
        """Kill these with all that they started, and nothing else; all of the session if nobody is left."""
        for member in members:
            member.kill()
        for member in members:
            await member.wait_dead()
        if not self.members:
            await self.kill()

    def drop_folder(self, member: Member) -> None:
        """Its owner is gone for good; removed by whoever is forked next."""
        self._gone.append(member.folder)

    async def kill(self) -> None:
        self.link.kill(self.number, self.index)
        await asyncio.wait({self.ended}, timeout=DEATH_S)

    def _close(self, ended: asyncio.Future[Say]) -> None:
        for member in list(self.members):  # those that were never started: nothing is told of them
            self.link.forget(member.number)
            if member.alive and not ended.cancelled() and ended.exception() is None:
                member.ended.set_result(ended.result())
        close_all([fd for fd in (self._memory_fd, self._cpu_fd, self._events_fd) if fd is not None])
        self._memory_fd = self._cpu_fd = self._events_fd = None

    @property
    def memory_bytes(self) -> int:
        """In use by all of it now; 0 where nobody counts."""
        return int((_words_in(self._memory_fd) or [b"0"])[0])

    @property
    def cpu_s(self) -> float:
        """Used by all of it so far; 0 where nobody counts. Version 1 gives nanoseconds, version 2 a list with microseconds."""
        words = _words_in(self._cpu_fd) or [b"0"]
        return int(words[1]) / 1e6 if len(words) > 1 else int(words[0]) / 1e9

    @property
    def oom_kills(self) -> int:
        """How often the kernel has killed one of its processes for want of memory; 0 where nobody counts."""
        words = _words_in(self._events_fd)
        return int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0

    # -- files ----------------------------------------------------------------------------------------------------------------

    async def files(self, member: Member, put: dict[str, str], fetch: list[str]) -> tuple[str, Fetched]:
        """Put files, then read files; words if they could not be put. All that is read fits in `file_mb` and in one result."""
        most = min((self.limits.file_mb << 20) - (64 << 10), self.results.max_bytes_each * 3 // 4)
        fds = [sealed("files", marshal.dumps((_contents(put), fetch), 2)), output("out")]
        try:
            answer = await member.ask("files", {"most": most}, fds)
            if answer.code:
                return answer.why or "the files could not be written", Fetched()
            size = min(os.fstat(fds[1]).st_size, most)
            found = await self.results.make(size, lambda: _read_files(fds[1], set(fetch), most))
            if found is None:
                await member.end_because("its answer about files is not one")
                raise MemberEnded(member.broken)
            return "", found
        finally:
            close_all(fds)


def _contents(files: dict[str, str]) -> dict[str, bytes]:
    return {normal_path(path): base64.b64decode(content) for path, content in files.items()}


class Fetched(NamedTuple):
    files: dict[str, str] = {}  # path -> base64
    missing: dict[str, str] = {}  # path -> why


def _words_in(fd: int | None) -> list[bytes]:
    """Of a file of a control group; nothing if there is none, or no more."""
    try:
        return os.pread(fd, 512, 0).split() if fd is not None else []
    except OSError:  # ENODEV: a runner that has died took its groups with it
        return []


def _hello_pair() -> tuple[socket.socket, socket.socket]:
    """The first end is told by the kernel who writes to the second."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return ours, theirs


def _read_files(fd: int, wanted: set[str], most: int) -> Fetched | None:
    """An index of names, lengths and reasons for what is missing, then the contents. None if that is not what is there."""
    index_most = sum(12 * len(path) + 12 * WHY_CHARS + 64 for path in wanted) + 2
    size = min(os.fstat(fd).st_size, 8 + index_most + most)
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < length <= min(size - 8, index_most) or (index := untrusted(_decode_index, os.pread(fd, length, 8))) is None:
        return None
    found, at = Fetched({}, {}), 8 + length
    for path, count, why in index:
        if path not in wanted:
            continue
        if why:
            found.missing[path] = why[:WHY_CHARS]
        elif 0 <= count <= size - at:
            found.files[path] = base64_of(os.pread(fd, count, at))
            at += count
    return found


# -- one cell ---------------------------------------------------------------------------------------------------------------


class Stop(NamedTuple):
    """Why a cell was stopped by us."""

    status: str  # timeout, output_limit or memory_limit
    infra: bool = False


class CellRun:
    """One cell in one member, with the files that take its output. Use as a context manager."""

    def __init__(self, member: Member, code: str, stdin: str, number: int, limit_s: float, remaining_s: float) -> None:
        """`limit_s`: of the time that it has; `remaining_s`: of all time, until its deadline."""
        self._member, self._number = member, number
        self._limit_s, self._remaining_s = limit_s, remaining_s
        self._starved_s = 0.0  # as of the last look
        self._cap = member.tree.limits.output_kb * 1024
        self._oom_before = member.tree.oom_kills
        self._given = [sealed("payload", marshal.dumps(code, 2)), sealed("stdin", stdin.encode("utf-8", "surrogatepass"))]
        self._kept = [output("stdout"), output("stderr"), output("said")]

    def __enter__(self) -> CellRun:
        return self

    def __exit__(self, *_: object) -> None:
        close_all(self._given)
        close_all(self._kept)

    async def run(self) -> Result:
        started = time.monotonic()
        self._member.tree.link.begin_cell(self._member.tree.index, self._member.number)
        asked = self._member.tell("run", {"cell": self._number}, [*self._given, *self._kept])
        close_all(self._given)
        stop = await self._watch(asked, started)
        elapsed_s = time.monotonic() - started
        said = await self._hear(asked)
        result = self._judge(asked, stop)
        result.state_kept = asked.done() and self._member.alive and not self._member.broken
        if result.state_kept:
            result.value, result.display, result.completed = said.value, said.display, said.completed and result.status == "ok"
        result.timings = Timings(run_ms=round(elapsed_s * 1000, 3))
        await self._measure(result, elapsed_s)
        output_bytes = sum(min(self._cap, os.fstat(fd).st_size) for fd in self._kept[:2])
        await self._member.tree.results.make(output_bytes, lambda: self._read(result))
        return result

    async def _watch(self, asked: asyncio.Future[Answer], started: float) -> Stop | None:
        """Until it has answered or ended; by itself, or because it had to."""
        either: set[asyncio.Future[Any]] = {asked, self._member.ended}
        while True:
            await asyncio.wait(either, timeout=self._next_look_s(started), return_when=asyncio.FIRST_COMPLETED)
            if any(future.done() for future in either):
                return None
            if self._member.tree.oom_kills > self._oom_before:
                return await self._stop(either, Stop("memory_limit"))
            if self._wrote_too_much:
                return await self._stop(either, Stop("output_limit"))
            elapsed_s = time.monotonic() - started
            if elapsed_s - await self._look_at_cpu() >= self._limit_s:
                return await self._stop(either, Stop("timeout"))
            if elapsed_s >= self._remaining_s:
                return await self._stop(either, Stop("timeout", infra=True))

    def _next_look_s(self, started: float) -> float:
        due_s = min(self._limit_s + self._starved_s, self._remaining_s)
        return min(LOOK_S, max(LOOK_AGAIN_S, started + due_s - time.monotonic()))

    async def _look_at_cpu(self) -> float:
        """How long it has starved so far (native/cpu_meter.h)."""
        try:
            say = await self._member.tree.link.usage(self._member.tree.index, self._member.number)
        except ZygoteLost:
            return self._starved_s  # the session is lost, which the next look sees
        self._starved_s = max(self._starved_s, say.starved_ns / 1e9)
        return self._starved_s

    @property
    def _wrote_too_much(self) -> bool:
        return max(os.fstat(fd).st_size for fd in self._kept[:2]) > self._cap * KILL_AT_OUTPUT

    async def _stop(self, either: set[asyncio.Future[Any]], stop: Stop) -> Stop:
        """Interrupted first, so that the state can stay; killed second."""
        self._member.interrupt()
        await asyncio.wait(either, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        if not any(future.done() for future in either):
            self._member.kill()
            await self._member.wait_dead()
        return stop

    def _judge(self, asked: asyncio.Future[Answer], stop: Stop | None) -> Result:
        ended = self._member.ended
        if not asked.done() and (not ended.done() or ended.exception() is not None):
            return verdict("session_lost", error="the session's zygote died")
        if stop is not None:
            late = "the deadline passed before the cell had the time that its limit allows" if stop.infra else ""
            return verdict(stop.status, infra=stop.infra, error=late)  # type: ignore[arg-type]
        if ended.done() and ended.exception() is None and ended.result().oom_kills:  # the kernel's word before its own
            return judge(Outcome(ended.result(), 0, 0), self._member.tree.limits, [])
        if self._member.broken:
            return verdict("signal", signal=9, error=f"the session was ended: {self._member.broken}")
        if asked.done() and self._member.tree.oom_kills > self._oom_before:  # one of its children
            return verdict("memory_limit")
        if asked.done() and self._wrote_too_much:  # between two looks, until no file may grow further or it was done
            return verdict("output_limit")
        if asked.done():
            code = asked.result().code & 0xFF
            return verdict("ok" if code == 0 else "error", exit_code=code)
        sizes = (os.fstat(fd).st_size for fd in self._kept[:2])
        return judge(Outcome(ended.result(), *sizes), self._member.tree.limits, [])

    async def _measure(self, result: Result, elapsed_s: float) -> None:
        try:
            if self._member.alive:
                say = await self._member.tree.link.usage(self._member.tree.index, self._member.number)
            else:
                say = self._member.ended.result()
        except ZygoteLost:
            return
        cpu_ns, self._member.cpu_ns = say.cpu_ns - self._member.cpu_ns, say.cpu_ns
        result.usage = Usage(
            wall_s=round(max(0.0, elapsed_s - self._starved_s), 6),
            elapsed_s=round(elapsed_s, 6),
            cpu_s=round(max(0, cpu_ns) / 1e9, 6),
            memory_peak_bytes=say.memory_peak,
            processes_peak=say.processes_peak,
        )

    async def _hear(self, asked: asyncio.Future[Answer]) -> Said:
        """What the cell leaves besides its output. A session that leaves something else is ended."""
        said_fd = self._kept[2]
        if not asked.done() or not self._member.alive or os.fstat(said_fd).st_size > SAID_BYTES:
            return Said()
        data = os.pread(said_fd, SAID_BYTES, 0)
        said = untrusted(_decode_said, data) if data.count(b'":') - data.count(b'\\":') <= SAID_NAMES else None
        if said is None or len(said.value or "") > VALUE_CHARS:
            said = None
            await self._member.end_because("the value and display data of its cell cannot be read")
        return said or Said()

    def _read(self, result: Result) -> None:
        stdout_fd, stderr_fd, _ = self._kept
        result.stdout, cut_out = text(stdout_fd, os.fstat(stdout_fd).st_size, self._cap)
        result.stderr, cut_err = text(stderr_fd, os.fstat(stderr_fd).st_size, self._cap)
        result.truncated = cut_out or cut_err
