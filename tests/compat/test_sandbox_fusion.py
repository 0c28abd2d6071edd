"""The SandboxFusion adapter, field by field; and what verl and the SDK rely on."""

import base64
import json
from typing import Any

import pytest
from compat_harness import Visitor
from gateway_harness import Service, problem, running, soon, until

RUN_FIELDS = {"status", "message", "compile_result", "run_result", "executor_pod_name", "files"}
COMMAND_FIELDS = {"status", "execution_time", "return_code", "stdout", "stderr"}
JUPYTER_FIELDS = {"status", "message", "driver", "cells", "executor_pod_name", "files"}
PNG = b"\x89PNG\r\n\x1a\n"


def b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


async def run(here: Visitor, code: str, **fields: Any) -> dict[str, Any]:
    return await here.post("/run_code", code=code, **fields)


async def test_ping(here: Visitor) -> None:
    assert (await here.http.get("/v1/ping")).json() == "pong"


async def test_run_code_answers_every_field(here: Visitor) -> None:
    made = await run(
        here, "print(input())", language="python", stdin="hi", compile_timeout=5, run_timeout=5, memory_limit_MB=256
    )
    assert made.keys() == RUN_FIELDS and made["run_result"].keys() == COMMAND_FIELDS
    assert (made["status"], made["message"], made["compile_result"], made["files"]) == ("Success", "", None, {})
    ran = made["run_result"]
    assert (ran["status"], ran["return_code"], ran["stdout"], ran["stderr"]) == ("Finished", 0, "hi\n", "")
    assert isinstance(ran["execution_time"], float) and made["executor_pod_name"] == "w"


async def test_language_may_be_left_out(here: Visitor) -> None:
    assert (await run(here, "print(1)"))["run_result"]["stdout"] == "1\n"


async def test_streams_are_texts_and_never_null_when_finished(here: Visitor) -> None:
    ran = (await run(here, "pass"))["run_result"]
    assert (ran["stdout"], ran["stderr"]) == ("", "")


@pytest.mark.parametrize(("code", "return_code"), [("raise SystemExit(3)", 3), ("1/0", 1), ("import os; os.kill(0, 11)", -11)])
async def test_a_failed_program_is_failed_with_its_code(here: Visitor, code: str, return_code: int) -> None:
    made = await run(here, code)
    assert (made["status"], made["message"], made["run_result"]["status"]) == ("Failed", "", "Finished")
    assert made["run_result"]["return_code"] == return_code


async def test_time_out_keeps_what_was_printed(here: Visitor) -> None:
    made = await run(here, "import sys, time\nprint('a'); print('b', file=sys.stderr)\ntime.sleep(60)", run_timeout=0.5)
    ran = made["run_result"]
    assert (made["status"], made["message"], ran["status"], ran["return_code"]) == ("Failed", "", "TimeLimitExceeded", None)
    assert (ran["stdout"], ran["stderr"]) == ("a\n", "b\n") and 0.5 <= ran["execution_time"] < 30


async def test_memory_limit_is_kept(here: Visitor) -> None:
    made = await run(here, "x = bytearray(300 << 20)", memory_limit_MB=100)
    assert (made["status"], made["run_result"]["status"]) == ("Failed", "Finished") and made["run_result"]["return_code"]
    assert (await run(here, "x = bytearray(300 << 20)", memory_limit_MB=-1))["status"] == "Success"


async def test_files_go_in_and_come_out_by_relative_and_absolute_paths(here: Visitor) -> None:
    code = """
import os
for path in ("a.txt", "sub/b.txt", "/tmp/c.txt", "/mnt/data/d.txt"):
    print(open(path).read(), end=" ")
os.makedirs("/mnt/out", exist_ok=True)
open("/mnt/out/x", "w").write("X"); open("y", "wb").write(bytes(range(256)))
"""
    files = {"a.txt": b64("A"), "sub/b.txt": b64("B"), "/tmp/c.txt": b64("C"), "/mnt/data/d.txt": b64("D"), "none": None}
    made = await run(here, code, files=files, fetch_files=["/mnt/out/x", "y", "missing", "/tmp/c.txt"])
    assert made["run_result"]["stdout"] == "A B C D ", made
    assert made["files"] == {"/mnt/out/x": b64("X"), "y": b64(bytes(range(256))), "/tmp/c.txt": b64("C")}


