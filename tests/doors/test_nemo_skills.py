"""The NeMo-Skills door."""

from __future__ import annotations

from typing import Any

import pytest
from doors_harness import Visitor
from gateway_harness import problem, running, soon, until


async def execute(here: Visitor, code: str, language: str = "python", **fields: Any) -> dict[str, Any]:
    return await here.post("/execute", generated_code=code, language=language, **fields)


async def test_execute_answers_its_fields(here: Visitor) -> None:
    made = await execute(here, "print(input())", std_input="hi", timeout=5, traceback_verbosity="Plain")
    assert made == {"process_status": "completed", "stdout": "hi\n", "stderr": ""}


async def test_an_exception_of_a_python_program_is_a_completed_run(here: Visitor) -> None:
    made = await execute(here, "1/0")
    assert made["process_status"] == "completed" and "ZeroDivisionError" in made["stderr"]


async def test_a_failed_shell_command_and_a_killed_program_are_errors(here: Visitor) -> None:
    assert await execute(here, "echo hi; exit 3", "shell") == {"process_status": "error", "stdout": "hi\n", "stderr": ""}
    assert (await execute(here, "echo hi", "shell"))["process_status"] == "completed"
    killed = await execute(here, "import os; os.kill(os.getpid(), 11)")
    assert killed["process_status"] == "error" and "signal 11" in killed["stderr"]


async def test_time_out(here: Visitor) -> None:
    made = await execute(here, "print('a'); import time; time.sleep(60)", timeout=0.5)
    assert made == {"process_status": "timeout", "stdout": "a\n", "stderr": "Execution timed out after 0.5 seconds\n"}


async def test_output_is_cut_after_so_many_characters(here: Visitor) -> None:
    made = await execute(here, "print('x' * 2000)")
    assert made["stdout"] == "x" * 1000 + "<output cut>"
    assert (await execute(here, "print('x' * 20)", max_output_characters=5))["stdout"] == "xxxxx<output cut>"


async def test_ipython_needs_a_session_id_and_sessions_are_not_there_yet(here: Visitor) -> None:
    without = await here.http.post("/execute", json={"generated_code": "1"})  # ipython is the default
    assert without.status_code == 400 and without.json()["error"] == "X-Session-ID header required for ipython sessions"
    given = await here.http.post("/execute", json={"generated_code": "1"}, headers={"X-Session-ID": "s"})
    assert given.status_code == 501 and "language=python" in given.json()["error"]


async def test_sessions_and_health(here: Visitor) -> None:
    assert (await here.http.get("/health")).json()["status"] == "healthy"
    assert (await here.http.get("/sessions")).json()["sessions"] == {}
    gone = await here.http.delete("/sessions/abc")
    assert gone.status_code == 404 and "abc" in gone.json()["error"]


@pytest.mark.parametrize(
    "body", [b"{", b"{}", b'{"generated_code": "", "language": "lean4"}', b'{"generated_code": "", "timeout": 0}']
)
async def test_a_bad_request_is_400_with_an_error(here: Visitor, body: bytes) -> None:
    answer = await here.http.post("/execute", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]


async def test_what_is_not_the_programs_doing_is_no_result() -> None:
    async with running(max_calls=1, max_calls_per_request=1) as service:
        body = {"generated_code": "lose", "language": "python"}
        assert problem(await service.client.post("/execute", json=body), 503, "not_run")["error"]
        held = soon(service.run("hold"))
        await until(lambda: service.gateway.dispatch.admission.calls == 1)
        assert problem(await service.client.post("/execute", json=body), 429, "overloaded")["error"]
        service.worker.let_go.set()
        await held
