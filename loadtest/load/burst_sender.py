"""A process that sends a part of a burst at once, in a few requests, and checks every result.

It reads an `Order` from standard input and writes a `Share` to standard output. There is one attempt: the calls of a request
that is refused or breaks are lost.
"""

import asyncio
import subprocess
import sys
import time

import msgspec
from msgspec import Struct

from exec_client._transport import Transport, make_transport
from exec_client.errors import ExecError
from exec_wire import Call, Result
from loadtest.support.processes import ROOT
from loadtest.support.steady_load import Counts, Program

GRACE_S = 30.0  # without a byte for so long after the deadline, the calls of a request are lost
GRPC_CHANNELS = 4  # HTTP/2 connections: the flow control of one would be the bottleneck


class Order(Struct, frozen=True):
    url: str  # http:// or grpc://
    name: str
    tenant: str
    calls: int
    batch: int
    deadline_s: float
    sandboxed: bool


class Share(Struct):
    """The results of one sender."""

    counts: Counts
    stays_ms: list[float]  # time in the service, by the gateway
    cpu_s: float = 0.0


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


async def send(order: Order) -> Share:
    share = Share(Counts(notes={}), [])
    channels = [make_transport(order.url, {}, None) for _ in range(GRPC_CHANNELS if order.url.startswith("grpc") else 1)]
    starts = range(0, order.calls, order.batch)
    await asyncio.gather(*(_send_batch(channels[n % len(channels)], order, at, share) for n, at in enumerate(starts)))
    for channel in channels:
        await channel.aclose()
    return share


async def _send_batch(channel: Transport, order: Order, first: int, share: Share) -> None:
    make, counts = Program.python if order.sandboxed else Program.echo, share.counts
    wanted = [make(f"{order.name}-{n}") for n in range(first, min(first + order.batch, order.calls))]
    calls = [Call(one.code, deadline_s=order.deadline_s, tenant=order.tenant) for one in wanted]
    missing = set(range(len(calls)))
    counts.accepted += len(calls)
    try:
        async for result in channel.send(calls, order.deadline_s + GRACE_S):
            if result.index not in missing:
                counts.twice += 1
                continue
            missing.discard(result.index)
            share.stays_ms.append(result.timings.total_ms)
            _count(counts, result, wanted[result.index])
    except ExecError as error:
        counts.note(f"{type(error).__name__}: {error}")
    counts.lost += len(missing)


def _count(counts: Counts, result: Result, wanted: Program) -> None:
    counts.answered += 1
    if result.status == "ok":
        counts.right += result.stdout == wanted.stdout
        counts.wrong += result.stdout != wanted.stdout
    else:
        counts.infra += result.blame == "infra"
        counts.model += result.blame != "infra"
        counts.note(f"{result.status} blamed on {result.blame}")


def main() -> None:
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    began = time.process_time()
    share = asyncio.run(send(order))
    share.cpu_s = time.process_time() - began
    sys.stdout.buffer.write(msgspec.msgpack.encode(share))


if __name__ == "__main__":
    main()
