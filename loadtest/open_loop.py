"""A load made by our client in a process of its own: calls at given times, whatever became of the others, or so many at once.

`drive(Order(url, programs, at_s))` is an open loop: latency counts from when a call was due, not from when it left.
`drive(Order(url, programs, in_flight=4))` is a closed one: whoever has an answer asks for the next.
"""

from __future__ import annotations

import asyncio
import math
import random
import subprocess
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from exec_client import AsyncClient, Call, ExecError, InfraFailure, Limits, Result
from loadtest import meter
from loadtest.workload import Program

DEADLINE_S = 300.0
LOOK_S = 0.25  # between two looks at the machine
LEAD_S = 0.2  # between the first connection and the first call
ROOT = Path(__file__).parents[1]


class Order(Struct, frozen=True):
    url: str
    programs: list[Program]
    at_s: list[float] = []
    in_flight: int = 1  # without times
    pause_s: float = 0.0  # without times: between an answer and the next call
    tenant: str = ""
    apart: bool = False  # a plain request for each call; else by our client, in which calls may share one


class Landed(Struct, frozen=True):
    """What became of one call. `latency_s` is the caller's, the rest is the service's word."""

    name: str  # of the program's template
    kind: str
    due_s: float
    latency_s: float
    status: str
    blame: str = "infra"
    queue_ms: float = 0.0
    start_ms: float = 0.0
    run_ms: float = 0.0
    total_ms: float = 0.0
    cpu_ms: float = 0.0  # of the program, as the kernel counted it


class Look(NamedTuple):
    """At the machine: CPU time of all its cores until then."""

    at_s: float
    used_s: float
    stolen_s: float  # wanted, and given to others by the host


class Report(Struct, frozen=True):
    landed: list[Landed]  # in the order of the programs
    wall_s: float
    cpu_s: float  # of what made the load
    looks: list[Look] = []

    def stolen_share(self, since_s: float = 0.0, until_s: float = math.inf) -> float:
        """Of the CPU time that was wanted, what the host gave to others."""
        first = max(0, bisect_right(self.looks, since_s, key=_when) - 1)
        last = min(len(self.looks) - 1, bisect_left(self.looks, until_s, key=_when))
        if first >= last:
            return 0.0
        stolen_s = self.looks[last].stolen_s - self.looks[first].stolen_s
        return stolen_s / (stolen_s + self.looks[last].used_s - self.looks[first].used_s or 1.0)

    @property
    def calls_per_s(self) -> float:
        return len(self.landed) / self.wall_s


def poisson(per_s: float, calls: int, seed: int) -> list[float]:
    """When calls come that know nothing of each other."""
    chance, at_s = random.Random(f"arrivals {seed}"), 0.0
    times = []
    for _ in range(calls):
        at_s += chance.expovariate(per_s)
        times.append(at_s)
    return times


def drive(order: Order, patience_s: float = 600.0) -> Report:
    """By a process of its own, so that its CPU time is not the measurement's."""
    done = subprocess.run(
        [sys.executable, "-m", "loadtest.open_loop"],
        input=msgspec.msgpack.encode(order),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        timeout=patience_s,
        check=True,
    )
    return msgspec.msgpack.decode(done.stdout, type=Report)


class Plain:
    """A request for each call, over connections that are kept. Costs a tenth of a full client's CPU time, however many wait."""

    def __init__(self, url: str) -> None:
        self._address = url.removeprefix("http://")
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def info(self) -> None:
        """There is nothing to warm up."""

    async def run(self, call: Call) -> Result:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(*self._address.split(":"))
        body = msgspec.json.encode(call)
        head = (
            f"POST /v1/run HTTP/1.1\r\nhost: {self._address}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        status, _, fields = (await reader.readuntil(b"\r\n\r\n")).lower().partition(b"\r\n")
        answer = await reader.readexactly(int(fields.partition(b"content-length:")[2].split(b"\r\n")[0]))
        self._idle.append((reader, writer))
        if b" 200 " not in status:
            return Result(status="internal_error", blame="infra", error=answer.decode(errors="replace"))
        return msgspec.json.decode(answer, type=Result)


def _when(look: Look) -> float:
    return look.at_s


async def _look_forever(began: float, looks: list[Look]) -> None:
    while True:
        looks.append(Look(time.perf_counter() - began, *meter.machine_s()))
        await asyncio.sleep(LOOK_S)


class Driver:
    def __init__(self, client: AsyncClient | Plain, order: Order) -> None:
        self._client, self._order = client, order
        self.landed: dict[int, Landed] = {}

    async def run(self) -> Report:
        await self._client.info()
        began, cpu = time.perf_counter() + (LEAD_S if self._order.at_s else 0.0), time.process_time()
        looks = list[Look]()
        looking = asyncio.create_task(_look_forever(began, looks))
        await (self._open(began) if self._order.at_s else self._closed(began))
        wall_s = time.perf_counter() - began
        looking.cancel()
        landed = [self.landed[n] for n in range(len(self.landed))]
        return Report(landed, wall_s, time.process_time() - cpu, [*looks, Look(wall_s, *meter.machine_s())])

    async def _open(self, began: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for index, at_s in enumerate(self._order.at_s):
                due = began + at_s
                if (left_s := due - time.perf_counter()) > 0:
                    await asyncio.sleep(left_s)
                tasks.create_task(self._one(index, due, at_s))

    async def _closed(self, began: float) -> None:
        numbers = iter(range(len(self._order.programs)))

        async def work() -> None:
            for index in numbers:
                now = time.perf_counter()
                await self._one(index, now, now - began)
                await asyncio.sleep(self._order.pause_s)

        await asyncio.gather(*(work() for _ in range(self._order.in_flight)))

    async def _one(self, index: int, due: float, due_s: float) -> None:
        program = self._order.programs[index]
        limits = Limits(wall_s=program.wall_s)
        call = Call(program.code, stdin=program.stdin, limits=limits, deadline_s=DEADLINE_S, tenant=self._order.tenant)
        try:
            result = await self._client.run(call)
        except ExecError as error:
            failed = error.result if isinstance(error, InfraFailure) else None
            result = failed or Result(status="internal_error", blame="infra", error=type(error).__name__)
        self.landed[index] = landed(program, due_s, time.perf_counter() - due, result)


def landed(program: Program, due_s: float, latency_s: float, result: Result) -> Landed:
    times, usage = result.timings, result.usage
    return Landed(
        program.name,
        program.kind,
        due_s,
        latency_s,
        result.status,
        result.blame,
        times.queue_ms,
        times.start_ms,
        times.run_ms,
        times.total_ms,
        1000 * usage.cpu_s,
    )


def latencies_s(some: Iterable[Landed]) -> list[float]:
    return [one.latency_s for one in some]


async def _serve(order: Order) -> Report:
    if order.apart:
        return await Driver(Plain(order.url), order).run()
    async with AsyncClient(order.url) as client:
        return await Driver(client, order).run()


def main() -> None:
    import uvloop

    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    sys.stdout.buffer.write(msgspec.msgpack.encode(uvloop.run(_serve(order))))


if __name__ == "__main__":
    main()
