"""`--processes N`: a gateway or a worker as several processes, so that it uses several cores.

The parent opens what they share, starts them with its own command line and puts their figures together; it handles no calls.

- The children of a gateway accept at one socket, which the parent keeps open. A connection that waits there while a child dies
  or is replaced goes to another one; with a socket for each child (SO_REUSEPORT, which gRPC needs) it would be reset.
- A child that dies is logged and replaced. If they keep dying, the supervisor gives up and the parent stops.
- SIGHUP replaces the children one after another: an old one leaves when its successor is ready.
- The kernel kills a child whose parent dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from exec_service.cli.common import DidNotStart
from exec_service.telemetry.logs import real_stderr
from exec_service.telemetry.metric_types import process_metrics
from exec_service.telemetry.processes import (
    PARENT,
    Question,
    Report,
    Reporter,
    add_up,
    answering,
    ask,
    merged,
    what_remains,
)
from exec_wire.supervisor import Supervisor, stop
from worker.sandbox import kernel

log = logging.getLogger("exec_service.cli.processes")

READY = b"ready\n"


class ProcessEnded(Exception):
    """A child ended, and nobody had told it to."""


@contextlib.asynccontextmanager
async def child_of(folder: Path, reporter: Reporter) -> AsyncIterator[Callable[[], None]]:
    """Be a child until the end of the block: answer questions, and leave the last figures. Yields what to call when ready."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    async with answering(folder / str(os.getpid()), reporter):
        yield lambda: _tell_parent(READY)
    _tell_parent((await reporter(Question("metrics"))).metrics.encode())


def _tell_parent(data: bytes) -> None:
    with open(1, "wb", closefd=False) as parent:
        parent.write(data)


class Child:
    """It writes `READY` to its standard output when it is ready, and its last metrics when it has stopped."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.process, self.metrics = process, ""  # the last that is known
        self._socket, self._over = folder / str(process.pid), False
        self._ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.create_task(self._watch())

    async def _watch(self) -> str:
        """How it ended."""
        assert self.process.stdout is not None
        self._ready.set_result(await self.process.stdout.readline() == READY)
        last = await self.process.stdout.read()
        self._over, self.metrics = True, last.decode() or self.metrics
        code = await self.process.wait()
        self._socket.unlink(missing_ok=True)
        return f"process {self.process.pid} " + (f"was killed by signal {-code}" if code < 0 else f"exited with code {code}")

    async def is_ready(self) -> bool:
        """Wait until it is. False if it ended before."""
        await asyncio.wait({self._ready})
        return self._ready.result()

    async def report(self, question: Question) -> Report:
        report = await ask(self._socket, question) or Report(self.metrics, f"process {self.process.pid} does not answer")
        if question.about == "metrics" and not self._over:
            self.metrics = report.metrics
        return report

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Processes(Collector):
    """The children of this process. Use as a context manager; `drain` stops them."""

    def __init__(self, count: int, supervisor: Supervisor, listen_fd: int = -1) -> None:
        self._count, self._supervisor, self._listen_fd = count, supervisor, listen_fd
        self._folder = Path(tempfile.mkdtemp(prefix="exec-service-"))
        self._children: list[Child] = []  # those that are to run
        self._alive: dict[Child, None] = {}  # these, and those that they replaced
        self._ended_metrics = ""
        self._starting = asyncio.Lock()
        self._hangup = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = contextlib.AsyncExitStack()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    async def __aenter__(self) -> Self:
        """Raises `DidNotStart`."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hangup.set)
        try:
            await self._stack.enter_async_context(answering(self._folder / PARENT, self.report))
            self._children += [await self._spawn(slot) for slot in range(self._count)]
            for child in self._children:
                if not await child.is_ready():
                    raise DidNotStart(max(1, await child.process.wait()))
        except BaseException:
            await self.__aexit__()
            raise
        self._tasks = [self._supervisor.start("processes", partial(self._keep, slot)) for slot in range(self._count)]
        self._tasks.append(self._supervisor.start("replace", self._replace_forever))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain()
        await self._stack.aclose()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def drain(self) -> None:
        """Let the children finish what they have accepted, and stop."""
        await stop(self._tasks)
        for child in self._alive:
            child.send(signal.SIGTERM)
        await asyncio.gather(*(child.ended for child in self._alive))

    async def report(self, question: Question) -> Report:
        """The figures of all, also of those that ended."""
        asked = list(self._alive)
        reports = await asyncio.gather(*(child.report(question) for child in asked))
        whole = merged([report for child, report in zip(asked, reports, strict=True) if child in self._alive])
        if question.about != "metrics":
            return whole
        own = generate_latest(self._registry).decode()
        return replace(whole, metrics=add_up([*(child.metrics for child in self._alive), own, self._ended_metrics]))

    def collect(self) -> Iterator[Metric]:
        yield from process_metrics(self._supervisor)

    async def _spawn(self, slot: int) -> Child:
        part = ["--part-of", str(self._folder), "--part", str(slot)]
        sock = ["--listen-fd", str(self._listen_fd)] if self._listen_fd >= 0 else []
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *sys.orig_argv[1:], *part, *sock),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=real_stderr(),
            pass_fds=[self._listen_fd] if sock else [],
            start_new_session=True,  # Ctrl-C in a terminal is for the parent alone
        )
        child = Child(process, self._folder)
        self._alive[child] = None
        child.ended.add_done_callback(lambda _: self._bury(child))
        return child

    def _bury(self, child: Child) -> None:
        """It counts on for the whole, so that no counter falls."""
        live = "".join(one.metrics for one in self._alive)
        del self._alive[child]
        self._ended_metrics = what_remains(add_up([self._ended_metrics, child.metrics]), live)

    async def _start(self, slot: int) -> None:
        """Put a new child there as soon as it is ready."""
        child = await self._spawn(slot)
        if not await child.is_ready():
            raise ProcessEnded(await child.ended)
        log.info("a process of this service started", extra={"pid": child.process.pid})
        self._children[slot] = child

    async def _keep(self, slot: int) -> None:
        async with self._starting:
            if self._children[slot].ended.done():
                await self._start(slot)
        while True:
            child = self._children[slot]
            await asyncio.wait({child.ended})
            if child is self._children[slot]:
                raise ProcessEnded(child.ended.result())

    async def _replace_forever(self) -> None:
        while True:
            await self._hangup.wait()
            self._hangup.clear()
            for slot in range(self._count):
                async with self._starting:
                    old = self._children[slot]
                    await self._start(slot)
                old.send(signal.SIGHUP)
                await asyncio.wait({old.ended})
