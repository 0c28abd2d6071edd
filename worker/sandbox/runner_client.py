"""The worker's side of its runner: start or join one, learn the tier, receive the sockets of zygotes as they come and go."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from exec_wire import Tier
from worker.sandbox import protocol
from worker.sandbox.memory import Memory
from worker.sandbox.runner_options import RunnerOptions

log = logging.getLogger("worker")

CONFIGURE_S = 60.0
JOIN_S, JOIN_PAUSE_S = 60.0, 0.2  # the containers of a pod start in any order
ANSWER_S = 10.0


class SandboxUnavailable(Exception):
    """There is no sandbox, or not the one that was asked for; the message says why. `missing`: layer -> why."""

    def __init__(self, words: str, missing: dict[str, str] | None = None) -> None:
        super().__init__(words)
        self.missing = missing or {}


class Place(NamedTuple):
    """Where a session is: a uid, and its control group's files in the order of the protocol."""

    uid: int
    files: list[int | None]
    memory_fd: int | None  # tells how much is in use
    cpu_fd: int | None  # and how much CPU time was used
    events_fd: int | None  # and how often it ran out of memory


class Leaf(NamedTuple):
    fds: list[int]  # none where there are no control groups
    by_pids: bool
    join_fds: list[int]  # by which a process can move there itself

    def close(self) -> None:
        for fd in (*self.fds, *self.join_fds):
            os.close(fd)


Answer = asyncio.Future[tuple[dict[str, Any], list[int]]]


def _close_late(future: Answer) -> None:
    """The answer came when nobody waited for it any more."""
    if not future.cancelled() and future.exception() is None:
        close_all(future.result()[1])


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


