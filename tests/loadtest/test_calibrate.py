"""What a calibration knows of a program, and of the machine's speed."""

from __future__ import annotations

import msgspec
import pytest
from test_performance import calibration

from loadtest.calibrate import Calibration, Samples, population, predict
from loadtest.open_loop import Landed, Look, Report
from loadtest.workload import Program


def calibrated() -> Calibration:
    made = calibration()
    made.programs = {
        "std/sum#0": Samples("std", [5.0], 0.0, own_ms=4.0),
        "std/sum#1": Samples("std", [7.0], 2.0, own_ms=6.0),
        "std/sort#2": Samples("std", [50.0], 0.0, own_ms=40.0),
    }
    return made


def cpu_ms(*names: str) -> set[float]:
    programs = [Program("std", "", name=name) for name in names for _ in range(50)]
    return {round(1000 * demand.cpu_s, 3) for demand in calibrated().demands(programs)}


def test_a_calibrated_program_costs_what_it_cost_and_another_what_those_alike_did() -> None:
    assert cpu_ms("sum#1") == {7.0}
    assert cpu_ms("sum") == {5.0, 7.0}
    assert cpu_ms("unheard of") == {5.0, 7.0, 50.0}


def test_a_kind_that_was_not_calibrated_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"no sympy program was calibrated: run `python -m loadtest\.calibrate`"):
        calibrated().demands([Program("sympy", "", name="solve")])


def landed(name: str, due_s: float, cpu_ms: float) -> Landed:
    return Landed(name, "std", due_s, 0.1, "ok", "none", cpu_ms=cpu_ms)


def test_the_machines_speed_is_that_of_the_other_programs_around_each_call() -> None:
    """Half as fast from the tenth second on, but for a moment between."""
    calls = [landed("sum#0", at_s / 10, 4.0 if at_s < 100 else 8.0) for at_s in range(200)]
    speeds = calibrated().speeds_during(Report(calls, 20.0, 0.0))
    assert speeds[:95] == pytest.approx([1.0] * 95, rel=0.01)
    assert speeds[106:] == pytest.approx([0.5] * 94, rel=0.01)


def test_a_program_that_has_cost_much_says_nothing_about_its_own_moment() -> None:
    calls = [landed("sum#0", at_s / 10, 4.0) for at_s in range(200)]
    calls[30] = landed("sum#0", 3.0, 12.0)
    speeds = calibrated().speeds_during(Report(calls, 20.0, 0.0))
    assert speeds[30] > 1.1 * speeds[29] and speeds[30] == pytest.approx(speeds[100])


def test_where_few_calls_are_around_the_speed_is_that_of_the_whole_run() -> None:
    calls = [landed("sum#0", 10.0 * n, 4.0 if n % 2 else 8.0) for n in range(10)]
    assert calibrated().speeds_during(Report(calls, 100.0, 0.0)) == pytest.approx([4 / 6] * 10)


def test_a_prediction_goes_by_the_speed_of_its_moment() -> None:
    programs, at_s = [Program("std", "", name="sort#2")] * 2, [0.0, 10.0]
    made = calibrated()
    made.costs = msgspec.structs.replace(made.costs, hop_s=0.0)
    fast_s, slow_s, *_ = predict(made, programs, at_s, [1.0, 0.5])
    assert slow_s - fast_s == pytest.approx(0.05, rel=0.01)


def test_every_program_of_a_calibration_has_a_name_of_its_own() -> None:
    programs = population("rollout")
    assert len({(program.kind, program.name) for program in programs}) == len(programs)


def test_what_the_host_takes_makes_the_machine_slower() -> None:
    """Two cores, always busy; in the second half the host takes one of them."""
    calls = [landed("sum#0", at_s / 10, 4.0) for at_s in range(100)]
    looks = [Look(at_s / 4, 2 * min(at_s / 4, 5) + max(0, at_s / 4 - 5), max(0, at_s / 4 - 5)) for at_s in range(41)]
    speeds = calibrated().speeds_during(Report(calls, 10.0, 0.0, looks))
    assert speeds[:40] == pytest.approx([1.0] * 40) and speeds[60:] == pytest.approx([0.5] * 40)
