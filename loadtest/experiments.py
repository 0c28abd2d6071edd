"""Two experiments of the report: what more workers bring, and what a worker that is killed costs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median

from msgspec import Struct

from exec_wire.queue.protocol import LEASE_S
from loadtest import facts, path
from loadtest.open_loop import Order, drive, poisson
from loadtest.parts import Part
from loadtest.redis_server import RedisServer
from loadtest.results import Spread, percentile
from loadtest.workload import calls
from worker.config import usable_cores

Say = Callable[[str], None]

# -- scaling ------------------------------------------------------------------------------------------------------------------

SLEEP_MS, SLEEP_SLOTS, SLEEP_S = 50.0, 16, 3.0
SLEEPING_WORKERS = (1, 2, 4, 8)
SANDBOX_CALLS = 300
SCALING_REPEATS = 3


class Step(Struct, frozen=True):
    """So many workers (or slots), and the calls/s of each repeat."""

    count: int
    ideal_per_s: float
    paces: list[float]

    @property
    def spread(self) -> Spread:
        return Spread.of(self.paces)


class Scaling(Struct, frozen=True):
    started: str
    commit: str
    command: str
    machine: dict[str, str]
    sleeping: list[Step]  # workers that take 50 ms for a call and no CPU: the path, as if they were elsewhere
    sandboxed: list[Step]  # slots of one worker, rollout mix


def scaling(command: str, say: Say) -> Scaling:
    sleeping = []
    for workers in SLEEPING_WORKERS:
        say(f"{workers} workers that take {SLEEP_MS:g} ms and no CPU")
        sleeping.append(_sleeping(workers))
    sandboxed: list[Step] = []
    for slots in range(1, usable_cores() + 1):
        say(f"one worker with sandboxes, {slots} slots")
        sandboxed.append(_sandboxed(slots, sandboxed[0].spread.median if sandboxed else 0.0))
    return Scaling(facts.now(), facts.commit(), command, facts.machine(), sleeping, sandboxed)


def _sleeping(workers: int) -> Step:
    ideal_per_s = workers * SLEEP_SLOTS * 1000 / SLEEP_MS
    with RedisServer() as redis, Part.gateway(redis.url) as gateway, contextlib.ExitStack() as stack:
        parts = [Part.echo(redis.url, SLEEP_SLOTS, echo_ms=SLEEP_MS) for _ in range(workers)]
        for part in parts:
            stack.enter_context(part)
        gateway.wait_for_workers(workers)
        shape = path.Shape(int(ideal_per_s * SLEEP_S), batch=16 * workers, connections=8, code_bytes=200)
        path.make_load(gateway.url, path.bodies(shape._replace(calls=shape.calls // 5), 0), shape.connections)
        paces = []
        for repeat in range(1, SCALING_REPEATS + 1):
            wall_s, wrong, _ = path.make_load(gateway.url, path.bodies(shape, repeat), shape.connections)
            if wrong:
                raise RuntimeError(f"{wrong} wrong results")
            paces.append(round(shape.calls / wall_s, 1))
    return Step(workers, ideal_per_s, paces)


def _sandboxed(slots: int, of_one: float) -> Step:
    with (
        RedisServer() as redis,
        Part.gateway(redis.url) as gateway,
        Part.worker(redis.url, slots=slots, min_tier="D"),
    ):
        gateway.wait_for_workers(1)
        drive(Order(gateway.url, calls(40, 1, "rollout"), in_flight=2 * slots))
        orders = [
            Order(gateway.url, calls(SANDBOX_CALLS, 2 + n, "rollout"), in_flight=2 * slots) for n in range(SCALING_REPEATS)
        ]
        paces = [round(drive(order).calls_per_s, 1) for order in orders]
    return Step(slots, round((of_one or median(paces)) * slots, 1), paces)


# -- recovery -----------------------------------------------------------------------------------------------------------------

KILL_AT_S, REPLACE_AT_S, RECOVERY_S = 8.0, 18.0, 30.0
RECOVERY_LOAD = 0.35  # of two workers: one alone can carry it
RECOVERY_REPEATS = 2
BUSY_WITHIN_S = 3.0
UNUSUAL = 4.0  # times the median before the kill


class Recovered(Struct, frozen=True):
    """One kill under an open-loop load. Times from the load's beginning."""

    per_s: float
    due_s: list[float]
    latency_s: list[float]
    killed_s: float
    replaced_s: float
    wrong: int  # not answered, or by our fault
    slow: int  # calls that took longer than a lease: those that the worker had
    p50_before_s: float
    p99_before_s: float
    most_s: float
    usual_again_s: float  # after the kill: from then on no call took unusually long


