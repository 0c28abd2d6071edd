"""The arms run programs and count all their CPU time; wrong outcomes are found; figures are computed from the runs."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from common import need_root_and_nsjail

from loadtest.bench import __main__ as bench
from loadtest.bench.agent import CUT, STARVED, Outcome, as_shown, difference
from loadtest.bench.arms import ARMS, ENDPOINTS, info, open_arm
from loadtest.bench.figures import Results, RunRecord, judge, summarise
from loadtest.support import meter
from loadtest.support.processes import Part, free_port
from loadtest.support.results import EXIT_FAILED, EXIT_UNAVAILABLE, percentile
from loadtest.support.workload import Program

BURN_S = 0.4
FOUR = [
    Program("std", "print(6 * 7)\n"),
    Program("std", "print(input()[::-1])\n", "olleh\n"),
    Program("error", "print('before')\n1 / 0\n"),
    Program("endless", "print('here', flush=True)\nwhile True: pass\n", wall_s=5.0),  # a fresh interpreter on a busy machine
]
WANTED = [("ok", "42\n"), ("ok", "hello\n"), ("error", "before\n"), ("timeout", "here\n")]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name in ("zygote", "run", "run_code", "redis", "batch", "long-batch")
        else name
        for name in ARMS
    ],
)
def test_arm_runs_programs_and_counts_their_cpu_time(name: str) -> None:
    need_root_and_nsjail()
    burn = Program("std", f"import time\nwhile time.process_time() < {BURN_S}: pass\n")
    with open_arm(name) as arm:
        four = FOUR[:3] if name in ENDPOINTS else FOUR  # code-judge's protocol has no time limit
        run = arm.run(four, 2)
        # On a busy machine the time-out of an endless program is blamed on infra.
        assert [(one.status.removesuffix(" (infra)"), one.stdout) for one in run.outcomes] == WANTED[: len(four)]
        assert run.outcomes[2].last_line == "ZeroDivisionError: division by zero"
        burned = arm.run([burn] * 2, 2)
        assert burned.cpu_s > 2 * BURN_S * 0.9
        assert burned.load_cpu_s < BURN_S  # the load generator is counted apart
        if name == "http":
            assert info(arm.url)["slots"] >= 1
            assert meter.pss_bytes(arm.service_pid) > 50e6
            assert len(bench.time_idle_calls(arm.url, 3)) == 3


@pytest.mark.parametrize("name", ["V1Meter", "V2Meter", "CpuMeter"])
def test_every_way_to_count_sees_children_that_have_died(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_root_and_nsjail()
    v1, v2 = meter.own_group("cpuacct"), meter.own_group("")
    parent = {"V1Meter": v1, "V2Meter": v2, "CpuMeter": Path()}[name]
    if parent is None:
        pytest.skip("this kernel has no such hierarchy")
    makers: dict[str, Callable[[str], meter.CpuMeter]] = {
        "V1Meter": lambda group: meter.V1Meter(parent, group),
        "V2Meter": lambda group: meter.V2Meter(parent, group),
        "CpuMeter": lambda group: meter.CpuMeter(),
    }
    monkeypatch.setattr(meter, "make_meter", lambda group: makers[name](f"{meter.PREFIX}-{os.getpid()}-{group}-test"))
    burn = Program("std", f"import time\nwhile time.process_time() < {BURN_S}: pass\n")
    with open_arm("spawn") as arm:
        assert arm.run([burn], 1).cpu_s > 0.9 * BURN_S


def outcome(status: str = "ok", stdout: str = "1\n", line: str = "") -> Outcome:
    return Outcome(status, stdout, line, 0.1)


@pytest.mark.parametrize(
    ("reference", "found", "equal"),
    [
        (outcome(), outcome(), True),
        (outcome(), outcome(stdout="2\n"), False),
        (outcome(), outcome("error"), False),
        (outcome("error", line="NameError: x"), outcome("error", line="NameError: y"), False),
        (outcome(line="a warning"), outcome(line=""), True),
        (outcome("timeout", ""), outcome("timeout", "what was not flushed"), True),
        (outcome("timeout", "a"), outcome("timeout", "b"), False),
        (outcome("timeout"), outcome("timeout (infra)"), False),
    ],
)
def test_outcomes_differ_when_status_output_or_traceback_do(reference: Outcome, found: Outcome, equal: bool) -> None:
    assert (difference(reference, found) == "") is equal


def test_only_a_timeout_of_an_endless_program_may_be_blamed_on_the_machine() -> None:
    options = bench.parse(["--quick", "--mix", "std", "--arms", "spawn,zygote"])
    results = Results({}, "", 1, 2, {})
    one = bench.Bench(options, results)
    endless, short = Program("endless", "while True: pass"), Program("std", "print(1)")
    one._keep("spawn", [endless, short], [outcome("timeout", ""), outcome()])
    one._keep("zygote", [endless, short], [outcome(STARVED, "")] * 2)
    one.compare_all()
    assert (results.checked, results.starved, len(results.mismatches)) == (2, 1, 1)


def record(arm: str, repeat: int, calls_per_s: float, cpu_ms: float) -> RunRecord:
    return RunRecord("rollout", arm, repeat, 100, calls_per_s, cpu_ms, 0.0, 0.0, 0.1, 0.2)


def test_ratios_are_taken_within_a_repeat() -> None:
    runs = [record("spawn", 0, 10, 200), record("http", 0, 300, 8), record("zygote", 0, 330, 7.5)]
    runs += [record("spawn", 1, 5, 200), record("http", 1, 150, 8), record("zygote", 1, 160, 7.0)]
    http = next(one for one in summarise(runs) if one.arm == "http")
    assert http.times_spawn is not None and http.times_spawn.low == http.times_spawn.high == 30.0
    assert http.times_spawn_by_cpu is not None and http.times_spawn_by_cpu.median == 25.0


def test_targets_are_judged_by_the_median() -> None:
    results = Results({}, "", 1, 2, {})
    results.runs = [record("spawn", 0, 10, 200), record("http", 0, 190, 8), record("zygote", 0, 200, 6)]
    results.figures = summarise(results.runs)
    assert [(target.found, target.met) for target in judge(results)] == [("19.0 x", False), ("0.95 x", True)]


def test_an_adapters_endpoint_is_judged_beside_our_own_endpoint_of_the_same_shape() -> None:
    results = Results({}, "", 1, 2, {})
    results.runs = [
        record("run", 0, 100, 8),
        record("run_code", 0, 90, 8),
        record("batch", 0, 100, 8),
        record("long-batch", 0, 70, 8),
    ]
    assert [(target.found, target.met) for target in judge(results)] == [("0.90 x", True), ("0.70 x", False)]


def test_what_code_judge_cuts_is_compared_as_far_as_it_goes() -> None:
    reference, found = outcome("error", "x" * 3000, "NameError: x"), outcome("error", "x" * 1000, CUT)
    assert difference(as_shown("long-batch", reference, found), found) == ""
    assert difference(as_shown("run_code", reference, found), found) != ""
    assert difference(as_shown("long-batch", reference, outcome("error", "x" * 1000, "other")), found) != ""


def test_percentile_is_a_measured_value() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.95) == 2.0


@pytest.mark.slow
def test_a_wrong_outcome_makes_the_exit_code_nonzero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sandbox has a host name of its own, so a program that prints it has another outcome there."""
    need_root_and_nsjail()
    module, file = tmp_path / "telling.py", tmp_path / "out.json"
    call = {"kind": "std", "code": "import socket; print(socket.gethostname())"}
    module.write_text(f"def calls(n, seed=0, mix=''):\n    return [{call}] * n\n")
    few = ["--quick", "--repeats", "1", "--mix", "std", "--arms", "spawn,zygote", "--page", str(file.with_suffix(".md"))]
    assert bench.main([*few, "--workload", str(module), "--json", str(file)]) == EXIT_FAILED
    assert "WRONG" in capsys.readouterr().out
    results = msgspec.json.decode(file.read_bytes(), type=Results)
    assert len(results.mismatches) == results.checked > 0
    assert str(tmp_path) not in file.read_text() + file.with_suffix(".md").read_text()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    need_root_and_nsjail()
    with Part.up(profiles='{"bare": []}') as service:
        yield service.url


@pytest.mark.parametrize("protocol", bench.PROTOCOLS)
def test_target_is_measured_in_its_protocol_and_its_outcomes_are_checked(protocol: str, url: str, tmp_path: Path) -> None:
    """Our own adapters are services of these protocols."""
    file = tmp_path / "found.json"
    few = ["--mix", "std", "--calls", "12", "--repeats", "1", "--arms", "spawn", "--json", str(file)]
    assert bench.main(["--target", url, "--protocol", protocol, *few]) == 0
    found = msgspec.json.decode(file.read_bytes(), type=Results)
    assert [run.arm for run in found.runs] == ["spawn", "target"] and found.checked == 12
    assert url not in file.read_text()


def test_target_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert bench.main(["--target", url, "--arms", "spawn"]) == EXIT_UNAVAILABLE
    assert f"{url} does not answer" in capsys.readouterr().err
