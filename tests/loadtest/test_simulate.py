"""The simulation gives what queueing theory knows, and a machine that dies loses nothing but time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from statistics import fmean

import pytest

from exec_wire.queue.protocol import LEASE_S
from loadtest.simulate import Cost, Costs, Demand, Shape, closed_loop, open_loop

pytestmark = pytest.mark.slow
CALLS = 40_000
FREE = Costs()


def arrivals(per_s: float, work_s: Callable[[random.Random], float], calls: int = CALLS) -> Iterator[tuple[float, Demand]]:
    chance, at_s = random.Random(5), 0.0
    for _ in range(calls):
        at_s += chance.expovariate(per_s)
        yield at_s, Demand(work_s(chance))


def mean_stay_s(shape: Shape, per_s: float, work_s: Callable[[random.Random], float]) -> float:
    return fmean(visit.latency_s for visit in open_loop(shape, FREE, arrivals(per_s, work_s)).visits)


def erlang_c(servers: int, load: float) -> float:
    """The chance to wait, with `load` servers busy on average."""
    full = load**servers / math.factorial(servers) / (1 - load / servers)
    return full / (sum(load**n / math.factorial(n) for n in range(servers)) + full)


def m_d_c_stay_s(servers: int, per_s: float) -> float:
    """With work of one second, by Crommelin: after one second whoever was served has left, and Poisson many have come."""
    most = 60
    come = [math.exp(-per_s) * per_s**n / math.factorial(n) for n in range(20)]
    share = [1.0] + [0.0] * most
    for _ in range(150):
        after = [0.0] * (most + 1)
        for there, chance in enumerate(share):
            for more, likely in enumerate(come):
                after[min(most, max(0, there - servers) + more)] += chance * likely
        share = after
    return sum(n * chance for n, chance in enumerate(share)) / per_s


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_server_with_exponential_work_is_m_m_1(load: float) -> None:
    found = mean_stay_s(Shape(), load, lambda chance: chance.expovariate(1.0))
    assert found == pytest.approx(1 / (1 - load), rel=0.06)


def test_several_servers_with_exponential_work_are_m_m_c() -> None:
    found = mean_stay_s(Shape(workers=2, slots=2, cores=2), 3.2, lambda chance: chance.expovariate(1.0))
    assert found == pytest.approx(1 + erlang_c(4, 3.2) / (4 - 3.2), rel=0.05)


@pytest.mark.parametrize(("servers", "per_s"), [(1, 0.7), (3, 2.4)])
def test_constant_work_is_m_d_c(servers: int, per_s: float) -> None:
    found = mean_stay_s(Shape(workers=servers), per_s, lambda _: 1.0)
    assert found == pytest.approx(m_d_c_stay_s(servers, per_s), rel=0.03)


def test_slots_beyond_the_cores_share_them_evenly() -> None:
    """M/G/1 with processor sharing: only the mean of the work counts."""
    found = mean_stay_s(Shape(slots=500), 0.6, lambda chance: 0.5 if chance.random() < 0.75 else 2.5)
    assert found == pytest.approx(1 / (1 - 0.6), rel=0.04)


def test_everything_costs_more_on_a_machine_that_was_idle() -> None:
    costs = Costs(gateway=Cost(call_s=0.01, cold=3.0), program_cold=2.0)
    calls = [(10.0 * n, Demand(0.01)) for n in range(50)]
    lonely = open_loop(Shape(together=True), costs, calls).visits
    assert fmean(visit.latency_s for visit in lonely) == pytest.approx(3 * 0.01 + 2 * 0.01, rel=0.2)
    busy = closed_loop(Shape(slots=4, together=True), costs, [Demand(0.01)] * 2000, 8)
    assert busy.pace == pytest.approx(1 / (0.01 + 0.01), rel=0.02)


def test_event_loops_come_before_programs_after_one_turn() -> None:
    """Ten programs that never rest on one core: each turn of an event loop costs its own work and the wait for its turn."""
    hogs = [(0.0, Demand(100.0)) for _ in range(10)]
    costs, shape = Costs(gateway=Cost(call_s=0.02)), Shape(slots=12, together=True, turn_s=0.001)
    *_, last = open_loop(shape, costs, [*hogs, (10.0, Demand(0.0))]).visits
    assert last.latency_s == pytest.approx(2 * (0.01 + 0.001) + 10 * 0.001, rel=0.05)  # and its program's own turn, behind ten


def test_what_is_cleaned_up_aside_delays_the_next_calls_but_not_its_own_answer() -> None:
    costs = Costs(aside=0.25)
    (lonely,) = open_loop(Shape(), costs, [(0.0, Demand(1.0))]).visits
    assert lonely.latency_s == pytest.approx(0.75)
    assert closed_loop(Shape(slots=4), costs, [Demand(1.0)] * 100, 8).took_s == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize(("gateways", "per_s"), [(1, 100), (2, 200)])
def test_pace_is_limited_by_the_slowest_thread(gateways: int, per_s: float) -> None:
    costs = Costs(gateway=Cost(call_s=0.01), redis=Cost(call_s=0.002), worker=Cost(call_s=0.001))
    found = closed_loop(Shape(workers=2, slots=50, cores=50, gateways=gateways), costs, [Demand(0.02)] * 2000, 300)
    assert found.pace == pytest.approx(per_s, rel=0.05)


def test_what_waits_for_a_thread_shares_its_wake_up() -> None:
    shape, costs = Shape(slots=200, cores=200), Costs(gateway=Cost(wake_s=0.005, call_s=0.001))
    lonely, many = (closed_loop(shape, costs, [Demand(0.001)] * 500, in_flight) for in_flight in (1, 100))
    assert lonely.pace == pytest.approx(1 / 0.012, rel=0.01)
    assert many.pace > 700


def test_a_machine_that_dies_costs_its_calls_one_lease() -> None:
    calls = [(n / 100, Demand(0.1)) for n in range(2000)]
    visits = open_loop(Shape(workers=4, slots=8, cores=8), FREE, calls, death_s=10.0).visits
    again = [visit for visit in visits if visit.starts > 1]
    assert all(not math.isnan(visit.ended_s) for visit in visits)
    assert 1 <= len(again) <= 8
    assert all(LEASE_S < visit.latency_s < LEASE_S + 1 for visit in again)
    assert max(visit.latency_s for visit in visits if visit.starts == 1) < 0.5
