"""How many calls a second the doors and dispatch alone take: HTTP batches, gRPC batches, a gRPC stream. No sandbox runs.

    python -m loadtest.doors [--redis] [--calls 30000] [--batch 256] [--json PATH]

With --redis: a real gateway, a real server and a worker of the runtime `echo`, a process each. Without it the service is a
gateway with the in-memory queue and a worker that answers every call at once, in one process. The load comes from a process of
its own, which has `window` calls in flight, each with an idempotency key, as our client sends them. All share the machine's
cores. What encodes on the caller's side is our client's code, but not its outbox: that is another figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from exec_service.app import Gateway, serve
from exec_service.config import GatewayConfig
from exec_wire.messages.calls import Batch, Call, Result, Tags, Timings, encode_json, pack, unpack_call, verdict
from exec_wire.queue.memory import MemoryQueue
from exec_wire.queue.protocol import Answer, WorkerInfo
from loadtest import facts
from loadtest.parts import Part
from loadtest.ports import free_port
from loadtest.redis_server import RedisServer

SLOTS = 1000
OUT_OF_BREATH_S = 120.0
HEAD = b"POST /v1/batch HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


# -- the service ----------------------------------------------------------------------------------------------------------


def run_service(port: int, grpc_port: int, ready: Any) -> None:
    import uvloop

    uvloop.run(_serve(port, grpc_port, ready))


async def _serve(port: int, grpc_port: int, ready: Any) -> None:
    queue = MemoryQueue()
    end = queue.worker("echo")
    info = WorkerInfo("echo", SLOTS, tier="none")
    config = GatewayConfig(port=port, grpc_port=grpc_port)
    async with Gateway(config, queue.gateway("doors")) as gateway:
        await end.announce(info)
        await gateway.fleet.refresh()
        tasks = [asyncio.create_task(_announce(end, info)), asyncio.create_task(_echo(end))]
        await serve(gateway, stop=asyncio.Event(), listening=lambda _: ready.set())
        await asyncio.gather(*tasks)


async def _announce(end: Any, info: WorkerInfo) -> None:
    while True:
        await end.announce(info)
        await asyncio.sleep(1)


async def _echo(end: Any) -> None:
    while True:
        jobs = await end.take(SLOTS)
        await end.answer([Answer(job.id, pack(_result(unpack_call(job.payload))), 0.1) for job in jobs])


def _result(call: Call) -> Result:
    return verdict("ok", stdout=call.code, completed=True, exit_code=0, worker="echo", timings=Timings(run_ms=0.1))


# -- the load -------------------------------------------------------------------------------------------------------------

Send = Callable[[list[Call]], Awaitable[int]]  # gives how many results came


def calls_of(count: int) -> list[Call]:
    tags = Tags(run="doors", step=1)
    return [
        Call(f"print({n})", id=str(n), idempotency_key=f"k{n}-{os.getpid()}-{time.time_ns()}", tags=tags) for n in range(count)
    ]


@contextlib.asynccontextmanager
async def over_http(port: int) -> AsyncIterator[Send]:
    """A plain HTTP/1.1 exchange over kept connections; a library would be what is measured."""
    decode = msgspec.json.Decoder(Result).decode_lines
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(calls: list[Call]) -> int:
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        body = encode_json(Batch(calls))
        writer.write(HEAD % len(body) + body)
        status = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in status.splitlines()[0], status
        got = 0
        while size := int(await reader.readline(), 16):
            got += len(decode(await reader.readexactly(size)))
            await reader.readexactly(2)
        await reader.readexactly(2)
        idle.append((reader, writer))
        return got

    yield send
    for _, writer in idle:
        writer.close()


@contextlib.asynccontextmanager
async def over_grpc_batches(port: int) -> AsyncIterator[Send]:
    from exec_client._grpc import GrpcTransport

    transport = GrpcTransport(f"grpc://127.0.0.1:{port}")

    async def send(calls: list[Call]) -> int:
        return len([result async for result in transport.send(calls, OUT_OF_BREATH_S)])

    yield send
    await transport.aclose()


@contextlib.asynccontextmanager
async def over_grpc_stream(port: int) -> AsyncIterator[Send]:
    import grpc

    from exec_wire import proto

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.max_receive_message_length", -1)]) as channel:
        stream = channel.stream_stream(f"/{proto.SERVICE}/Stream")()
        landed = asyncio.Condition()
        sent = got = 0

        async def read() -> None:
            nonlocal got
            while (message := await stream.read()) is not grpc.aio.EOF:
                fields = proto.RESULT_BATCH.read(message)
                assert "refused" not in fields, fields
                results = msgspec.convert(fields["results"], list[Result])
                async with landed:
                    got += len(results)
                    landed.notify_all()

        async def send(calls: list[Call]) -> int:
            nonlocal sent
            message = proto.CALL_BATCH.write(calls=[proto.plain(call) for call in calls])
            sent += len(calls)
            mine = sent
            async with writing:
                await stream.write(message)
            async with landed:  # as many as were sent until now; which ones does not matter for the pace
                await landed.wait_for(lambda: got >= mine)
            return len(calls)

        writing = asyncio.Lock()
        reading = asyncio.create_task(read())
        yield send
        await stream.done_writing()
        await reading


WAYS = {"http_batch": over_http, "grpc_batch": over_grpc_batches, "grpc_stream": over_grpc_stream}


async def pace(way: str, port: int, count: int, batch: int, window: int) -> float:
    """Calls a second: `window` calls are in flight, in batches."""
    calls = calls_of(count)
    batches = [calls[at : at + batch] for at in range(0, count, batch)]
    async with WAYS[way](port) as send:
        await send(calls_of(batch))  # connected, warm
        free = asyncio.Semaphore(max(1, window // batch))
        got = 0

        async def one(calls: list[Call]) -> None:
            nonlocal got
            async with free:
                landed = await send(calls)
            got += landed

        began, cpu = time.perf_counter(), time.process_time()
        async with asyncio.timeout(OUT_OF_BREATH_S):
            await asyncio.gather(*(one(part) for part in batches))
        taken_s = time.perf_counter() - began
    assert got == count, f"{got} results for {count} calls"
    cpu_us = 1e6 * (time.process_time() - cpu) / count
    print(f"  {way:12} {count / taken_s:8.0f} calls/s   {cpu_us:5.1f} µs of CPU per call on the caller's side", flush=True)
    return count / taken_s


def main(argv: list[str] | None = None) -> int:
    import uvloop

    parser = argparse.ArgumentParser(prog="doors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", action="store_true", help="through a server of its own and an echo worker")
    parser.add_argument("--calls", type=int, default=30_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with over_redis() if options.redis else in_memory() as ports:
        paces = uvloop.run(_measure(options, ports))
    for way, found in paces.items():
        print(f"{way:12} median {statistics.median(found):8.0f} calls/s, {min(found):.0f} to {max(found):.0f}")
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(_report(options, paces)), indent=2) + b"\n")
    return 0


@contextlib.contextmanager
def in_memory() -> Iterator[list[int]]:
    ports = [free_port(), free_port()]
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    service = spawn.Process(target=run_service, args=(*ports, ready), daemon=True)
    service.start()
    try:
        if not ready.wait(30):
            raise RuntimeError("the service does not start")
        yield ports
    finally:
        service.terminate()


@contextlib.contextmanager
def over_redis() -> Iterator[list[int]]:
    port = free_port()
    with (
        RedisServer() as redis,
        Part.gateway(redis.url, "--grpc-port", str(port)) as gateway,
        Part.echo(redis.url, slots=SLOTS),
    ):
        time.sleep(2)  # until the gateway has seen the worker
        yield [int(gateway.url.rpartition(":")[2]), port]


async def _measure(options: argparse.Namespace, ports: list[int]) -> dict[str, list[float]]:
    paces: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):  # in turn, so that what disturbs the machine disturbs all of them
        for way in WAYS:
            port = ports[0] if way == "http_batch" else ports[1]
            paces[way].append(await pace(way, port, options.calls, options.batch, options.window))
    return paces


def _report(options: argparse.Namespace, paces: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "what": "doors and dispatch alone, a worker that echoes, no sandbox; load generator on the same cores",
        "queue": "redis" if options.redis else "memory",
        "command": " ".join(["python -m loadtest.doors", *["--redis"] * options.redis, *_sizes(options)]),
        "machine": facts.machine(),
        "calls_per_s": {way: {"median": statistics.median(found), "all": found} for way, found in paces.items()},
    }


def _sizes(options: argparse.Namespace) -> list[str]:
    return [f"--{name} {getattr(options, name)}" for name in ("calls", "batch", "window")]


if __name__ == "__main__":
    raise SystemExit(main())
