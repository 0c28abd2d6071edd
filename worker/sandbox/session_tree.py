"""A session's sandbox, seen from the worker: its first process and its forks, one sandbox and one trust domain."""

import asyncio
import errno
import itertools
import marshal
import os
import signal
import socket
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from exec_wire import Limits
from worker.sandbox import protocol
from worker.sandbox.execution import decode_files, run_request
from worker.sandbox.inside import payload as payload_
from worker.sandbox.large_results import LargeResults
from worker.sandbox.memory_files import base64_of, close_all, output, page_file, sealed
from worker.sandbox.protocol import ZygoteReport, ZygoteRequest
from worker.sandbox.runner_client import NO_LEAF, Leaf, RunnerClient
from worker.sandbox.session_member import DEATH_S, Member, MemberEnded, decode_untrusted
from worker.sandbox.verdict import OWN_LIMIT_REACHED, Outcome, judge, setup_failed
from worker.sandbox.zygote_client import ZygoteClient, ZygoteLost

WHY_CHARS = 200  # of the reason why a file was not fetched
FIRST_FOLDER = "0"
FORKS_AT_ONCE = 16  # each needs four descriptors, of which a session has 256
NEVER_CPU_S = 1_000_000_000  # cells have a wall limit instead: a session's CPU time only grows
_decode_index = msgspec.json.Decoder(list[tuple[str, int, str]]).decode


class NotForkable(Exception):
    """The message says why."""


class SessionSlotBusy(Exception):
    """Nothing was started: processes of a lost zygote are still dying in this session slot."""


class StartFailed(Exception):
    """A session's sandbox could not be set up; the message names the step. `by_request`: the request's contents caused it."""

    def __init__(self, message: str, *, by_request: bool) -> None:
        super().__init__(message)
        self.by_request = by_request


