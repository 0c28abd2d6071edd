"""Fail closed: whichever step of the set-up fails, no byte of the program runs."""

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sandbox_harness import Lab, laboratory

from exec_wire import Result
from worker.pool import FAILURES_BEFORE_RECYCLING
from worker.sandbox.execution import Execution

STEPS = (
    "cgroup oom_victim session namespaces workspace proc folder_out page descriptors folder rlimits identity capabilities fate "
    "landlock seccomp prepare"
).split()
ONLY_WITHOUT_NAMESPACES = {"own_folder", "signals"}
WRITES = "import os\nos.write(1, b'ran')\nopen('ran', 'w').write('ran')\n1"


@pytest.fixture(scope="module")
async def faulty_lab() -> AsyncIterator[Lab]:
    async with laboratory(fault_injection=True) as lab:
        yield lab


class Traces:
    """What programs left in their descriptors, before anything of it is judged or hidden."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = b""
        self.files: dict[str, str] = {}
        judge = Execution.result

        def look(execution: Execution, *args: Any) -> Any:
            stdout, stderr, page = execution._kept
            self.bytes = os.pread(stdout, 100, 0) + os.pread(stderr, 100, 0) + os.pread(page, 65536, 0).strip(b"\0")
            result = judge(execution, *args)
            if not result.files:
                left = Result("ok")
                execution._fetch_files(left)
                self.files = left.files
            return result

        monkeypatch.setattr(Execution, "result", look)


async def test_every_step_is_tested(faulty_lab: Lab) -> None:
    assert [step for step in faulty_lab.steps if step not in ONLY_WITHOUT_NAMESPACES] == STEPS


@pytest.mark.parametrize("step", STEPS)
async def test_failed_step_means_internal_error_and_no_byte_of_the_program(
    faulty_lab: Lab, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = Traces(monkeypatch)
    result = await faulty_lab.run(WRITES, fail_step=step, fetch_files=["ran"], echo_value=True)
    assert (result.status, result.blame, result.retryable) == ("internal_error", "infra", True)
    assert step in result.error
    assert (result.stdout, result.stderr, result.files, result.value, result.completed) == ("", "", {}, None, False)
    assert (traces.bytes, traces.files) == (b"", {})
    assert (await faulty_lab.run("print('fine')")).stdout == "fine\n"  # and it was one failure in a row


async def test_the_traces_of_a_program_that_runs_are_seen(faulty_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Traces(monkeypatch)
    assert (await faulty_lab.run(WRITES, echo_value=True)).status == "ok"
    assert traces.bytes.startswith(b"ran") and traces.bytes.endswith(b"1")


async def test_three_failures_in_a_row_recycle_the_zygote_and_the_next_call_works(faulty_lab: Lab) -> None:
    zygotes, restarts = faulty_lab.zygote_pids, faulty_lab.pool.zygote_restarts
    for _ in range(FAILURES_BEFORE_RECYCLING):
        assert (await faulty_lab.run(WRITES, fail_step="landlock")).status == "internal_error"
    assert (await faulty_lab.run("print('again')")).stdout == "again\n"
    assert faulty_lab.pool.zygote_restarts == restarts + 1
    assert not set(faulty_lab.zygote_pids) & set(zygotes)


async def test_failures_that_are_not_in_a_row_recycle_nothing(faulty_lab: Lab) -> None:
    restarts = faulty_lab.pool.zygote_restarts
    for _ in range(FAILURES_BEFORE_RECYCLING + 1):
        await faulty_lab.run(WRITES, fail_step="proc")
        assert (await faulty_lab.run("pass")).status == "ok"
    assert faulty_lab.pool.zygote_restarts == restarts


async def test_what_fails_on_the_contents_of_a_request_never_recycles_a_zygote(faulty_lab: Lab) -> None:
    """`prepare` is the step that works on files, variables and arguments."""
    zygotes, restarts = faulty_lab.zygote_pids, faulty_lab.pool.zygote_restarts
    for _ in range(2 * FAILURES_BEFORE_RECYCLING):
        result = await faulty_lab.run(WRITES, fail_step="prepare", files={"a": ""}, env={"A": "b"})
        assert (result.status, result.blame) == ("internal_error", "infra")
    assert (faulty_lab.pool.zygote_restarts, faulty_lab.zygote_pids) == (restarts, zygotes)


async def test_a_zygote_that_was_not_started_for_it_ignores_the_hook(lab: Lab) -> None:
    assert (await lab.run("print('runs')", fail_step="seccomp")).stdout == "runs\n"


async def test_failed_step_of_a_sandbox_without_namespaces_means_internal_error_too() -> None:
    masked = ["userns", "uid", "landlock=2"]
    async with laboratory(fault_injection=True, mask_layers=masked, min_tier="D") as bare:
        for step in sorted(ONLY_WITHOUT_NAMESPACES):
            result = await bare.run(WRITES, fail_step=step)
            assert (result.status, result.blame, result.stdout) == ("internal_error", "infra", ""), step
            assert step in result.error
