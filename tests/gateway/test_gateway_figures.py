"""The figures of several processes put together: metrics pages and live statistics."""

import pytest
from test_gateway_stats import Clock, result

from exec_service.telemetry.live_stats import LiveStats
from exec_service.telemetry.metrics import Metrics
from exec_service.telemetry.processes import Report, add_up, merged, what_remains
from exec_wire.messages.calls import Tags
from exec_wire.messages.stats import Depths


def page(calls: int, slots: int = 4, up: int = 1, run: str = "r") -> str:
    return (
        "# HELP exec_run_calls_total Calls\n# TYPE exec_run_calls_total counter\n"
        f'exec_run_calls_total{{run="{run}",status="ok"}} {calls}.0\n'
        "# HELP exec_slots Slots\n# TYPE exec_slots gauge\n"
        f"exec_slots {slots}.0\n"
        "# HELP exec_queue_up Queue\n# TYPE exec_queue_up gauge\n"
        f"exec_queue_up {up}.0\n"
    )


def test_calls_are_added_up_and_what_all_processes_see_is_not() -> None:
    assert add_up([page(3), page(4)]) == page(7)
    assert add_up([page(3, slots=4, up=1), page(4, slots=8, up=0)]) == page(7, slots=8, up=0)
    assert add_up([]) == ""


def test_a_real_page_of_metrics_survives_unchanged_and_doubles() -> None:
    counted = Metrics()
    counted.finished(result(), tags=Tags(run='a "quoted" one\n'))
    text = "".join(line for line in counted.text().decode().splitlines(keepends=True) if "process_" not in line)
    assert add_up([text]) == text
    assert 'exec_calls_total{blame="none",status="ok"} 2.0' in add_up([text, text])
    assert 'exec_stage_seconds_bucket{le="+Inf",stage="total"} 2.0' in add_up([text, text])


def test_what_ended_processes_counted_remains_and_their_gauges_do_not() -> None:
    assert add_up([page(4), what_remains(page(3), live=page(4))]) == page(7)
    assert what_remains(page(3), live=page(4, run="another")).splitlines() == page(3).splitlines()[:2]


def test_seconds_runs_and_failures_of_all_processes_are_one_history() -> None:
    clock = Clock()
    parts = [LiveStats(clock), LiveStats(clock)]
    for number, part in enumerate(parts):
        for step in (1, 2, number + 3):
            part.note(result("error", total_ms=10.0**number), "t", Tags(run="r", step=step))
            clock.now += 1
    whole = LiveStats.merged([part.part() for part in parts])
    whole._clock = clock
    assert sum(second.model for second in whole.seconds()) == 6
    assert len(whole.failures()) == 6
    assert [failure.seconds_ago for failure in whole.failures()] == [1, 2, 3, 4, 5, 6]
    [run] = whole.runs()
    assert (run.calls, run.last_step) == (6, 4)
    assert whole.run("r", "t").steps == []  # asked for on their own
    alone = LiveStats.merged([part.part(("t", "r")) for part in parts])
    assert {step.step: step.calls for step in alone.run("r", "t").steps} == {1: 2, 2: 2, 3: 1, 4: 1}
    assert alone.run("r", "t").steps[0].total_ms.most == 10


@pytest.mark.parametrize(
    ("reasons", "whole"), [(["", "draining"], ""), (["draining"] * 2, "draining"), ([], "no process is ready")]
)
def test_the_whole_is_ready_while_one_process_is(reasons: list[str], whole: str) -> None:
    reports = [Report(not_ready_because=reason, depths=Depths(in_flight=2, slots=4)) for reason in reasons]
    assert merged(reports).not_ready_because == whole
    assert merged(reports).depths.in_flight == 2 * len(reasons)