@pytest.mark.parametrize("field", ["files", "fetch_files"])
async def test_other_paths_are_refused_by_name(here: Visitor, field: str) -> None:
    body = {"code": "", field: {"/etc/passwd": b64("x")} if field == "files" else ["/etc/passwd"]}
    answer = await here.http.post("/run_code", json=body)
    assert answer.status_code == 422 and field in problem(answer, 422, "bad_field")["field"]


@pytest.mark.parametrize("language", ["cpp", "c++"])
async def test_a_compiled_language_has_a_compile_result(here: Visitor, language: str) -> None:
    made = await run(here, '#include <cstdio>\nint main() { puts("hi"); }', language=language)
    assert (made["status"], made["run_result"]["stdout"]) == ("Success", "hi\n")
    assert made["compile_result"].keys() == COMMAND_FIELDS
    assert (made["compile_result"]["status"], made["compile_result"]["return_code"]) == ("Finished", 0)


async def test_a_compile_failure_has_no_run_result(here: Visitor) -> None:
    made = await run(here, "int main( {", language="cpp")
    assert (made["status"], made["message"], made["run_result"]) == ("Failed", "", None)
    assert made["compile_result"]["status"] == "Finished" and made["compile_result"]["return_code"] != 0
    assert "main.cpp:1" in made["compile_result"]["stderr"]


async def test_bash_runs(here: Visitor) -> None:
    assert (await run(here, "echo $((6 * 7))", language="bash"))["run_result"]["stdout"] == "42\n"


@pytest.mark.parametrize("language", ["js", "javascript", "nodejs"])
async def test_names_of_javascript(here: Visitor, language: str) -> None:
    made = await run(here, "console.log(6 * 7)", language=language)
    if "javascript" in here.gateway.worker_registry.languages:
        assert made["run_result"]["stdout"] == "42\n"
    else:
        assert made["status"] == "SandboxError" and language in made["message"]


@pytest.mark.parametrize("language", ["rust", "ts", "python_gpu", "nonsense"])
async def test_a_language_that_is_missing_is_a_sandbox_error_that_names_it(here: Visitor, language: str) -> None:
    made = await run(here, "x", language=language)
    assert made["status"] == "SandboxError" and repr(language) in made["message"] and "python" in made["message"]
    assert (made["compile_result"], made["run_result"]) == (None, None)


