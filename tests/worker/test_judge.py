"""The judgement alone, on what a zygote may report."""

import signal

import pytest

from exec_wire import Limits, Result
from worker.sandbox import protocol
from worker.sandbox.protocol import ZygoteReport
from worker.sandbox.verdict import judge

LIMITS = Limits(wall_s=10.0, cpu_s=4.0, output_kb=1)
STEPS = ["cgroup", "oom_victim"]
SECOND = 1_000_000_000


def report(**fields: int) -> ZygoteReport:
    plain = dict.fromkeys(ZygoteReport._fields, 0) | {"kind": protocol.REPORT_ENDED, "processes_peak": 1}
    return ZygoteReport(**{**plain, **fields})


def verdict_on(out: int = 0, **fields: int) -> Result:
    return judge(report(**fields), LIMITS, STEPS, out)


def test_exit_zero_is_ok() -> None:
    result = verdict_on(status=0)
    assert (result.status, result.blame, result.retryable, result.exit_code) == ("ok", "none", False, 0)


def test_other_exit_code_is_the_models_error() -> None:
    result = verdict_on(status=3 << 8)
    assert (result.status, result.blame, result.retryable, result.exit_code) == ("error", "model", False, 3)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGXCPU, signal.SIGSYS])
def test_signal_is_the_models(number: int) -> None:
    result = verdict_on(status=number)
    assert (result.status, result.blame, result.signal) == ("signal", "model", number)


def test_kill_that_nobody_of_ours_sent_is_infra() -> None:
    result = verdict_on(status=signal.SIGKILL)
    assert (result.status, result.blame, result.retryable, result.signal) == ("signal", "infra", True, 9)


@pytest.mark.parametrize("number", [signal.SIGXCPU, signal.SIGKILL])
def test_kernel_kill_after_all_cpu_time_is_cpu_limit(number: int) -> None:
    for cpu_s in (4, 3.2):  # the kernel counts its limit in ticks, which is not exact
        result = verdict_on(status=number, cpu_ns=int(cpu_s * SECOND))
        assert (result.status, result.blame, result.signal) == ("cpu_limit", "model", number)


def test_wall_limit_is_the_models_timeout_however_long_the_program_starved() -> None:
    result = verdict_on(ended_by=protocol.BY_WALL, cpu_ns=2 * SECOND, starved_ns=200 * SECOND)
    assert (result.status, result.blame, result.retryable) == ("timeout", "model", False)


def test_timeout_by_the_deadline_is_infra() -> None:
    result = verdict_on(ended_by=protocol.BY_DEADLINE, cpu_ns=2 * SECOND, starved_ns=SECOND)
    assert (result.status, result.blame, result.retryable) == ("timeout", "infra", True)
    assert "deadline" in result.error


def test_wall_limit_during_set_up_is_an_infra_timeout() -> None:
    result = verdict_on(ended_by=protocol.BY_WALL, step=2)
    assert (result.status, result.blame) == ("timeout", "infra")


def test_memory_limit_during_set_up_is_the_models() -> None:
    result = verdict_on(step=2, status=signal.SIGKILL, oom_kills=1)
    assert (result.status, result.blame) == ("memory_limit", "model")


@pytest.mark.parametrize("fields", [{"oom_kills": 1, "status": 9}, {"ended_by": protocol.BY_MEMORY}, {"oom_kills": 1}])
def test_memory_limit_comes_from_the_kernels_counter(fields: dict[str, int]) -> None:
    assert verdict_on(**fields).status == "memory_limit"


def test_control_groups_v2_tell_whose_memory_ended_also_without_a_peak() -> None:
    killed = {"oom_kills": 1, "status": signal.SIGKILL}
    result = verdict_on(**killed, oom_by=protocol.OOM_BY_MACHINE)
    assert (result.status, result.blame) == ("signal", "infra")
    assert verdict_on(**killed, oom_by=protocol.OOM_BY_LIMIT, memory_peak=1).status == "memory_limit"


def test_output_far_beyond_its_limit_is_output_limit() -> None:
    assert verdict_on(out=8 * 1024 + 1).status == "output_limit"
    assert verdict_on(out=8 * 1024).status == "ok"


def test_kill_by_request_is_cancelled_and_the_clients() -> None:
    result = verdict_on(ended_by=protocol.BY_REQUEST, status=9)
    assert (result.status, result.blame, result.retryable) == ("cancelled", "client", False)


@pytest.mark.parametrize(("step", "name"), [(1, "cgroup"), (2, "oom_victim"), (-1, "start"), (99, "start")])
def test_failed_set_up_step_is_named_and_infra(step: int, name: str) -> None:
    result = verdict_on(step=step, error=28, status=253 << 8)
    assert (result.status, result.blame, result.retryable) == ("internal_error", "infra", True)
    assert name in result.error and "No space left" in result.error
