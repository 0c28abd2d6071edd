"""The worker's side of its runner: start or join one, learn the tier, receive the sockets of zygotes as they come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exec_wire import Tier
from worker.sandbox import protocol

CONFIGURE_S = 60.0
JOIN_S, JOIN_PAUSE_S = 60.0, 0.2  # the containers of a pod start in any order


class SandboxUnavailable(Exception):
    """There is no sandbox, or not the one that was asked for; the message says why. `missing`: layer -> why."""

    def __init__(self, words: str, missing: dict[str, str] | None = None) -> None:
        super().__init__(words)
        self.missing = missing or {}


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

    @classmethod
    def start(cls, packages: Path) -> RunnerLink:
        """A runner of our own, with nothing of this process's environment but what it needs to find its code."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = Path(__file__).parents[2]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "worker.sandbox.runner", "--fd", str(theirs.fileno()), "--packages", str(packages)],
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

    def recycle(self, number: int) -> None:
        try:
            protocol.send_message(self._link, {"recycle": number})
        except OSError:
            pass  # the runner is gone, and the zygote with it: `_read` sees it

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
        message, fd = received
        if "zygote" in message and fd is not None:
            self._on_zygote(message["zygote"]["number"], message["zygote"]["profile"], socket.socket(fileno=fd))
        elif "ready" in message:
            self._configured.set_result(message["ready"])
        elif "failed" in message:
            self._fail(message["failed"])

    def _fail(self, words: str) -> None:
        if not self._configured.done():
            self._configured.set_exception(SandboxUnavailable(words))

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
