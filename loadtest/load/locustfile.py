"""Users for locust, of our client and of the adapters: `make load`, or `locust -f loadtest/load/locustfile.py --help`.

Batches and streams run programs of a mix; every user checks how each program ended. Besides the requests, locust's statistics
have a row for the time of each stage of our own calls (`queue`, `start`, `run`) and for the number of results of each blame
(`none`, `model`, `infra`). These rows are not in the total, which counts calls and requests.

All users of a process share one client, as the tasks of a trainer do: their calls share requests.
"""

import functools
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import gevent
import uvloop
from gevent.event import AsyncResult
from gevent.monkey import get_original
from locust import FastHttpUser, User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from exec_client import AsyncClient, Call, ExecError, Limits, Result, Test
from exec_wire import Timings
from loadtest.support.workload import MIXES, STATUS_OF_KIND, Program, calls

T = TypeVar("T")

PROGRAMS = 400  # of one user, which repeats them
DEADLINE_S = 120.0
CELLS = 5
SQUARES = "n = int(input())\nprint(sum(k * k for k in range(n + 1)))\n"
ANSWERS = [("The answer is \\boxed{\\frac{2}{4}}.", "1/2"), ("So x = 0.5", "0.5"), ("\\boxed{x^2+2x+1}", "(x+1)^2")]


logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    ours = parser.add_argument_group("exec-service")
    ours.add_argument("--mix", choices=[*MIXES], default="rollout", help="of programs")
    ours.add_argument(
        "--shape",
        choices=("steady", "step", "burst"),
        default="steady",
        help="step: all users send at the same moment, then pause; burst: see burst_users.py",
    )
    ours.add_argument("--step-seconds", type=float, default=10.0, help="from one step to the next")
    ours.add_argument("--calls", type=int, default=16, help="of a batch")


class Wrong(Exception):
    """The response is not the expected one."""


# -- users of our client ------------------------------------------------------------------------------------------------------


class Bridge:
    """Our client, on an event loop in a thread of its own.

    gevent, which locust uses, replaces threads and selectors, and asyncio does not run on its replacements. This class uses an
    original thread, and uvloop, which needs no selector. It is made on first use, after locust has forked.
    """

    def __init__(self, url: str) -> None:
        self._loop = uvloop.new_event_loop()
        get_original("_thread", "start_new_thread")(self._loop.run_forever, ())
        self.client = self.do(self._open(url))

    async def _open(self, url: str) -> AsyncClient:
        return await AsyncClient(url).__aenter__()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        hub, landed = gevent.get_hub(), AsyncResult()

        async def run() -> None:
            try:
                outcome, error = await work, None
            except Exception as raised:  # raised again in the greenlet that waits
                outcome, error = None, raised
            hub.loop.run_callback_threadsafe(landed.set, (outcome, error))

        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(run()))
        outcome, error = landed.get()
        if error is not None:
            raise error
        return outcome  # type: ignore[no-any-return]


bridge_to = functools.cache(Bridge)


class Paced:
    """A user sends again at once, or with the next step, which is the same moment for all users."""

    environment: Environment
    _numbers: ClassVar[Iterator[int]] = itertools.count(1)

    def on_start(self) -> None:
        assert self.environment.parsed_options is not None
        self.options = self.environment.parsed_options
        self.programs = itertools.cycle(calls(PROGRAMS, next(self._numbers), self.options.mix))

    def wait_time(self) -> float:
        step_s = self.options.step_seconds
        return step_s - time.time() % step_s if self.options.shape == "step" else 0.0


class ClientUser(Paced, User):
    abstract = True

    def on_start(self) -> None:
        super().on_start()
        assert self.host
        self.bridge = bridge_to(self.host)
        self.client = self.bridge.client

    def next_programs(self) -> list[Program]:
        return list(itertools.islice(self.programs, self.options.calls))

    def fire(self, what: str, name: str, latency_s: float, error: Exception | None = None, size: int = 0) -> None:
        self.environment.events.request.fire(
            request_type=what,
            name=name,
            response_time=1000 * latency_s,
            response_length=size,
            exception=error,
            context={},
        )

    def stages(self, blame: str, times: Timings) -> None:
        """Log rows of their own: a fired request would be in the total."""
        stats = self.environment.stats
        for stage in ("queue", "start", "run"):
            stats.get(stage, "stage").log(int(getattr(times, f"{stage}_ms")), 0)
        stats.get(blame, "blame").log(int(times.total_ms), 0)

    def log(self, what: str, program: Program, latency_s: float, outcome: Result | ExecError) -> None:
        if isinstance(outcome, ExecError):
            self.fire(what, program.kind, latency_s, outcome)
            return
        self.stages(outcome.blame, outcome.timings)
        self.fire(what, program.kind, latency_s, wrong_end(program, outcome.status), len(outcome.stdout))

    def timed(self, what: str, name: str, work: Coroutine[Any, Any, T], right: Callable[[T], bool]) -> T | None:
        """Time one request that is not a batch."""
        began = time.perf_counter()
        outcome: T | None = None
        error: Exception | None
        try:
            outcome = self.bridge.do(work)
            error = None if right(outcome) else Wrong(str(outcome)[:300])
        except ExecError as raised:
            error = raised
        self.fire(what, name, time.perf_counter() - began, error)
        return outcome


