"""A process that sends a part of a burst at once, in a few requests, and checks every result.

It reads an `Order` from standard input and writes a `Share` to standard output.
"""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from exec_client._grpc import GrpcTransport
from exec_client.errors import ExecError
from exec_wire import Call
from loadtest.support.steady_load import Counts, Program, SteadyLoad

ROOT = Path(__file__).parents[2]
GRPC_CHANNELS = 4  # HTTP/2 connections: the flow control of one would be the bottleneck


class Order(Struct, frozen=True):
    url: str  # http:// or grpc://
    name: str
    tenant: str
    calls: int
    batch: int
    deadline_s: float
    sandboxed: bool


class Share(Struct, frozen=True):
    """The results of one sender."""

    counts: Counts
    stays_ms: list[float]  # time in the service, by the gateway
    cpu_s: float


def start(order: Order) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "loadtest.load.burst_sender"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.msgpack.encode(order))
    process.stdin.close()
    return process


def finish(process: subprocess.Popen[bytes]) -> Share:
    assert process.stdout is not None
    share = msgspec.msgpack.decode(process.stdout.read(), type=Share)
    process.wait()
    return share


def over_http(order: Order) -> tuple[Counts, list[float]]:
    load = SteadyLoad(
        lambda: [order.url],
        Program.python if order.sandboxed else Program.echo,
        1,
        name=order.name,
        tenant=order.tenant,
        callers=-(-order.calls // order.batch),
        batch=order.batch,
        most=order.calls,
        deadline_s=order.deadline_s,
    )
    with load:
        load.join()
    return load.counts, load.stays_ms


class GrpcLoad:
    """As `SteadyLoad`, with one attempt: the calls of a broken request are lost."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._program = Program.python if order.sandboxed else Program.echo
        self.counts, self.stays_ms = Counts(notes={}), list[float]()

    async def run(self) -> None:
        channels = [GrpcTransport(self._order.url) for _ in range(GRPC_CHANNELS)]
        starts = range(0, self._order.calls, self._order.batch)
        await asyncio.gather(*(self._batch(channels[n % GRPC_CHANNELS], at) for n, at in enumerate(starts)))
        for channel in channels:
            await channel.aclose()

    async def _batch(self, channel: GrpcTransport, first: int) -> None:
        order = self._order
        names = [f"{order.name}-{n}" for n in range(first, min(first + order.batch, order.calls))]
        wanted = [self._program(name) for name in names]
        calls = [Call(one.code, deadline_s=order.deadline_s, tenant=order.tenant) for one in wanted]
        missing = set(range(len(calls)))
        self.counts.accepted += len(calls)
        try:
            async for result in channel.send(calls, order.deadline_s + 30):
                if result.index not in missing:
                    self.counts.twice += 1
                    continue
                missing.discard(result.index)
                self.counts.answered += 1
                self.stays_ms.append(result.timings.total_ms)
                self._judge(result.status, result.blame, result.stdout == wanted[result.index].stdout)
        except ExecError as error:
            self._note(f"{type(error).__name__}: {error}")
        self.counts.lost += len(missing)

    def _judge(self, status: str, blame: str, same: bool) -> None:
        if status == "ok":
            self.counts.right += same
            self.counts.wrong += not same
        else:
            self.counts.infra += blame == "infra"
            self.counts.model += blame != "infra"
            self._note(f"{status} blamed on {blame}")

    def _note(self, note: str) -> None:
        self.counts.notes[note] = self.counts.notes.get(note, 0) + 1


def over_grpc(order: Order) -> tuple[Counts, list[float]]:
    load = GrpcLoad(order)
    asyncio.run(load.run())
    return load.counts, load.stays_ms


def main() -> None:
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    began = time.process_time()
    counts, stays_ms = over_grpc(order) if order.url.startswith("grpc://") else over_http(order)
    sys.stdout.buffer.write(msgspec.msgpack.encode(Share(counts, stays_ms, time.process_time() - began)))


if __name__ == "__main__":
    main()
