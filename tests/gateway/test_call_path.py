"""How many functions one call runs in the gateway, and how often it enters each file.

What counts: functions (named `def`s and lambdas, not comprehensions) of `exec_service` and `exec_wire` that the gateway runs
for a call in the steady state, from the first byte of the request to the last of the response. The steady state is a later call
on a warm, kept connection with the default configuration, metrics and logs included. A function counts once, however often it
runs; a coroutine that waited before and goes on counts too. The queue (`exec_wire/queue/`) does not count: it stands for Redis.

A file is entered when a function of another file of ours, or code outside, calls one of its functions. An entry is a pair of
the calling function and the file.
"""

import asyncio
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from gateway_harness import running
from grpc_harness import caller

from exec_service.dispatch.workers import WorkerRegistry
from exec_wire import proto
from exec_wire.messages.calls import verdict

ROOT = Path(__file__).parents[2]
OURS = tuple(str(ROOT / name) + "/" for name in ("exec_service", "exec_wire"))
QUEUE = str(ROOT / "exec_wire" / "queue") + "/"
OF_THE_HARNESS = {verdict.__code__}  # its worker runs in this process
PERIODIC = {WorkerRegistry.refresh_forever.__code__}  # also of other tests' gateways, which run in this process too

MOST_BY_HTTP = 30
MOST_BY_GRPC = 28
MOST_ENTRIES = 2


class Trace:
    """Use as a context manager around the call."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], str] = {}  # file and name, with the caller
        self.entries: defaultdict[str, set[str]] = defaultdict(set)  # by file
        self._frames: set[FrameType] = set()  # kept, so that a coroutine that goes on is no second call

    def __enter__(self) -> "Trace":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self._is_ours(frame) or frame in self._frames or self._is_periodic(frame):
            return
        self._frames.add(frame)
        back = frame.f_back
        while back is not None and not back.f_code.co_filename.startswith(OURS):
            back = back.f_back
        file, name = self._place(frame)
        from_file, from_name = ("outside", "") if back is None else self._place(back)
        self.functions.setdefault((file, name), f"{from_file}:{from_name}")
        if from_file != file:
            self.entries[file].add(f"{from_file}:{from_name}")

    def _is_ours(self, frame: FrameType) -> bool:
        code = frame.f_code
        if not code.co_filename.startswith(OURS) or code.co_filename.startswith(QUEUE) or code in OF_THE_HARNESS:
            return False
        return not code.co_name.startswith("<") or code.co_name == "<lambda>"

    def _is_periodic(self, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code not in PERIODIC:
            frame = frame.f_back
        return frame is not None

    def _place(self, frame: FrameType) -> tuple[str, str]:
        return str(Path(frame.f_code.co_filename).relative_to(ROOT)), frame.f_code.co_qualname

    def check(self, most: int) -> None:
        listed = "\n".join(f"{file}:{name}  <- {back}" for (file, name), back in self.functions.items())
        assert len(self.functions) <= most, f"{len(self.functions)} functions:\n{listed}"
        often = {file: backs for file, backs in self.entries.items() if len(backs) > MOST_ENTRIES}
        assert not often, f"files entered more than {MOST_ENTRIES} times: {often}\n{listed}"


async def trace_of(run: Callable[[], Awaitable[object]]) -> Trace:
    """Of the call with the fewest functions: a task of the gateway may run by chance during any of them, on a busy machine
    during most of them."""
    traces = []
    for _ in range(22):
        await asyncio.sleep(0.05)  # until the call before it has ended in the gateway too
        with Trace() as trace:
            await run()
        traces.append(trace)
    return min(traces[2:], key=lambda trace: len(trace.functions))


async def test_a_call_by_http_runs_few_functions() -> None:
    async with running(workers_refresh_s=60) as service:
        trace = await trace_of(service.run)
        assert (await service.run("say hi")).json()["stdout"] == "hi"
    trace.check(MOST_BY_HTTP)


async def test_a_call_by_grpc_runs_few_functions() -> None:
    async with running(workers_refresh_s=60, grpc=True) as service, caller(service.grpc_target) as client:
        request = proto.CALL.write(code="say hi")
        trace = await trace_of(partial(client.run_, request, timeout=20))
        assert (await client.run("say hi")).stdout == "hi"
    trace.check(MOST_BY_GRPC)
