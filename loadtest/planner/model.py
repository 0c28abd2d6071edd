"""The queueing model of the planner.

Every stage is a queue with Poisson arrivals. A gateway and a Redis server have one thread each: M/M/1. Every worker serves all
Redis servers, so the cores of all workers are one queue of c servers, which share their slots: programs on the same core slow
each other down (processor sharing), and a call waits only when every slot is busy (first come, first served). Mean waiting time
by Erlang's C formula; first-come-first-served waiting is multiplied by (1 + scv) / 2 (Allen and Cunneen). With s slots per
core, a call that has to wait for a core also has to wait for a slot with probability rho ** (c * (s - 1)). For one core this is
the formula of Avi-Itzhak and Halfin for limited processor sharing, which is exact for one slot and for infinitely many.
"""

import math
from bisect import bisect_left
from typing import NamedTuple

from msgspec import Struct

from exec_wire.queue.protocol import LEASE_S

THREAD_MOST = 0.6  # utilisation of gateways and Redis servers
FEWEST_WORKERS = 2  # so that one is left when a machine dies


class Check(Struct, frozen=True):
    """An open-loop run with everything on one machine, and what the model predicts for it."""

    calls_per_s: float
    mean_ms: float
    p99_ms: float
    predicted_mean_ms: float = 0.0
    predicted_p99_ms: float = 0.0


class Costs(Struct, frozen=True):
    """Measured by `python -m loadtest.planner --measure`."""

    about: dict[str, str]
    mix: str
    cores: int  # of the machine
    slots_per_core: float
    capacity_per_s: float  # calls/s with every slot busy, everything on one machine
    gateway_ms: float  # CPU time per call when many calls share a request (`loadtest.bench.path`)
    redis_ms: float
    worker_ms: float  # CPU time per call with every slot busy, one call per request; without its programs
    program_ms: float  # program and sandbox
    program_scv: float  # squared coefficient of variation: variance / mean²
    program_p99_ms: float
    unloaded_ms: float  # mean latency of one call at a time
    checks: list[Check] = []


class Fleet(NamedTuple):
    workers: int  # one per machine
    gateways: int
    redis_servers: int
    cores_per_worker: int


class Latency(NamedTuple):
    mean_ms: float  # infinite if a stage is overloaded
    p99_ms: float
    busy: float  # share of the workers' cores


class Unreachable(ValueError):
    """No cluster reaches the wanted latency; the message says why."""


def erlang_c(servers: int, load: float) -> float:
    """The probability that a call waits in M/M/c; `load` is arrival rate x service time."""
    if load >= servers:
        return 1.0
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def wait_ms(per_s: float, service_ms: float, servers: int = 1) -> float:
    """Mean waiting time in M/M/c."""
    load = per_s * service_ms / 1000
    return math.inf if load >= servers else erlang_c(servers, load) * service_ms / (servers - load)


def worker_waits_ms(per_s: float, service_ms: float, cores: int, slots_per_core: float, scv: float) -> tuple[float, float]:
    """Mean delay by sharing cores with other programs, and mean wait for a slot."""
    wait, busy = wait_ms(per_s, service_ms, cores), per_s * service_ms / 1000 / cores
    if math.isinf(wait):
        return wait, wait
    slots_full = busy ** (cores * (slots_per_core - 1))
    return wait * (1 - slots_full), wait * slots_full * (1 + scv) / 2


def latency(costs: Costs, per_s: float, fleet: Fleet) -> Latency:
    """Of a call, at `per_s` calls/s that are spread evenly over gateways and Redis servers."""
    path_ms = wait_ms(per_s / fleet.gateways, costs.gateway_ms) + wait_ms(per_s / fleet.redis_servers, costs.redis_ms)
    return _latency(costs, per_s, fleet.workers * fleet.cores_per_worker, costs.worker_ms + costs.program_ms, path_ms)


def latency_on_one_machine(costs: Costs, per_s: float) -> Latency:
    """Every stage and the load generator share the cores, as in the measurement of the costs."""
    return _latency(costs, per_s, costs.cores, 1000 * costs.cores / costs.capacity_per_s, 0.0)


def _latency(costs: Costs, per_s: float, cores: int, service_ms: float, path_ms: float) -> Latency:
    shared_ms, queued_ms = worker_waits_ms(per_s, service_ms, cores, costs.slots_per_core, costs.program_scv)
    # Sharing slows down a long program in proportion to its length.
    p99_ms = costs.unloaded_ms - costs.program_ms + costs.program_p99_ms * (1 + shared_ms / service_ms)
    mean_ms = costs.unloaded_ms + shared_ms
    return Latency(mean_ms + queued_ms + path_ms, p99_ms + queued_ms + path_ms, per_s * service_ms / 1000 / cores)


class Wanted(NamedTuple):
    calls_per_s: float
    mean_ms: float = math.inf
    p99_ms: float = math.inf
    cores_per_worker: int = 16

    def met(self, found: Latency) -> bool:
        return found.mean_ms <= self.mean_ms and found.p99_ms <= self.p99_ms and found.busy < 1


class Plan(NamedTuple):
    wanted: Wanted
    fleet: Fleet
    latency: Latency
    redis_busy: float
    # When one worker's machine dies:
    restarted: int  # calls, started again elsewhere when their leases expire
    restarted_ms: float  # their mean latency
    after_death: Latency  # of the other calls


def plan(costs: Costs, wanted: Wanted) -> Plan:
    """The smallest cluster with the wanted latency."""
    gateways, redis_servers = (
        max(1, math.ceil(wanted.calls_per_s * cost_ms / 1000 / THREAD_MOST)) for cost_ms in (costs.gateway_ms, costs.redis_ms)
    )

    def fleet(workers: int) -> Fleet:
        return Fleet(workers, gateways, redis_servers, wanted.cores_per_worker)

    def good(workers: int) -> bool:
        return wanted.met(latency(costs, wanted.calls_per_s, fleet(workers)))

    work_ms = wanted.calls_per_s * (costs.worker_ms + costs.program_ms)
    most = FEWEST_WORKERS + math.ceil(work_ms / 100)  # each core at most 10 % busy
    best = latency(costs, wanted.calls_per_s, fleet(most))
    if not wanted.met(best):
        words = f"an unloaded call of the {costs.mix} mix has a mean latency of {best.mean_ms:.0f} ms and a p99 of "
        raise Unreachable(f"no cluster reaches this latency: {words}{best.p99_ms:.0f} ms")
    workers = FEWEST_WORKERS + bisect_left(range(FEWEST_WORKERS, most), True, key=good)
    return _planned(costs, wanted, fleet(workers))


def _planned(costs: Costs, wanted: Wanted, fleet: Fleet) -> Plan:
    found = latency(costs, wanted.calls_per_s, fleet)
    redis_busy = wanted.calls_per_s * costs.redis_ms / 1000 / fleet.redis_servers
    in_worker = wanted.calls_per_s * (found.mean_ms - costs.unloaded_ms + costs.program_ms) / 1000 / fleet.workers
    after = latency(costs, wanted.calls_per_s, fleet._replace(workers=fleet.workers - 1))
    again_ms = 1000 * LEASE_S + (after.mean_ms if math.isfinite(after.mean_ms) else found.mean_ms)
    return Plan(wanted, fleet, found, redis_busy, max(1, round(in_worker)), again_ms, after)
