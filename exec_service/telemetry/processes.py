"""The figures of a gateway or worker of several processes (`--processes`), put together from those of each.

Each process answers at a Unix socket in a folder of their parent: a question comes in, a `Report` goes out, the connection
ends. The parent answers with the report of all, so every process can answer for the whole. Only their user can open the
folder, so what comes from it is trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from exec_service.telemetry.live_stats import LiveStats
from exec_wire.messages.stats import Depths

ANSWER_S = 1.0
PARENT = "parent"  # the name of its socket
# Of what every process sees alike, and of ages, the whole has the largest; of what has to hold everywhere the smallest. All
# else is added up.
LARGEST = re.compile(r"exec_(workers|slots|sandbox_tier|session\w+|queue_oldest_seconds)")
SMALLEST = re.compile(r"exec_(worker_)?queue_up|exec_sandbox_layer|exec_worker_draining|process_start_time_seconds")
_CHOSEN = re.compile(r'[{,](run|tenant)="')  # labels whose values callers choose


class Question(NamedTuple):
    about: str  # metrics, stats, run, or readiness, which is in every report
    run: tuple[str, str] = ("", "")  # the tenant and the name of the training run


NO_STATS, NO_DEPTHS = LiveStats(), Depths()


@dataclass(frozen=True)
class Report:
    """Of one process, or of all; of these fields those that the question is about."""

    metrics: str = ""
    not_ready_because: str = ""
    live_stats: LiveStats = NO_STATS
    depths: Depths = NO_DEPTHS


Reporter = Callable[[Question], Awaitable[Report]]


async def ask(socket: Path, question: Question, within_s: float = ANSWER_S) -> Report | None:
    """None if the process has ended or does not answer in time."""
    with contextlib.suppress(OSError, EOFError):  # a TimeoutError is an OSError
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(pickle.dumps(question))
                writer.write_eof()
                report: Report = pickle.loads(await reader.read())
                return report
            finally:
                writer.close()
    return None


@contextlib.asynccontextmanager
async def answering(socket: Path, reporter: Reporter) -> AsyncIterator[None]:
    """Answer at this socket until the end of the block."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError), contextlib.closing(writer):  # the other one may be gone
            writer.write(pickle.dumps(await reporter(pickle.loads(await reader.read()))))
            await writer.drain()

    async with await asyncio.start_unix_server(answer, socket):
        yield


def merged(reports: Sequence[Report]) -> Report:
    """The report of all. The whole is ready if one of its processes is."""
    reasons = [report.not_ready_because for report in reports]
    return Report(
        add_up(report.metrics for report in reports),
        "" if "" in reasons else next(iter(reasons), "no process is ready"),
        LiveStats.merged([report.live_stats for report in reports]),
        _sum([report.depths for report in reports]),
    )


def _sum(depths: Sequence[Depths]) -> Depths:
    return Depths(
        in_flight=sum(one.in_flight for one in depths),
        waiting=sum(one.waiting for one in depths),
        released=sum(one.released for one in depths),
        oldest_wait_s=max((one.oldest_wait_s for one in depths), default=0.0),
        slots=max((one.slots for one in depths), default=0),
        busy=max((one.busy for one in depths), default=0),
    )


def add_up(pages: Iterable[str]) -> str:
    """One page of Prometheus metrics from those of several processes."""
    families: dict[str, tuple[dict[str, None], dict[str, float]]] = {}
    for page in pages:
        for line in page.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                head, values = families.setdefault(name, ({}, {}))
                how = max if LARGEST.fullmatch(name) else min if SMALLEST.fullmatch(name) else float.__add__
            if line.startswith("#"):
                head[line] = None
            else:
                series, _, value = line.rpartition(" ")
                values[series] = how(values[series], float(value)) if series in values else float(value)
    return "".join(
        f"{line}\n" for head, values in families.values() for line in (*head, *(f"{key} {values[key]!r}" for key in values))
    )


def what_remains(page: str, live: str) -> str:
    """What a page of ended processes still adds to the whole: what counts up, so that no counter of the whole falls. Of runs
    and tenants those that a live process still counts, so that they stay bounded."""
    known, kept, counts = {line.rpartition(" ")[0] for line in live.splitlines()}, [], False
    for line in page.splitlines(keepends=True):
        if line.startswith("# HELP "):
            head, counts = line, False
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            counts = kind in ("counter", "histogram") and not LARGEST.fullmatch(name)
            kept += [head, line] if counts else []
        elif counts and (not _CHOSEN.search(line) or line.rpartition(" ")[0] in known):
            kept.append(line)
    return "".join(kept)