class RunnerLink:
    """`on_zygote(number, profile, socket)` is called for each zygote that is started, now and later."""

    def __init__(self, link: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self._link, self._process = link, process
        self.lost = asyncio.Event()
        self.tier: Tier = "none"
        self.layers: list[str] = []
        self.steps: list[str] = []
        self.missing: dict[str, str] = {}
        self.languages: dict[str, str] = {}
        self.memory = Memory(1 << 62, "")  # of where programs run
        # By what was asked, in the order of asking: the runner answers in that order, also what nobody waits for any more.
        self._answers: defaultdict[str, deque[Answer]] = defaultdict(deque)

    @classmethod
    def start(cls, options: RunnerOptions) -> RunnerLink:
        """A runner of our own, with nothing of this process's environment but what it needs to find its code."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = Path(__file__).parents[2]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "worker.sandbox.runner", "--fd", str(theirs.fileno()), *options.arguments()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONPATH": str(root)},
                start_new_session=True,  # a Ctrl-C on the terminal is for the service, which drains first
            )
        return cls(ours, process)

    @classmethod
    async def join(cls, path: Path, patience_s: float = JOIN_S) -> RunnerLink:
        """The runner that listens there, or will in a moment."""
        give_up = time.monotonic() + patience_s
        while True:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                link.connect(str(path))
            except OSError as error:
                link.close()
                if time.monotonic() > give_up or not isinstance(error, FileNotFoundError | ConnectionRefusedError):
                    raise SandboxUnavailable(f"no runner at {path}: {error.strerror}") from error
                await asyncio.sleep(JOIN_PAUSE_S)
            else:
                return cls(link, None)

    async def configure(self, wishes: dict[str, Any], on_zygote: Callable[[int, str, socket.socket], None]) -> None:
        self._on_zygote = on_zygote
        self._configured: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        protocol.send_message(self._link, {"configure": wishes})
        self._link.setblocking(False)
        asyncio.get_running_loop().add_reader(self._link, self._read)
        try:
            ready = await asyncio.wait_for(self._configured, CONFIGURE_S)
        except TimeoutError:
            raise SandboxUnavailable(f"the runner did not answer within {CONFIGURE_S:.0f} s") from None
        self.tier, self.layers, self.steps, self.missing = ready["tier"], ready["layers"], ready["steps"], ready["missing"]
        self.languages = ready["languages"]
        if "memory" in ready:
            self.memory = Memory(*ready["memory"])

    def recycle(self, number: int) -> None:
        self._tell({"recycle": number})

    def retire(self, number: int) -> None:
        self._tell({"retire": number})

    def _tell(self, message: dict[str, Any]) -> bool:
        try:
            protocol.send_message(self._link, message)
        except OSError:
            return False  # the runner is gone, and the zygote with it: `_read` sees it
        return True

    async def place(self, index: int) -> Place:
        """The control group of a session. Its descriptors are the caller's."""
        words, fds = await self._ask({"place": index}, f"place {index}")
        files, counters = ([fds.pop(0) if there else None for there in words[part]] for part in ("present", "counters"))
        return Place(words["uid"], files, *counters)

    async def leaf(self, index: int, leaf: int) -> Leaf:
        """The control group of one process in it. Its descriptors, if there are any, are the caller's."""
        words, fds = await self._ask({"leaf": [index, leaf]}, f"leaf {[index, leaf]}")
        return Leaf(fds[: protocol.LEAF_FDS], words["by_pids"], fds[protocol.LEAF_FDS :])

    async def _ask(self, message: dict[str, Any], name: str) -> tuple[dict[str, Any], list[int]]:
        if self.lost.is_set():
            raise SandboxUnavailable("the runner ended")
        if not self._tell(message):
            raise SandboxUnavailable("the runner does not take messages")
        future: Answer = asyncio.get_running_loop().create_future()
        self._answers[name].append(future)
        try:
            words, fds = await asyncio.wait_for(asyncio.shield(future), ANSWER_S)
        except (TimeoutError, asyncio.CancelledError):
            future.add_done_callback(_close_late)
            raise
        if "error" in words:
            raise SandboxUnavailable(f"no control group for a session: {words['error']}")
        return words, fds

    def _read(self) -> None:
        try:
            received = protocol.receive_message(self._link)
        except BlockingIOError:
            return
        if received is None:
            asyncio.get_running_loop().remove_reader(self._link)
            self.lost.set()
            self._fail("the runner ended; its messages say why")
            return
        message, fds = received
        if "zygote" in message and fds:
            self._on_zygote(message["zygote"]["number"], message["zygote"]["profile"], socket.socket(fileno=fds[0]))
        elif "place" in message or "leaf" in message:
            self._answer(message, fds)
        elif "ready" in message and not self._configured.done():
            self._configured.set_result(message["ready"])
        elif "failed" in message:
            if self._configured.done():
                log.error("the runner gives up: %s", message["failed"])
            self._fail(message["failed"], message.get("missing"))

    def _answer(self, message: dict[str, Any], fds: list[int]) -> None:
        name = next(f"{kind} {message[kind]}" for kind in ("place", "leaf") if kind in message)
        waiting = self._answers.get(name)
        if not waiting:
            close_all(fds)  # it was not asked for
            return
        waiting.popleft().set_result((message, fds))
        if not waiting:
            del self._answers[name]

    def _fail(self, words: str, missing: dict[str, str] | None = None) -> None:
        for answer in (answer for waiting in self._answers.values() for answer in waiting):
            answer.set_exception(SandboxUnavailable(words))
            answer.exception()  # somebody may have stopped waiting
        self._answers.clear()
        if not self._configured.done():
            self._configured.set_exception(SandboxUnavailable(words, missing))

    async def close(self, patience_s: float = 10.0) -> None:
        """Let the runner go: it kills what runs and removes what it made."""
        if self._link.fileno() < 0:
            return  # closed already: it was lost, and no other could be had
        asyncio.get_running_loop().remove_reader(self._link)
        self._link.close()
        if self._process is None:
            return
        try:
            await asyncio.to_thread(self._process.wait, patience_s)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)
