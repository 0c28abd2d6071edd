"""The planner's formula against known results of queueing theory and measured runs, and its answers."""

import math
from pathlib import Path

import msgspec
import pytest

from loadtest.planner.__main__ import COSTS, main
from loadtest.planner.model import (
    Costs,
    Fleet,
    Unreachable,
    Wanted,
    erlang_c,
    latency,
    latency_on_one_machine,
    plan,
    wait_ms,
    worker_waits_ms,
)
from loadtest.support.results import EXIT_USAGE

COST = msgspec.json.decode(COSTS.read_bytes(), type=Costs)


@pytest.mark.parametrize(
    ("servers", "load", "waits"),
    [(1, 0.7, 0.7), (2, 1.0, 1 / 3), (2, 1.5, 0.642857), (3, 2.0, 0.444444), (10, 8.0, 0.409180), (5, 5.0, 1.0)],
)
def test_probability_of_waiting_is_erlangs(servers: int, load: float, waits: float) -> None:
    assert erlang_c(servers, load) == pytest.approx(waits, abs=1e-5)


def test_waiting_time_is_that_of_mm1_and_mmc() -> None:
    assert wait_ms(80, 10) == pytest.approx(0.8 / 0.2 * 10)
    assert wait_ms(100, 10, 2) == pytest.approx(10 * 1 / 3)
    assert math.isinf(wait_ms(100, 10))


@pytest.mark.parametrize("scv", [0.0, 1.0, 4.0])
def test_one_core_with_one_slot_is_pollaczek_khinchine_and_with_many_is_processor_sharing(scv: float) -> None:
    shared, queued = worker_waits_ms(80, 10, 1, 1, scv)
    assert (shared, queued) == (0.0, pytest.approx(0.8 / 0.2 * 10 * (1 + scv) / 2))
    shared, queued = worker_waits_ms(80, 10, 1, 1000, scv)
    assert shared == pytest.approx(10 / 0.2 - 10) and queued == pytest.approx(0.0, abs=1e-9)


def test_formula_is_within_a_fifth_of_the_measured_runs_up_to_75_percent_load() -> None:
    runs = [run for run in COST.checks if run.calls_per_s <= 0.75 * COST.capacity_per_s]
    assert len(runs) >= 3
    for run in runs:
        predicted = latency_on_one_machine(COST, run.calls_per_s)
        assert predicted.mean_ms == pytest.approx(run.mean_ms, rel=0.2)
        assert predicted.p99_ms == pytest.approx(run.p99_ms, rel=0.2)


@pytest.mark.parametrize("per_s", [10, 1500, 20_000, 150_000])
def test_plan_is_the_smallest_fleet_that_reaches_the_wanted_latency(per_s: float) -> None:
    wanted = Wanted(per_s, p99_ms=150)
    found = plan(COST, wanted)
    assert found.latency.p99_ms <= 150 and found.latency.busy < 1 and found.redis_busy <= 0.6
    fewer = found.fleet._replace(workers=found.fleet.workers - 1)
    assert fewer.workers < max(2, fewer.redis_servers) or not wanted.met(latency(COST, per_s, fewer))


def test_a_tighter_latency_needs_more_machines() -> None:
    loose, tight = (plan(COST, Wanted(150_000, mean_ms=mean_ms)).fleet for mean_ms in (300, 12.5))
    assert loose.workers < tight.workers and loose.redis_servers == tight.redis_servers > 1


def test_a_dead_machine_costs_its_calls_one_lease_and_the_others_its_cores() -> None:
    found = plan(COST, Wanted(20_000, p99_ms=150))
    assert found.restarted >= 1 and 6000 < found.restarted_ms < 7000
    assert found.after_death.busy == pytest.approx(found.latency.busy * found.fleet.workers / (found.fleet.workers - 1))
    assert found.after_death.mean_ms > found.latency.mean_ms
    assert math.isinf(latency(COST, 20_000, Fleet(10, 5, 1, 16)).mean_ms)  # too few for the load


def test_workers_of_several_redis_servers_are_one_pool() -> None:
    fleet = plan(COST, Wanted(150_000, mean_ms=300)).fleet
    faster = msgspec.structs.replace(COST, redis_ms=COST.redis_ms / fleet.redis_servers)
    with_one = latency(faster, 150_000, fleet._replace(redis_servers=1))
    assert fleet.redis_servers > 1
    assert latency(COST, 150_000, fleet).mean_ms == pytest.approx(with_one.mean_ms, abs=0.1)


def test_what_no_fleet_can_reach_is_refused() -> None:
    with pytest.raises(Unreachable, match="no cluster reaches this latency: an unloaded call"):
        plan(COST, Wanted(10, mean_ms=1))


def test_command_answers_for_a_rate_and_for_calls_in_flight(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--calls-per-s", "1500", "--p99-ms", "200"]) == 0
    assert "cluster  2 workers of 16 cores, 1 gateways" in capsys.readouterr().out
    assert main(["--in-flight", "45000", "--mean-ms", "300"]) == 0
    assert "load     150,000 calls/s" in capsys.readouterr().out


def test_command_refuses_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--calls-per-s", "10", "--mean-ms", "1"]) == EXIT_USAGE
    assert main(["--calls-per-s", "10", "--mean-ms", "90", "--costs", str(tmp_path / "none")]) == EXIT_USAGE
    for wrong in (["--calls-per-s", "10"], ["--in-flight", "10", "--p99-ms", "5"], ["--calls-per-s", "-1", "--p99-ms", "5"]):
        with pytest.raises(SystemExit):
            main(wrong)
    assert "must be greater than 0" in capsys.readouterr().err