@pytest.mark.parametrize(
    "body", [b"{", b"{}", b'{"code": 1}', b'{"code": "", "run_timeout": "x"}', b'{"code": "", "run_timeout": 0}']
)
async def test_a_malformed_body_is_422(here: Visitor, body: bytes) -> None:
    answer = await here.http.post("/run_code", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422


# -- notebooks --------------------------------------------------------------------------------------------------------------


async def notebook(here: Visitor, *cells: str, **fields: Any) -> dict[str, Any]:
    return await here.post("/run_jupyter", cells=list(cells), **fields)


async def test_cells_share_one_interpreter_and_answer_every_field(here: Visitor) -> None:
    made = await notebook(
        here,
        "a = 123",
        "a",
        "print(a)",
        'import sys; n = sys.stderr.write("stderr message")',
        'raise RuntimeError("error message")',
        "def f():\n    return a + 1\nf()",
    )
    assert made.keys() == JUPYTER_FIELDS and made["driver"].keys() == COMMAND_FIELDS
    assert (made["status"], made["message"], made["driver"]["status"]) == ("Success", "", "Finished"), made
    nothing, value, printed, complained, failed, later = made["cells"]
    assert nothing == {"stdout": "", "stderr": "", "display": [], "error": []}
    assert value["display"] == [{"text/plain": "123"}]
    assert printed["stdout"] == "123\n" and complained["stderr"] == "stderr message"
    [error] = failed["error"]
    assert (error["ename"], error["evalue"]) == ("RuntimeError", "error message")
    assert 'raise RuntimeError("error message")' in "".join(error["traceback"]) and "main.py" not in "".join(error["traceback"])
    assert later["display"] == [{"text/plain": "124"}]  # an exception does not stop later cells


async def test_a_syntax_error_and_an_exit_are_errors_of_their_cell(here: Visitor) -> None:
    made = await notebook(here, "x = (", "import sys; sys.exit(3)", "raise KeyboardInterrupt", "1; 2;", "print('end')")
    assert made["status"] == "Success"
    assert [[error["ename"] for error in cell["error"]] for cell in made["cells"]] == [
        ["SyntaxError"], ["SystemExit"], ["KeyboardInterrupt"], [], [],
    ]  # fmt: skip
    assert made["cells"][3]["display"] == [] and made["cells"][4]["stdout"] == "end\n"


async def test_figures_are_pngs_and_so_is_what_is_shown(here: Visitor) -> None:
    made = await notebook(
        here,
        "%matplotlib inline\nimport matplotlib.pyplot as plt",
        "plt.plot([1, 2]); plt.title('a')",
        "plt.figure(); plt.plot([1]); plt.show(); print('shown')",
        "fig, ax = plt.subplots(); fig",
        "1",
    )
    assert made["status"] == "Success", made
    kinds = [[sorted(shown) for shown in cell["display"]] for cell in made["cells"]]
    picture = ["image/png", "text/plain"]
    assert kinds[0] == [] and kinds[1][-1] == picture and kinds[2] == [picture]
    assert picture in kinds[3] and kinds[4] == [["text/plain"]]
    assert all(cell["stderr"] == "" for cell in made["cells"])  # no warning that nothing can be shown
    assert base64.b64decode(made["cells"][2]["display"][0]["image/png"]).startswith(PNG)
    assert made["cells"][2]["stdout"] == "shown\n"


async def test_rich_values_and_display(here: Visitor) -> None:
    made = await notebook(
        here, "import pandas as pd\npd.DataFrame({'a': [1]})", "display(1, 'x')\n2", "await __import__('asyncio').sleep(0, 5)"
    )
    frame, several, awaited = made["cells"]
    assert "<table" in frame["display"][0]["text/html"] and "text/plain" in frame["display"][0]
    assert [shown["text/plain"] for shown in several["display"]] == ["1", "'x'", "2"]
    assert awaited["display"] == [{"text/plain": "5"}]


async def test_what_children_print_belongs_to_their_cell(here: Visitor) -> None:
    made = await notebook(here, "import os; os.system('echo child')", "print('next')")
    assert [cell["stdout"] for cell in made["cells"]] == ["child\n", "next\n"]


async def test_finished_cells_are_kept_on_a_total_time_out(here: Visitor) -> None:
    made = await notebook(
        here, "print('one'); x = 1", "x", "print('begun'); import time; time.sleep(60)", "2", total_timeout=1.5
    )
    assert (made["status"], made["driver"]["status"], made["driver"]["return_code"]) == ("Failed", "TimeLimitExceeded", None)
    assert [cell["stdout"] for cell in made["cells"]] == ["one\n", ""] and made["cells"][1]["display"] == [{"text/plain": "1"}]
    assert made["driver"]["stdout"] == "begun\n"


@pytest.mark.parametrize(
    "stuck", ["import time; time.sleep(60)", "while True:\n    try: pass\n    except: pass", "sum(range(10**12))"]
)
async def test_finished_cells_are_kept_on_a_cell_time_out(here: Visitor, stuck: str) -> None:
    made = await notebook(here, "1", stuck, "3", cell_timeout=0.5, total_timeout=60)
    assert (made["status"], made["driver"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert len(made["cells"]) == 1 and made["driver"]["execution_time"] < 30


async def test_memory_limit_ends_the_notebook_and_keeps_what_was_done(here: Visitor) -> None:
    made = await notebook(here, "1", "x = bytearray(500 << 20)", "3", memory_limit_MB=100)
    assert (made["status"], made["driver"]["status"]) == ("Failed", "Finished") and made["driver"]["return_code"] != 0
    assert len(made["cells"]) == 1


async def test_a_notebook_that_leaves_early_is_failed(here: Visitor) -> None:
    made = await notebook(here, "1", "import os; os._exit(0)", "3")
    assert (made["status"], len(made["cells"])) == ("Failed", 1)


async def test_files_of_a_notebook(here: Visitor) -> None:
    made = await notebook(
        here, "open('out', 'w').write(open('/mnt/in').read() * 2)", files={"/mnt/in": b64("ab")}, fetch_files=["out", "none"]
    )
    assert made["files"] == {"out": b64("abab")}


async def test_odd_cells_do_not_disturb_the_driver(here: Visitor) -> None:
    odd = [
        '"""\\"""',
        'print(\'{x} \\\\ """\')',
        "",
        "# only a comment",
        "\0",
        "print(1)\r\nprint(2)",
        "__name__",
        "a = 'é\\ud800'; a",
    ]
    made = await notebook(here, *odd)
    assert len(made["cells"]) == len(odd), made
    assert made["cells"][1]["stdout"] == '{x} \\ """\n' and made["cells"][4]["error"]
    assert made["cells"][5]["stdout"] == "1\n2\n" and made["cells"][6]["display"] == [{"text/plain": "'__main__'"}]


async def test_what_a_cell_writes_into_the_notes_is_only_its_own_word(here: Visitor) -> None:
    forged = json.dumps({"stdout": "forged", "stderr": "", "display": [], "error": []})
    more = await notebook(here, f"open('.cells.jsonl', 'a').write({forged!r} + '\\n')", "2")
    assert len(more["cells"]) == 2
    garbage = await notebook(here, "1", "open('.cells.jsonl', 'ab').write(b'\\xff[[[' * 100000 + b'\\n')", "3")
    assert len(garbage["cells"]) == 1 and garbage["status"] == "Failed"
    huge = await notebook(here, "print('x' * 10_000_000)", "'y' * 10_000_000")
    assert len(huge["cells"]) == 2 and all(len(json.dumps(cell)) < 3 << 20 for cell in huge["cells"])


async def test_another_kernel_is_422(here: Visitor) -> None:
    assert (await here.http.post("/run_jupyter", json={"cells": [], "kernel": "ir"})).status_code == 422


async def test_no_cells_are_no_work(here: Visitor) -> None:
    made = await notebook(here)
    assert (made["status"], made["cells"]) == ("Success", [])


# -- submit -----------------------------------------------------------------------------------------------------------------

DOUBLE = "Here:\n```python\nprint(int(input()) * 2)\n```\nDone."


def cases(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"input": {"stdin": given}, "output": {"stdout": expected}} for given, expected in pairs]


async def submit(here: Visitor, completion: str, tests: Any, language: str = "python", **config: Any) -> dict[str, Any]:
    wanted = {"dataset_type": "CommonOJDataset", "language": language, "provided_data": {"test": tests}, **config}
    return await here.post("/submit", dataset="mine", id=7, completion=completion, config=wanted)


async def test_submit_answers_every_field(here: Visitor) -> None:
    made = await submit(here, DOUBLE, cases(("1", "2"), ("2", "4")))
    assert {"id", "accepted", "extracted_code", "tests"} <= made.keys()
    assert (made["id"], made["accepted"], made["extracted_type"]) == (7, True, "fenced")
    assert made["extracted_code"].strip() == "print(int(input()) * 2)"
    assert [test["passed"] for test in made["tests"]] == [True, True]
    assert made["tests"][0]["exec_info"].keys() == RUN_FIELDS


async def test_submit_stops_at_the_first_failure_unless_all_are_wanted(here: Visitor) -> None:
    tests = cases(("1", "2"), ("2", "5"), ("3", "6"))
    made = await submit(here, DOUBLE, tests)
    assert (made["accepted"], [test["passed"] for test in made["tests"]]) == (False, [True, False])
    made = await submit(here, DOUBLE, tests, extra={"run_all_cases": True})
    assert (made["accepted"], [test["passed"] for test in made["tests"]]) == (False, [True, False, True])


async def test_submit_takes_its_cases_as_json_text_and_files_as_inputs(here: Visitor) -> None:
    assert (await submit(here, DOUBLE, json.dumps(cases(("1", "2")))))["accepted"]
    copy = "```python\nopen('out.txt', 'w').write(open('in.txt').read())\n```"
    assert (await submit(here, copy, [{"input": {"in.txt": "x"}, "output": {"out.txt": "x"}}]))["accepted"]
    assert not (await submit(here, copy, [{"input": {"in.txt": "x"}, "output": {"out.txt": "y"}}]))["accepted"]


async def test_submit_compiles_once_and_tells_a_compile_error(here: Visitor) -> None:
    good = "```cpp\n#include <iostream>\nint main() { int x; std::cin >> x; std::cout << x * 2; }\n```"
    assert (await submit(here, good, cases(("1", "2"), ("2", "4"), ("5", "10")), "cpp"))["accepted"]
    bad = await submit(here, "```cpp\nint main( {\n```", cases(("1", "2"), ("2", "4")), "cpp")
    assert not bad["accepted"] and bad["tests"][0]["exec_info"]["run_result"] is None


async def test_submit_honours_its_time_limit(here: Visitor) -> None:
    made = await submit(here, "```python\nimport time; time.sleep(9)\n```", cases(("", "")), run_timeout=0.3)
    assert made["tests"][0]["exec_info"]["run_result"]["status"] == "TimeLimitExceeded"


@pytest.mark.parametrize(
    ("config", "field"), [({"dataset_type": "HumanEval"}, "dataset_type"), ({"language": "rust"}, "language")]
)
async def test_what_cannot_be_submitted_is_422_by_name(here: Visitor, config: dict[str, str], field: str) -> None:
    wanted = {"dataset_type": "CommonOJDataset", "provided_data": {"test": cases(("", ""))}, **config}
    answer = await here.http.post("/submit", json={"id": 1, "completion": "x", "config": wanted})
    assert answer.status_code == 422 and field in answer.json()["field"]


# -- what is not the program's doing, with a scripted worker ----------------------------------------------------------------


async def ask(service: Service, path: str, code: str) -> Any:
    bodies = {
        "/run_code": {"code": code},
        "/run_jupyter": {"cells": [code]},
        "/submit": {
            "id": 1,
            "completion": f"```\n{code} \n```",
            "config": {"dataset_type": "CommonOJDataset", "provided_data": {"test": cases(("", ""))}},
        },
    }
    return await service.client.post(path, json=bodies[path])


@pytest.mark.parametrize("path", ["/run_code", "/run_jupyter", "/submit"])
async def test_overload_is_504_the_only_status_that_verl_sends_again(path: str) -> None:
    async with running(max_calls=1, max_calls_per_request=1) as service:
        held = soon(service.run("hold"))
        await until(lambda: service.gateway.dispatch.admission.calls == 1)
        problem(await ask(service, path, "say x"), 504, "overloaded")
        service.worker.let_go.set()
        await held
        service.gateway.dispatch.not_ready_because = "no sandbox"
        problem(await ask(service, path, "say x"), 504, "not_ready")


@pytest.mark.parametrize("path", ["/run_code", "/submit"])
async def test_a_lost_worker_is_tried_again_and_then_504(path: str) -> None:
    async with running() as service:
        assert (await ask(service, path, "flaky 2")).status_code == 200
        problem(await ask(service, path, "lose"), 504, "not_run")


async def test_a_call_that_waits_too_long_is_504_before_verl_gives_up() -> None:
    async with running(slots=1, fusion_wait_s=0.2) as service:
        held = soon(service.run("hold"))
        await until(lambda: len(service.worker.calls) == 1)
        second = soon(service.run("hold"))  # fills the window
        await until(lambda: len(service.gateway.dispatch.released) == 2)
        body = {"code": "say x", "compile_timeout": 0.1, "run_timeout": 0.1}
        problem(await service.client.post("/run_code", json=body), 504, "not_run")
        service.worker.let_go.set()
        await held
        await second
    async with running() as service:
        await ask(service, "/run_code", "say x")
        assert 27 < service.worker.jobs[0].remaining_ms / 1000 <= 28  # verl waits for both limits and ten seconds


@pytest.mark.parametrize("status", ["cancelled", "rejected"])
async def test_what_cannot_be_run_is_a_sandbox_error(status: str) -> None:
    async with running() as service:
        made = (await ask(service, "/run_code", f"end {status}")).json()
        assert (made["status"], made["run_result"]["status"]) == ("SandboxError", "Error") and made["message"]