def wrong_end(program: Program, status: str) -> Wrong | None:
    expected = STATUS_OF_KIND.get(program.kind, "ok")
    return None if status == expected else Wrong(f"{program.name}: {status} instead of {expected}")


def as_calls(programs: Iterable[Program], deadline_s: float = DEADLINE_S, tenant: str = "load") -> list[Call]:
    return [
        Call(one.code, stdin=one.stdin, limits=Limits(wall_s=one.wall_s), deadline_s=deadline_s, tenant=tenant)
        for one in programs
    ]


class BatchUser(ClientUser):
    """Waits for all results of a batch, as a trainer does after a turn."""

    @task
    def batch(self) -> None:
        programs, began = self.next_programs(), time.perf_counter()
        outcomes = self.bridge.do(self.client.run_many(as_calls(programs), return_exceptions=True))
        latency_s = time.perf_counter() - began
        for program, outcome in zip(programs, outcomes, strict=True):
            self.log("batch", program, latency_s, outcome)


class StreamUser(ClientUser):
    """Reads each result as it arrives."""

    @task
    def stream(self) -> None:
        programs = self.next_programs()
        for index, latency_s, outcome in self.bridge.do(collect(self.client, as_calls(programs))):
            self.log("stream", programs[index], latency_s, outcome)


async def collect(client: AsyncClient, calls: list[Call]) -> list[tuple[int, float, Result | ExecError]]:
    """The index, the latency and the outcome of each call, in the order of their arrival."""
    began = time.perf_counter()
    arrivals = client.as_completed(calls, return_exceptions=True)
    return [(outcome.index, time.perf_counter() - began, outcome) async for outcome in arrivals]


class JudgeUser(ClientUser):
    @task
    def judge(self) -> None:
        tests = [Test(str(n), f"{n * (n + 1) * (2 * n + 1) // 6}\n") for n in range(1, 6)]
        work = self.client.judge(SQUARES, tests, deadline_s=DEADLINE_S)
        self.timed("judge", f"{len(tests)} tests", work, lambda judgement: judgement.verdict == "AC")


class VerifyUser(ClientUser):
    @task
    def verify(self) -> None:
        answer, truth = ANSWERS[next(self._numbers) % len(ANSWERS)]
        found = self.timed("verify", "math", self.client.verify(answer, truth), lambda one: one.equal is True)
        if found is not None:
            self.stages(found.blame, found.timings)


class SessionUser(ClientUser):
    """A rollout of a few turns, each of which needs the state of the turn before."""

    @task
    def rollout(self) -> None:
        self.timed("session", f"{CELLS} cells", self._rollout(), lambda value: value == str(CELLS))

    async def _rollout(self) -> str | None:
        async with self.client.session(tenant="load") as session:
            await session.run("x = 0")
            for _ in range(CELLS - 1):
                await session.run("x += 1")
            return (await session.run("x + 1")).value


# -- users of the adapters ----------------------------------------------------------------------------------------------------

NUMBER, SUM = "10", "385"  # what `SQUARES` reads and prints
TOOL = {"name": "python", "arguments": {"code": SQUARES, "input": NUMBER}}
BODIES: dict[str, dict[str, Any]] = {
    "/run/long-batch": {"submissions": [{"type": "python", "solution": SQUARES, "input": NUMBER}]},
    "/run_code": {"code": SQUARES, "language": "python", "stdin": NUMBER},
    "/execute": {"generated_code": SQUARES, "language": "python", "std_input": NUMBER},
    "/api/v2/execute": {"language": "python", "version": "*", "files": [{"content": SQUARES}], "stdin": NUMBER},
    "/mcp": {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": TOOL},
}


class AdapterUser(Paced, FastHttpUser):
    """The users of a process send one program to the adapters in turn."""

    connection_timeout = network_timeout = DEADLINE_S
    weight = len(BODIES)
    headers: ClassVar = {"accept": "application/json, text/event-stream", "mcp-protocol-version": "2025-06-18"}
    paths: ClassVar[Iterator[str]] = itertools.cycle(BODIES)

    @task
    def run_program(self) -> None:
        path = next(self.paths)
        with self.client.post(path, json=BODIES[path], headers=self.headers, catch_response=True) as answer:
            if answer.status_code != 200 or SUM not in (answer.text or ""):
                answer.failure(f"{answer.status_code}: {(answer.text or '')[:300]}")
