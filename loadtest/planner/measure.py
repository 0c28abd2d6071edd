"""Measures the costs of the planner: a Redis server, a gateway, a worker and the load on this machine.

First the path in large batches without programs, then one call at a time (unloaded), then every slot busy (saturated), with the
CPU time of each stage. Last a check: calls at random times at half the capacity, beside what the model predicts.
"""

import contextlib
import http.client
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean, pvariance
from typing import NamedTuple

import msgspec

from exec_wire import Result
from loadtest.bench import path
from loadtest.planner.model import Check, Costs, latency_on_one_machine
from loadtest.support import meter, redis_server, results
from loadtest.support.processes import Part
from loadtest.support.redis_server import RedisServer
from loadtest.support.results import percentile
from loadtest.support.workload import Program, calls
from worker.config import default_slots, usable_cores

MODULE = "loadtest.planner"
PATH, PATH_SLOTS = path.Shape(calls=20_000, batch=500, connections=8, code_bytes=300), 512
SATURATED = 2  # calls in flight per slot
CHECK_LOAD, CHECK_THREADS = 0.5, 64
DEADLINE_S, OTHERS_MOST = 120.0, 0.05
SEED = 11


class Landed(NamedTuple):
    latency_ms: float  # from when the call was due
    cpu_ms: float  # of the program, by the kernel's count


@contextlib.contextmanager
def cluster() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """The address of the gateway, and a function for the CPU time by stage."""
    with RedisServer() as redis, Part.gateway(redis.url) as gateway, Part.worker(redis.url, min_tier="D") as worker:
        gateway.wait_for_workers(1)
        stages = {"gateway": [gateway.pid], "redis": [redis.pid], "worker": [worker.pid]}
        yield gateway.url, lambda: meter.stages_s({**stages, "program": [*meter.tree(worker.pid)][1:]})


def send(url: str, programs: list[Program], connections: int, due_s: list[float] | None = None) -> list[Landed]:
    """One call per request. `due_s`: when each call is sent, from the start; by default as soon as a connection is free."""
    own, began = threading.local(), time.perf_counter()

    def connect() -> None:
        own.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_S)

    def run(index: int) -> Landed:
        program, due = programs[index], time.perf_counter()
        if due_s is not None:
            due = began + due_s[index]
            time.sleep(max(0.0, due - time.perf_counter()))
        limits = {"wall_s": program.wall_s}
        body = {"code": program.code, "stdin": program.stdin, "limits": limits, "deadline_s": DEADLINE_S}
        own.connection.request("POST", "/v1/run", msgspec.json.encode(body), {"content-type": "application/json"})
        result = msgspec.json.decode(own.connection.getresponse().read(), type=Result)
        if result.blame == "infra" and result.status != "timeout":
            raise RuntimeError(f"a call failed, so its latency says nothing: {result.status}: {result.error}")
        return Landed(1000 * (time.perf_counter() - due), 1000 * result.usage.cpu_s)

    with ThreadPoolExecutor(connections, initializer=connect) as threads:
        return list(threads.map(run, range(len(programs))))


def measure(mix: str, count: int, argv: list[str] | None) -> Costs:
    about = results.about(MODULE, argv, server=redis_server.version())
    programs, cores, slots = calls(count, SEED, mix), usable_cores(), default_slots()
    say("the path in batches")
    with path.cluster(1, PATH_SLOTS) as (url, stages):
        path_us = path.measure(url, stages, PATH, 0).cpu_us
    with cluster() as (url, used):
        say("warming up")
        send(url, programs[:60], SATURATED * slots)
        say(f"{count} programs, one at a time")
        unloaded = send(url, programs, 1)
        say(f"{count} programs with every slot busy")
        busy, before, own_s, began = meter.machine_busy_s(), used(), time.process_time(), time.perf_counter()
        saturated = send(url, programs, SATURATED * slots)
        wall_s = time.perf_counter() - began
        used_s = {name: value - before[name] for name, value in used().items()}
        used_s["load"] = time.process_time() - own_s
        others = meter.others_share(busy, sum(used_s.values()), wall_s)
        about["others"] = f"{100 * others:.0f} % of the cores"
        if others > OTHERS_MOST:
            say(f"other processes used {about['others']}: measure again on an idle machine")
        ours_s = cores * wall_s * max(0.05, 1 - others)
        # The stages share all CPU time that is left to them; what no process is charged for is spread over all stages.
        scale = 1000 * ours_s / sum(used_s.values()) / count
        program_ms = [landed.cpu_ms for landed in saturated]
        costs = Costs(
            about,
            mix,
            cores,
            round(slots / cores, 2),
            round(count * cores / ours_s, 1),
            round(path_us["gateway"] / 1000, 4),
            round(path_us["redis"] / 1000, 4),
            round(scale * used_s["worker"], 4),
            round(scale * used_s["program"], 4),
            program_scv=round(pvariance(program_ms) / fmean(program_ms) ** 2, 3),
            program_p99_ms=round(percentile(program_ms, 0.99), 2),
            unloaded_ms=round(fmean(landed.latency_ms for landed in unloaded), 2),
        )
        return msgspec.structs.replace(costs, checks=[check(url, costs, programs)])


def check(url: str, costs: Costs, programs: list[Program]) -> Check:
    per_s, chance = CHECK_LOAD * costs.capacity_per_s, random.Random(SEED)
    say(f"check: {per_s:.0f} calls/s at random times")
    due_s, at_s = [], 0.0
    for _ in programs:
        at_s += chance.expovariate(per_s)
        due_s.append(at_s)
    found = [landed.latency_ms for landed in send(url, chance.sample(programs, len(programs)), CHECK_THREADS, due_s)]
    predicted = latency_on_one_machine(costs, per_s)
    measured = round(fmean(found), 1), round(percentile(found, 0.99), 1)
    return Check(round(per_s, 1), *measured, round(predicted.mean_ms, 1), round(predicted.p99_ms, 1))


def say(words: str) -> None:
    print(f"planner: {words}", file=sys.stderr, flush=True)