class Recovery(Struct, frozen=True):
    started: str
    commit: str
    command: str
    machine: dict[str, str]
    runs: list[Recovered]


def recovery(command: str, say: Say) -> Recovery:
    runs = []
    for repeat in range(RECOVERY_REPEATS):
        say(f"a worker is killed under load, {repeat + 1} of {RECOVERY_REPEATS}")
        runs.append(_recovered(repeat))
    return Recovery(facts.now(), facts.commit(), command, facts.machine(), runs)


def _recovered(repeat: int) -> Recovered:
    with RedisServer() as redis, Part.gateway(redis.url) as gateway, contextlib.ExitStack() as stack:
        workers = [Part.worker(redis.url, slots=1, min_tier="D") for _ in range(2)]
        for worker in workers:
            stack.enter_context(worker)
        gateway.wait_for_workers(2)
        capacity = drive(Order(gateway.url, calls(150, 1, "rollout"), in_flight=4)).calls_per_s
        per_s = RECOVERY_LOAD * capacity
        programs = calls(int(per_s * RECOVERY_S), 20 + repeat, "rollout")
        with _killing(workers[0], redis.url) as moments:
            began = time.monotonic()
            report = drive(Order(gateway.url, programs, poisson(per_s, len(programs), 20 + repeat)))
            began_s = time.monotonic() - report.wall_s - began  # the load's process takes a moment to start
        killed_s, replaced_s = (moment - began - began_s for moment in moments)
    landed = report.landed
    before = [one.latency_s for one in landed if one.due_s < killed_s - 1]
    usual_s = UNUSUAL * percentile(before, 0.5)
    strange = [
        one.due_s + one.latency_s for one in landed if one.due_s > killed_s - 2 and one.latency_s > max(usual_s, LEASE_S / 2)
    ]
    return Recovered(
        round(per_s, 1),
        [round(one.due_s, 3) for one in landed],
        [round(one.latency_s, 4) for one in landed],
        round(killed_s, 2),
        round(replaced_s, 2),
        sum(one.blame == "infra" for one in landed),
        sum(one.latency_s > LEASE_S / 2 for one in landed),
        round(percentile(before, 0.5), 4),
        round(percentile(before, 0.99), 4),
        round(max(one.latency_s for one in landed), 3),
        round(max(0.0, max(strange, default=killed_s) - killed_s), 2),
    )


@contextlib.contextmanager
def _killing(worker: Part, redis: str) -> Iterator[list[float]]:
    """Kills it after a while, and starts another one later. Gives the moments of both."""
    moments: list[float] = []
    made: list[Part] = []

    def work() -> None:
        time.sleep(KILL_AT_S)
        give_up = time.monotonic() + BUSY_WITHIN_S
        while not worker.metrics()["exec_worker_busy"] and time.monotonic() < give_up:
            time.sleep(0.02)  # one that has nothing would cost nobody anything
        worker.kill()
        moments.append(time.monotonic())
        time.sleep(REPLACE_AT_S - KILL_AT_S)
        made.append(Part.worker(redis, slots=1, min_tier="D"))
        made[0].wait_ready()
        moments.append(time.monotonic())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield moments
    finally:
        thread.join()
        for part in made:
            part.close()