class Fetched(NamedTuple):
    files: dict[str, str] = {}  # path -> base64
    missing: dict[str, str] = {}  # path -> why


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
        leaf = NO_LEAF
        try:
            leaf = await self._runner.leaf(self.index, member.leaf)
            # The reply means that set-up is over: until then the process moves itself between control groups.
            await self.files(member, {}, [])
            await self._enter_leaf(member, leaf, None)
        except BaseException as error:
            await self.kill()
            raise self._start_failed() if isinstance(error, MemberEnded) else error from None
        finally:
            leaf.close()
        return member

    async def _start_member(self, env: dict[str, str], files: dict[str, str]) -> Member:
        slot = await self._runner.session_slot(self.index)
        self._counters = slot.counters
        self.ended = self.zygote.ending(self.number)
        self.started = True
        self.ended.add_done_callback(self._close)
        cgroup, fds, started = [fd for fd in slot.files if fd is not None], list[int](), list[Member]()
        try:
            payload = payload_.Payload("", [], env, decode_files(files), False, session=True)
            fds += [output("stdout")]  # one by one: if opening one fails, the others are closed
            fds += [output("stderr")]
            fds += [page_file(payload_.pack(payload))]
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            fds.append(theirs.detach())
            started.append(self._member(ours, FIRST_FOLDER, self._next_leaf()))
            [member] = started
            fields = {"cpu_s": NEVER_CPU_S, "flags": protocol.HAS_CONTROL, "member": member.number}
            request = run_request(self.limits, self.index, self.number, **fields)
            self.zygote.start_session(request, slot.uid, slot.files, fds)
            return member
        except BaseException:
            for number, ended in [(self.number, self.ended), *((one.number, one.ended) for one in started)]:
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
        steps = self._runner.steps
        if report.ended_by == protocol.BY_REQUEST:  # the worker killed it because it did not reply in time
            return ZygoteLost()
        how = judge(Outcome(report, 0, 0), self.limits, steps)
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
        try:
            return await self._fork_into(leaves, parent, copy_most)
        finally:
            for _, leaf in leaves:
                leaf.close()

    async def _fork_into(
        self, leaves: list[tuple[int, Leaf]], parent: Member, copy_most: int | None
    ) -> tuple[list[Member], bool]:
        controls = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in leaves]
        hellos = [_hello_pair() for _ in leaves]
        folder = None if copy_most is None else parent.folder
        forks = [self._member(ours, folder, number) for (ours, _), (number, _) in zip(controls, leaves, strict=True)]
        self._allow_processes()
        greetings = [fork.expect(fork.number) for fork in forks]
        try:
            fds = []
            for control, hello, (_, leaf) in zip(controls, hellos, leaves, strict=True):
                fds += [control[1].fileno(), hello[1].fileno(), *leaf.join_fds]
            gone, self.dead_folders = self.dead_folders, []
            arguments = {"names": [fork.number for fork in forks], "gone": gone, "copy_most": copy_most}
            pending = parent.send("fork", arguments | {"fds_each": len(fds) // len(forks)}, fds)
            for pair in (*controls, *hellos):
                pair[1].close()
            reply = await parent.reply(pending)
            if reply.code:
                raise NotForkable(reply.why)
            await asyncio.gather(*(fork.reply(greeting) for fork, greeting in zip(forks, greetings, strict=True)))
            entering = zip(forks, leaves, hellos, strict=True)
            await asyncio.gather(*(self._enter_leaf(fork, leaf, hello[0]) for fork, (_, leaf), hello in entering))
        except BaseException as error:
            for fork in forks:
                self._abort_fork(fork)
            if isinstance(error, MemberEnded):
                raise NotForkable(str(error) or "the session's process ended") from error
            raise
        finally:
            for pair in (*controls, *hellos):
                pair[1].close()
            for hello in hellos:
                hello[0].close()
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

    def _abort_fork(self, fork: Member) -> None:
        """The fork was not made, or the zygote does not know it: then it ends when its socket is closed."""
        fork.kill()
        if fork.alive:
            self.zygote.forget(fork.number)
            fork.ended.cancel()

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

    async def files(self, member: Member, put: dict[str, str], fetch: list[str]) -> tuple[str, Fetched]:
        """Put files, then fetch files. Returns an error message if putting failed. All fetched files fit in `file_mb` and one
        result."""
        most = min((self.limits.file_mb << 20) - (64 << 10), self.results.max_bytes_each * 3 // 4)
        fds = [sealed("files", marshal.dumps((decode_files(put), fetch), 2)), output("out")]
        try:
            reply = await member.request("files", {"most": most}, fds)
            if reply.code:
                return reply.why or "writing the files failed", Fetched()
            size = min(os.fstat(fds[1]).st_size, most)
            found = await self.results.make(size, lambda: _read_files(fds[1], set(fetch), most))
            if found is None:
                await member.end_because("its answer about files cannot be read")
                raise MemberEnded(member.broken)
            return "", found
        finally:
            close_all(fds)


def _words_in(fd: int | None) -> list[bytes]:
    """The words of a control group file; none if the file does not exist any more."""
    try:
        return os.pread(fd, 512, 0).split() if fd is not None else []
    except OSError:  # ENODEV: the groups of a dead runner are gone
        return []


def _hello_pair() -> tuple[socket.socket, socket.socket]:
    """With each message on the first socket the kernel passes the sender's credentials."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return ours, theirs


def _read_files(fd: int, wanted: set[str], most: int) -> Fetched | None:
    """Parse an index (name, length, reason why it is missing) and the contents behind it. None if it is malformed."""
    index_most = sum(12 * len(path) + 12 * WHY_CHARS + 64 for path in wanted) + 2
    size = min(os.fstat(fd).st_size, 8 + index_most + most)
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if (
        not 0 < length <= min(size - 8, index_most)
        or (index := decode_untrusted(_decode_index, os.pread(fd, length, 8))) is None
    ):
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
