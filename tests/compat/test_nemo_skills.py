"""The NeMo-Skills adapter."""

import asyncio
from typing import Any

import pytest
from compat_harness import Visitor
from gateway_harness import problem, running, soon, until

from exec_service.compat.notebooks import Notebooks
from exec_service.dispatch.requests import ANONYMOUS
from exec_wire.messages.sessions import Cell, SessionSpec


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


async def test_health(here: Visitor) -> None:
    assert (await here.http.get("/health")).json()["status"] == "healthy"


async def cell(here: Visitor, name: str, code: str, **fields: Any) -> dict[str, Any]:
    body = {"generated_code": code, **fields}  # ipython is the default
    answer = await here.http.post("/execute", json=body, headers={"X-Session-ID": name})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def names(here: Visitor) -> set[str]:
    return set((await here.http.get("/sessions")).json()["sessions"])


async def test_ipython_needs_a_session_id(here: Visitor) -> None:
    without = await here.http.post("/execute", json={"generated_code": "1"})
    assert without.status_code == 400 and without.json()["error"] == "X-Session-ID header required for ipython sessions"
    long = await here.http.post("/execute", json={"generated_code": "1"}, headers={"X-Session-ID": "s" * 257})
    assert long.status_code == 400 and "256" in long.json()["error"]


async def test_session_keeps_its_variables_until_it_is_deleted(here: Visitor) -> None:
    first = await cell(here, "a", "x = 6\nprint('hi', end='')\nx * 7", traceback_verbosity="Plain", std_input="")
    assert first == {"process_status": "completed", "stdout": "hi\n42\n", "stderr": "", "new_session_created": True}
    assert await cell(here, "a", "x") == {
        "process_status": "completed",
        "stdout": "6\n",
        "stderr": "",
        "new_session_created": False,
    }
    assert (await cell(here, "b", "x"))["process_status"] == "error"
    about = (await here.http.get("/sessions")).json()
    assert about["backend"] == "ipython" and about["sessions"].keys() == {"a", "b"}
    assert about["sessions"]["a"].keys() == {"backend", "created", "last_used", "alive"} and about["sessions"]["a"]["alive"]
    assert (await here.http.delete("/sessions/a")).json() == {"message": "IPython session a deleted successfully"}
    gone = await here.http.delete("/sessions/a")
    assert gone.status_code == 404 and "a not found" in gone.json()["error"]
    again = await cell(here, "a", "x")
    assert (again["process_status"], again["new_session_created"]) == ("error", True)
    assert "NameError" in again["stderr"]
    for name in await names(here):
        await here.http.delete(f"/sessions/{name}")


async def test_exception_of_a_cell_is_an_error_and_keeps_the_state(here: Visitor) -> None:
    made = await cell(here, "e", "x = 1\nprint('before')\n1 / 0")
    assert (made["process_status"], made["stdout"]) == ("error", "before\n")
    assert "<cell 1>" in made["stderr"] and made["stderr"].endswith("ZeroDivisionError: division by zero\n")
    assert (await cell(here, "e", "x"))["stdout"] == "1\n"
    await here.http.delete("/sessions/e")


async def test_cell_that_times_out_keeps_the_state_if_it_can_be_interrupted(here: Visitor) -> None:
    late = await cell(here, "t", "x = 1\nimport time\nprint('begun', flush=True)\ntime.sleep(60)", timeout=0.5)
    assert (late["process_status"], late["stdout"]) == ("timeout", "begun\n")
    assert late["stderr"].endswith("Execution timed out after 0.5 seconds\n")
    kept = await cell(here, "t", "x")
    assert (kept["stdout"], kept["new_session_created"]) == ("1\n", False)
    await here.http.delete("/sessions/t")


async def test_session_that_died_is_made_anew_and_says_so(here: Visitor) -> None:
    await cell(here, "d", "x = 1")
    died = await cell(here, "d", "import os\nos.abort()")
    assert (died["process_status"], died["new_session_created"]) == ("error", True) and "signal 6" in died["stderr"]
    after = await cell(here, "d", "x")
    assert (after["process_status"], after["new_session_created"]) == ("error", True) and "NameError" in after["stderr"]
    assert (await cell(here, "d", "x = 2\nx"))["new_session_created"] is False
    await here.http.delete("/sessions/d")


async def test_gateway_that_never_saw_the_session_finds_it_by_its_name(here: Visitor) -> None:
    await cell(here, "g", "x = 5")
    [session] = (await here.http.get("/v1/sessions?rollout=g")).json()["sessions"]
    assert session["tags"]["group"] == "nemo-skills"
    found = await other_gateway(here).run("g", Cell("x"), SessionSpec(), ANONYMOUS)
    assert (found.result.value, found.new) == ("5", False)
    await here.http.delete("/sessions/g")


def other_gateway(here: Visitor) -> Notebooks:
    """What another one would know of the sessions: nothing yet."""
    return Notebooks("nemo-skills", here.gateway.sessions)


async def test_first_cells_sent_at_once_share_one_session(here: Visitor) -> None:
    await asyncio.gather(*(cell(here, "s", f"x{n} = {n}") for n in range(4)))
    assert len((await here.http.get("/v1/sessions?rollout=s")).json()["sessions"]) == 1
    assert (await cell(here, "s", "x0 + x1 + x2 + x3"))["stdout"] == "6\n"
    await here.http.delete("/sessions/s")


async def test_cells_are_counted_as_the_adapters(here: Visitor) -> None:
    before = here.adapter_calls("nemo-skills", "ok", "none")
    await cell(here, "m", "1")
    assert here.adapter_calls("nemo-skills", "ok", "none") == before + 1
    await here.http.delete("/sessions/m")


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
