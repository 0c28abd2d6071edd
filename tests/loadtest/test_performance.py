"""The report is made from raw figures alone; the soak judges as it says; the plan answers both questions."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from loadtest import facts, performance, plan, soak
from loadtest.burst import Burst, BurstResults
from loadtest.calibrate import Calibration, Point, Samples
from loadtest.experiments import Recovered, Recovery, Scaling, Step
from loadtest.results import Results, RunRecord, summarise
from loadtest.simulate import Cost, Costs
from loadtest.soak import Fault, Memory, Soak, visits_of
from loadtest.steady_load import Books
from worker.config import default_packages

ABOUT = ("2026-01-01 00:00 UTC", "abc1234", "the command", {"cpu": "x", "cores": "2", "memory": "1 GB", "kernel": "6"})


def calibration() -> Calibration:
    return Calibration(
        *ABOUT,
        server="Valkey",
        mix="std",
        cores=2,
        slots=2,
        calls=100,
        capacity_per_s=200.0,
        cpu_ms={"gateway": 1.0},
        batched_cpu_ms={"gateway": 0.1},
        cold={"gateway": 1.5},
        unseen=1.0,
        costs=Costs(gateway=Cost(0.0002, 0.0001), redis=Cost(0.00005, 0.00002), worker=Cost(0.0002, 0.0001), hop_s=0.001),
        redis_per_call={"commands": 8.0, "in_bytes": 1000.0, "out_bytes": 1000.0},
        others_share=0.0,
        programs={"std/one": Samples("std", [5.0, 10.0], 0.0)},
        validation=[Point(0.5, 100, 100.0, 10.0, 11.0, 9.0, 9.0, 30.0, 40.0, 0.0, [9.0, 11.0], [1.0])],
    )


def burst(transport: str, calls: int) -> Burst:
    books = Books(accepted=calls, answered=calls, right=calls)
    figures = (1.0, 1000.0, 0.5, 1.0, 10, 5.0, 50.0, 60.0, 10**8, 10**7)
    return Burst(transport, False, calls, 3, calls, 0.5, books, *figures, {"load 1": 10**7}, {"gateway": 0.1}, 0.0)


def speed() -> Results:
    runs = [RunRecord("std", arm, 0, 100, 1.0, 0.5, 0.0, 0.0, 0.1, 0.2, {"ok": 100}) for arm in ("spawn", "http")]
    started, commit, command, machine = ABOUT
    found = Results(started, commit, command, machine, "w", 1, 1, "", "A", 2, {}, runs=runs)
    found.figures = summarise(runs)
    return found


@pytest.fixture(scope="module")
def planned() -> plan.Plan:
    return plan.Planner(calibration(), plan.Ask(2000, 0.3, "std", 20.0, 2, 2.0, 4)).plan()


def fill(folder: Path, planned: plan.Plan) -> None:
    killed = Recovered(10.0, [1.0, 2.0], [0.1, 6.1], 1.5, 3.0, 0, 1, 0.1, 0.2, 6.1, 6.0)
    made: dict[str, msgspec.Struct] = {
        "speed": speed(),
        "calibration": calibration(),
        "plan": planned,
        "bursts": BurstResults(*ABOUT, "Valkey", [burst("http", 1000), burst("grpc", 1000)]),
        "scaling": Scaling(*ABOUT, [Step(1, 320.0, [300.0, 310.0])], [Step(1, 60.0, [60.0])]),
        "recovery": Recovery(*ABOUT, [killed]),
    }
    assert made.keys() == performance.SECTIONS.keys()
    folder.mkdir()
    for name, found in made.items():
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(found))


@pytest.mark.slow
def test_page_and_pictures_are_made_from_raw_figures_without_measuring(tmp_path: Path, planned: plan.Plan) -> None:
    if not Path(default_packages()).is_dir():
        pytest.skip("matplotlib is not installed (run `make install`)")
    folder = tmp_path / "performance"
    fill(folder, planned)
    (tmp_path / "soak.json").write_bytes(msgspec.json.encode(soaked()))
    assert performance.main(["--render", "--folder", str(folder)]) == 0
    text = (tmp_path / "performance.md").read_text()
    sections = text.split("\n## ")[1:]
    assert len(sections) == 8
    assert all("the command" in section for section in sections if not section.startswith("Memory"))  # has that of the next
    for picture in ("speed", "calibration", "memory", "fairness", "scaling", "recovery"):
        assert (folder / f"{picture}.png").stat().st_size > 5000 and f"(performance/{picture}.png)" in text
    assert (tmp_path / "soak.png").exists() and "**Not all within 20 %.**" in text
    shutil.rmtree(folder)
    assert performance.page(folder, folder) == performance.HEAD  # what was not measured is not there


def test_a_section_that_does_not_exist_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        performance.main(["--only", "spede"])
    assert "spede" in capsys.readouterr().err


def soaked(**changes: object) -> Soak:
    growth, grown = {"gateway": 0.02, "worker": 0.0, "redis": 0.3}, {"gateway": 10**6, "worker": 0, "redis": 10**6}
    found = Soak(*ABOUT, "Valkey", 30.0, 100.0, 80.0, 0.8, 1.0, 0.01, Books(right=10), 3.0, 100.0, 150.0, 160.0, growth, grown)
    found.faults, found.memory = [Fault("kill", 10.0, 5.0)], [Memory(5.0, 10**8, 10**8, 10**7)] * 3
    found.windows, found.paces = [soak.Window(0.0, 10, 8, 10.0, 20.0, 30.0)], [soak.Pace(1.0, 80.0, 0.8, True)]
    return msgspec.structs.replace(found, **changes)


def test_a_soak_allows_its_cluster_2_percent_of_the_cores_at_rest_and_names_the_busiest_thread() -> None:
    assert not soaked(at_rest=0.019).misses()
    [words] = soaked(at_rest=0.021).misses()
    assert "rest: cores 2.1 % busy" in words
    [words] = soaked(at_rest=0.5, threads_at_rest={"a worker's thread": 0.49}).misses()
    assert "a worker's thread: 49.0 %" in words
    assert not soaked(machine_at_rest=0.6).misses()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, ""),
        ({"books": Books(right=10, lost=1)}, "promise"),
        ({"last_p99_ms": 201.0}, "p99"),
        ({"busy": 0.7}, "load"),
        ({"beside_fresh": 0.8}, "speed"),
        ({"at_rest": 0.5}, "rest"),
        ({"growth": {"gateway": 0.2}, "grown_bytes": {"gateway": 10**8}}, "memory of the gateway"),
    ],
)
def test_a_soak_is_good_only_if_nothing_is_lost_and_all_is_flat(changes: dict[str, object], word: str) -> None:
    missed = soaked(**changes).misses()
    assert missed == [] if not word else (len(missed) == 1 and word in missed[0])


@pytest.mark.parametrize(("busy_per_call", "wanted"), [(0.01, 80.0), (0.016, 50.0), (0.004, 200.0)])
def test_the_load_of_a_soak_goes_where_the_cores_are_as_busy_as_they_should_be(busy_per_call: float, wanted: float) -> None:
    per_s = 100.0
    for _ in range(60):
        per_s = soak.next_pace(per_s, min(1.0, per_s * busy_per_call))
    assert per_s == pytest.approx(wanted, rel=0.02)


def test_a_call_is_in_calm_unless_a_fault_touched_its_stay() -> None:
    faults = [Fault("kill", 10.0, 5.0)]
    calm = [visit.calm for visit in visits_of([1.0, 9.5, 12.0, 16.0], [0.1, 1.0, 0.1, 0.1], faults)]
    assert calm == [True, False, False, True]


@pytest.mark.slow
def test_plan_reaches_the_wanted_latency_in_both_meanings(planned: plan.Plan) -> None:
    assert planned.per_step.latency.mean_s <= 0.3 and planned.in_flight.latency.mean_s <= 0.3
    assert planned.in_flight.calls_per_s == pytest.approx(2000 / 0.3, rel=0.01)
    # By work alone: calls/s times about 9 ms, on busy cores.
    assert planned.in_flight.fleet.cores >= 2000 / 0.3 * 0.0075
    assert planned.per_step.fleet.cores < planned.in_flight.fleet.cores / 4
    assert planned.at_once.mean_s > planned.per_step.latency.mean_s


@pytest.mark.slow
def test_plan_says_what_a_dead_machine_costs(planned: plan.Plan) -> None:
    assert planned.per_step.death.started_again >= 1
    assert planned.per_step.death.of_these_p99_s > 6.0
    assert planned.per_step.death.latency.most_s > planned.per_step.latency.most_s


def test_plan_refuses_what_no_fleet_can_reach(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "calibration.json"
    file.write_bytes(msgspec.json.encode(calibration()))
    few = ["--calls-per-step", "50", "--mix", "std", "--calibration", str(file)]
    assert plan.main([*few, "--mean-latency", "0.001"]) == plan.EXIT_USAGE
    assert "cannot be reached" in capsys.readouterr().err
    assert plan.main([*few, "--mix", "rollout"]) == plan.EXIT_USAGE
    assert "program was calibrated: run" in capsys.readouterr().err
    assert plan.main([*few, "--bursts", "30"]) == plan.EXIT_USAGE
    assert "--burst-seconds" in capsys.readouterr().err


def test_machine_is_named_as_the_page_needs_it() -> None:
    assert {"cpu", "cores", "memory", "kernel"} <= facts.machine().keys()
