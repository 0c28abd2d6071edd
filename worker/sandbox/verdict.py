"""Every way in which a user's program can end, and whose fault that is.

`judge` decides status and blame from kernel facts only: wait status, which limit ended the program, control group counters. The
program's own output never counts.
"""

import math
import os
import signal
from collections.abc import Sequence

from exec_wire import Limits, Result, Usage, verdict
from worker.sandbox import protocol
from worker.sandbox.protocol import ZygoteReport

KILL_AT_OUTPUT = 8  # times the cap: output beyond the cap is cut, a program far beyond it is killed
CPU_USED_UP = 0.75  # of the CPU limit, which the kernel counts in ticks: on a busy machine it counted 1 s for a measured 0.90 s
OWN_LIMIT_REACHED = 0.9  # of the memory limit; a lower peak means that a kill was not for the program's own memory


def judge(report: ZygoteReport, limits: Limits, step_names: Sequence[str] = (), output_bytes: int = 0) -> Result:
    """`output_bytes`: how much its processes wrote to stdout or to stderr, whichever is more."""
    if setup_failed(report):
        name = step_names[report.step - 1] if 0 < report.step <= len(step_names) else "start"
        why = f": {os.strerror(report.error)}" if report.error else ""
        return verdict("internal_error", error=f"sandbox set-up failed at {name}{why}")
    if report.ended_by == protocol.BY_REQUEST:
        return verdict("cancelled")
    if report.ended_by == protocol.BY_WALL:
        if report.step != 0:
            return verdict("timeout", infra=True, error="setting up the sandbox used up all of the program's time")
        return verdict("timeout")
    if report.ended_by == protocol.BY_DEADLINE:
        return verdict("timeout", infra=True, error="the deadline passed before the program had the time that its limit allows")
    if output_bytes > limits.output_kb * 1024 * KILL_AT_OUTPUT:
        return verdict("output_limit")
    if report.ended_by == protocol.BY_MEMORY or report.oom_kills > 0:
        return _judge_out_of_memory(report, limits)
    if os.WIFSIGNALED(report.status):
        number, used_up = os.WTERMSIG(report.status), report.cpu_ns >= CPU_USED_UP * math.ceil(limits.cpu_limit_s) * 1e9
        if used_up and number in (signal.SIGXCPU, signal.SIGKILL):
            return verdict("cpu_limit", signal=number)
        return _killed_by_machine() if number == signal.SIGKILL else verdict("signal", signal=number)
    code = os.WEXITSTATUS(report.status)
    return verdict("ok" if code == 0 else "error", exit_code=code)


def setup_failed(report: ZygoteReport) -> bool:
    """A set-up step failed. False if one of the call's own limits ended the program during set-up."""
    return report.step != 0 and report.ended_by == protocol.BY_ITSELF and report.oom_kills == 0


def zygote_failed(report: ZygoteReport, step_names: list[str]) -> bool:
    """A step failed that is the same for every request. The last one, `prepare`, depends on the request's contents, so its
    failure does not count against the zygote."""
    return setup_failed(report) and report.step != len(step_names)


def _judge_out_of_memory(report: ZygoteReport, limits: Limits) -> Result:
    """The kernel also counts kills because the whole machine was out of memory. Control groups version 2 tell which; else the
    peak does."""
    below = 0 < report.memory_peak < OWN_LIMIT_REACHED * (limits.memory_mb << 20)
    if report.oom_by == protocol.OOM_BY_MACHINE or (report.oom_by == protocol.OOM_BY_UNKNOWN and below):
        return _killed_by_machine()
    return verdict("memory_limit")


def _killed_by_machine() -> Result:
    return verdict("signal", infra=True, signal=signal.SIGKILL, error="a SIGKILL that no limit of the call sent")


def usage_of(report: ZygoteReport, elapsed_s: float, starved_s: float, cpu_ns: int) -> Usage:
    return Usage(
        wall_s=round(max(0.0, elapsed_s - starved_s), 6),
        elapsed_s=round(elapsed_s, 6),
        cpu_s=round(max(0, cpu_ns) / 1e9, 6),
        memory_peak_bytes=report.memory_peak,
        processes_peak=report.processes_peak,
    )
