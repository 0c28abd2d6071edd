"""The worker's connection to its runner: start or join one, learn the tier, receive the sockets of zygotes."""

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
from typing import Any, NamedTuple, Self

import msgspec

from worker.sandbox import protocol
from worker.sandbox.memory_files import close_all
from worker.sandbox.runner_limits import RunnerOptions
from worker.sandbox.tiers import SandboxUnavailable as SandboxUnavailable

log = logging.getLogger("worker")

CONFIGURE_S = 60.0
JOIN_S, JOIN_PAUSE_S = 60.0, 0.2  # the containers of a pod start in any order
ANSWER_S = 10.0


class SessionSlot(NamedTuple):
    """A uid, and the files of a session's control group in the order of the protocol."""

    uid: int
    files: list[int | None]
    counters: list[int | None]  # memory in use, CPU time used, kills for lack of memory


class Leaf(NamedTuple):
    fds: list[int]  # empty without control groups
    by_pids: bool
    join_fds: list[int]  # a process moves there itself by writing to them

    def close(self) -> None:
        close_all([*self.fds, *self.join_fds])


Answer = asyncio.Future[tuple[dict[str, Any], list[int]]]


def _close_late(future: Answer) -> None:
    """The answer to a request that was cancelled."""
    if not future.cancelled() and future.exception() is None:
        close_all(future.result()[1])


class RunnerClient:
    """`on_zygote(number, profile, socket)` is called for each zygote that is started, now and later."""

    def __init__(self, socket_: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self._socket, self._process = socket_, process
        self.lost = asyncio.Event()
        self.ready = protocol.Ready()
        # By request, in the order of sending: the runner answers in that order, also requests that were cancelled.
        self._answers: defaultdict[str, deque[Answer]] = defaultdict(deque)

    @classmethod
    def start(cls, options: RunnerOptions) -> Self:
        """Start a runner, with an environment that contains only what it needs to find its code."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = Path(__file__).parents[2]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "worker.sandbox.runner", "--fd", str(theirs.fileno()), *options.arguments()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONPATH": str(root)},
                start_new_session=True,  # Ctrl-C on the terminal is for the service, which drains first
            )
        return cls(ours, process)

    @classmethod
    async def join(cls, path: Path, patience_s: float = JOIN_S) -> Self:
        """Connect to the runner that listens at `path`, or will soon."""
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
        protocol.send_message(self._socket, {"configure": wishes})
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        try:
            self.ready = msgspec.convert(await asyncio.wait_for(self._configured, CONFIGURE_S), protocol.Ready)
        except TimeoutError:
            raise SandboxUnavailable(f"the runner did not answer within {CONFIGURE_S:.0f} s") from None

    def send(self, message: dict[str, Any]) -> bool:
        try:
            protocol.send_message(self._socket, message)
        except OSError:
            return False  # the runner is gone; `_read` sees it
        return True

    async def session_slot(self, index: int) -> SessionSlot:
        """Have a session's control group made. The caller owns the descriptors."""
        reply, fds = await self._request({"session_slot": index}, f"session_slot {index}")
        files, counters = ([fds.pop(0) if there else None for there in reply[part]] for part in ("present", "counters"))
        return SessionSlot(reply["uid"], files, counters)

    async def leaf(self, index: int, leaf: int) -> Leaf:
        """Have the control group of one of its processes made. The caller owns the descriptors."""
        reply, fds = await self._request({"leaf": [index, leaf]}, f"leaf {[index, leaf]}")
        return Leaf(fds[: protocol.LEAF_FDS], reply["by_pids"], fds[protocol.LEAF_FDS :])

    async def _request(self, message: dict[str, Any], name: str) -> tuple[dict[str, Any], list[int]]:
        if self.lost.is_set():
            raise SandboxUnavailable("the runner ended")
        if not self.send(message):
            raise SandboxUnavailable("the runner does not read messages")
        future: Answer = asyncio.get_running_loop().create_future()
        self._answers[name].append(future)
        try:
            reply, fds = await asyncio.wait_for(asyncio.shield(future), ANSWER_S)
        except (TimeoutError, asyncio.CancelledError):
            future.add_done_callback(_close_late)
            raise
        if "error" in reply:
            raise SandboxUnavailable(f"no control group for a session: {reply['error']}")
        return reply, fds

    def _read(self) -> None:
        try:
            received = protocol.receive_message(self._socket)
        except BlockingIOError:
            return
        if received is None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self.lost.set()
            self._fail("the runner ended; its log lines say why")
            return
        message, fds = received
        if "zygote" in message and fds:
            self._on_zygote(message["zygote"]["number"], message["zygote"]["profile"], socket.socket(fileno=fds[0]))
        elif "session_slot" in message or "leaf" in message:
            self._answer(message, fds)
        elif "ready" in message and not self._configured.done():
            self._configured.set_result(message["ready"])
        elif "failed" in message:
            if self._configured.done():
                log.error("the runner gives up: %s", message["failed"])
            self._fail(message["failed"], message.get("missing"))

    def _answer(self, message: dict[str, Any], fds: list[int]) -> None:
        name = next(f"{kind} {message[kind]}" for kind in ("session_slot", "leaf") if kind in message)
        waiting = self._answers.get(name)
        if not waiting:
            close_all(fds)  # it was not requested
            return
        waiting.popleft().set_result((message, fds))
        if not waiting:
            del self._answers[name]

    def _fail(self, why: str, missing: dict[str, str] | None = None) -> None:
        for answer in (answer for waiting in self._answers.values() for answer in waiting):
            answer.set_exception(SandboxUnavailable(why))
            answer.exception()  # marks it as retrieved: the waiter may be cancelled
        self._answers.clear()
        if not self._configured.done():
            self._configured.set_exception(SandboxUnavailable(why, missing))

    async def close(self, patience_s: float = 10.0) -> None:
        """Disconnect: the runner then kills what runs, removes what it made, and ends."""
        if self._socket.fileno() < 0:
            return  # closed already: it was lost and could not be replaced
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        if self._process is None:
            return
        try:
            await asyncio.to_thread(self._process.wait, patience_s)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)
