"""The code-judge adapter, field by field; and what its clients rely on."""

import asyncio
from typing import Any

import pytest
from compat_harness import Visitor
from gateway_harness import Service, problem, running, soon, until

FIELDS = {"sub_id", "success", "run_success", "cost", "stdout", "stderr", "reason"}


async def run(here: Visitor, solution: str, path: str = "/run", type: str = "python", **fields: Any) -> dict[str, Any]:
    return await here.post(path, type=type, solution=solution, **fields)


async def test_ping_answers_a_json_string(here: Visitor) -> None:
    answer = await here.http.get("/ping")
    assert (answer.status_code, answer.json()) == (200, "pong")


async def test_status_has_queue_and_workers(here: Visitor) -> None:
    assert (await here.http.get("/status")).json() == {"queue": 0, "num_workers": 2}


async def test_run_answers_every_field(here: Visitor) -> None:
    made = await run(here, "print(input())", input="9", expected_output="9", sub_id="mine", options={"a": "b"})
    assert made.keys() == FIELDS
    assert made | {"cost": 0} == {
        "sub_id": "mine", "success": True, "run_success": True, "cost": 0, "stdout": "9\n", "stderr": "", "reason": "",
    }  # fmt: skip
    assert 0 < made["cost"] < 30


async def test_judge_leaves_out_what_was_printed(here: Visitor) -> None:
    made = await run(here, "print(9)", "/judge", expected_output="9")
    assert made.keys() == FIELDS - {"stdout", "stderr"}
    assert made["success"] and made["run_success"]
    batch = await here.post("/judge/long-batch", submissions=[{"type": "python", "solution": "print(9)"}])
    assert "stdout" not in batch["results"][0]


async def test_ids_are_made_for_those_that_have_none(here: Visitor) -> None:
    first, second = [(await run(here, ""))["sub_id"] for _ in range(2)]
    assert len(first) == len(second) == 36 and first != second
    assert len((await here.post("/run/batch", submissions=[{"type": "python", "solution": ""}]))["sub_id"]) == 36


@pytest.mark.parametrize(
    ("solution", "expected", "success", "run_success"),
    [
        ("print(' 42 ')", "42", True, True),
        ("print(42)", "43", False, True),
        ("print(42)", None, True, True),
        ("print(42)", "", False, True),
        ("print(42); raise SystemExit(3)", "42", False, False),
        ("1/0", None, False, False),
    ],
)
async def test_success_is_the_exit_code_and_the_stripped_output(
    here: Visitor, solution: str, expected: str | None, success: bool, run_success: bool
) -> None:
    made = await run(here, solution, expected_output=expected)
    assert (made["success"], made["run_success"], made["reason"]) == (success, run_success, "")


async def test_comparison_comes_before_the_cut_to_1000_characters(here: Visitor) -> None:
    made = await run(here, "import sys; print('x' * 5000); print('e' * 5000, file=sys.stderr)", expected_output="x" * 5000)
    assert made["success"] and made["stdout"] == "x" * 1000 and made["stderr"] == "e" * 1000
    assert not (await run(here, "print('x' * 5000)", expected_output="x" * 1000))["success"]


async def test_an_expected_output_of_megabytes_is_compared_whole(here: Visitor) -> None:
    made = await run(here, "print('x' * 3_000_000)", expected_output="x" * 3_000_000)
    assert made["success"]


@pytest.mark.parametrize("input", [None, ""])
async def test_no_input_makes_input_fail(here: Visitor, input: str | None) -> None:
    made = await run(here, "input()", input=input)
    assert not made["run_success"] and "EOFError" in made["stderr"]


async def test_the_folder_is_fresh_and_writable(here: Visitor) -> None:
    code = "import os; print(os.listdir('.')); open('x', 'w').write('1'); print(os.listdir('.'))"
    for _ in range(2):
        assert (await run(here, code))["stdout"] == "[]\n['x']\n"


async def test_time_out_is_told_in_stdout_and_reason(here: Visitor) -> None:
    made = await run(here, "print('begun')\nimport time; time.sleep(60)")
    assert made["stdout"] == "begun\nSuicide from timeout.\n"
    assert (made["success"], made["run_success"], made["reason"]) == (False, False, "worker_timeout")
    assert made["cost"] >= 2.0


async def test_memory_beyond_256_mb_ends_the_program(here: Visitor) -> None:
    made = await run(here, "x = bytearray(400 << 20); print(len(x))")
    assert (made["run_success"], made["reason"]) == (False, "") and made["stderr"]
    assert (await run(here, "x = bytearray(150 << 20); print(len(x))"))["run_success"]


async def test_cpp_runs_and_compile_errors_are_in_stderr(here: Visitor) -> None:
    good = "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << x * 2; }"
    assert (await run(here, good, type="cpp", input="21", expected_output="42"))["success"]
    bad = await run(here, "int main( {", type="cpp", expected_output="42")
    assert (bad["success"], bad["run_success"], bad["reason"], bad["cost"]) == (False, False, "", 0)
    assert "main.cpp:1" in bad["stderr"]


@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    [("so \\boxed{\\frac{1}{2}}", "0.5", True), ("\\boxed{3}", "4", False), ("x^2-1", "(x-1)(x+1)", True)],
)
async def test_math_really_verifies(here: Visitor, answer: str, truth: str, equal: bool) -> None:
    made = await run(here, answer, type="math", expected_output=truth)
    assert (made["success"], made["run_success"], made["reason"]) == (equal, True, "")


async def test_math_without_a_truth_is_invalid_input(here: Visitor) -> None:
    made = await run(here, "\\boxed{3}", type="math")
    assert (made["reason"], made["run_success"]) == ("invalid_input", False) and "expected_output" in made["stderr"]


@pytest.mark.parametrize("path", ["/run/batch", "/run/long-batch", "//run/long-batch", "/run//long-batch"])
async def test_a_batch_is_answered_in_order(here: Visitor, path: str) -> None:
    delays = [0.3, 0, 0.1, 0]
    submissions = [
        {"type": "python", "solution": f"import time; time.sleep({delay}); print({place})", "sub_id": f"s{place}"}
        for place, delay in enumerate(delays)
    ] + [{"type": "math", "solution": "1", "expected_output": "1"}]
    made = await here.post(path, type="batch", sub_id="b", submissions=submissions)
    assert made.keys() == {"sub_id", "results"} and made["sub_id"] == "b"
    assert [result["stdout"] for result in made["results"][:4]] == ["0\n", "1\n", "2\n", "3\n"]
    assert [result["sub_id"] for result in made["results"][:4]] == ["s0", "s1", "s2", "s3"]
    assert made["results"][4]["success"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/run", b"{"),
        ("/run", b'{"type": "python"}'),
        ("/run", b'{"type": "lean", "solution": ""}'),
        ("/run", b'{"type": "python", "solution": 3}'),
        ("/run/long-batch", b'{"submissions": []}'),
        ("/judge/batch", b'{"submissions": [{"type": "python"}]}'),
    ],
)
async def test_a_malformed_body_is_422(here: Visitor, path: str, body: bytes) -> None:
    answer = await here.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422, answer.text


async def test_calls_are_counted_by_adapter(here: Visitor) -> None:
    before = here.adapter_calls("code-judge", "ok", "none")
    await run(here, "")
    assert here.adapter_calls("code-judge", "ok", "none") == before + 1


async def batch(service: Service, *codes: str) -> list[dict[str, Any]]:
    submissions = [{"type": "python", "solution": code} for code in codes]
    answer = await service.client.post("/run/long-batch", json={"submissions": submissions})
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


async def test_what_is_not_done_by_the_deadline_is_queue_timeout_and_the_rest_is_kept() -> None:
    async with running(slots=1, codejudge_deadline_s=5) as service:
        done, *late = await batch(service, "say a", "hold", "say b", "say c")
        assert (done["stdout"], done["reason"]) == ("a", "")
        assert {result["reason"] for result in late} == {"queue_timeout"}
        assert not any(result["success"] or result["run_success"] for result in late)
        assert all(0.3 < result["cost"] < 30 for result in late)


async def test_the_deadline_is_55_seconds_for_clients_that_give_up_after_60() -> None:
    async with running() as service:
        await batch(service, "say a")
        assert 50 < service.worker.jobs[0].remaining_ms / 1000 <= 55


async def test_what_was_queue_timeout_is_answered_when_it_is_sent_again_alone() -> None:
    async with running(slots=2, codejudge_deadline_s=5) as service:
        first = await batch(service, "hold", "say b")
        assert [result["reason"] for result in first] == ["queue_timeout", ""]
        service.worker.let_go.set()
        assert [result["reason"] for result in await batch(service, "hold")] == [""]


async def test_what_the_machine_did_is_tried_again_before_anybody_hears_of_it() -> None:
    async with running() as service:
        assert [result["reason"] for result in await batch(service, "flaky 2", "say x")] == ["", ""]


async def test_a_machine_that_keeps_failing_is_queue_timeout_and_never_a_failed_program() -> None:
    async with running(codejudge_deadline_s=3) as service:
        [made] = await batch(service, "lose")
        assert (made["reason"], made["run_success"], made["success"]) == ("queue_timeout", False, False)


@pytest.mark.parametrize("status", ["cancelled", "rejected"])
async def test_what_the_caller_did_is_not_a_failed_program_either(status: str) -> None:
    async with running() as service:
        [made] = await batch(service, f"end {status}")
        assert made["reason"] == {"cancelled": "internal_error", "rejected": "invalid_input"}[status]


async def test_a_language_that_is_not_there_is_invalid_input_by_name() -> None:
    async with running() as service:
        answer = await service.client.post("/run", json={"type": "cpp", "solution": ""})
        assert answer.json()["reason"] == "invalid_input" and "cpp" in answer.json()["stderr"]


async def test_overload_is_429_so_that_the_whole_batch_is_sent_again() -> None:
    async with running(max_calls=2, max_calls_per_request=2) as service:
        held = soon(batch(service, "hold", "hold"))
        await until(lambda: service.gateway.dispatch.admission.calls == 2)
        answer = await service.client.post("/run/long-batch", json={"submissions": [{"type": "python", "solution": "say x"}]})
        problem(answer, 429, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        service.worker.let_go.set()
        assert [result["reason"] for result in await held] == ["", ""]


async def test_an_open_adapter_has_its_tenant_and_its_own_limit() -> None:
    async with running(keyless_adapters={"code-judge": {"tenant": "rl", "max_calls": 1}}) as service:
        held = soon(batch(service, "hold"))
        await until(lambda: len(service.worker.calls) == 1)
        assert service.worker.calls[0].tenant == "rl"
        problem(await service.client.post("/run", json={"type": "python", "solution": ""}), 429, "overloaded")
        assert (await service.run("say ours")).status_code == 200
        service.worker.let_go.set()
        await held
        assert [result["reason"] for result in await batch(service, "say again")] == [""]


async def test_a_caller_who_leaves_has_his_programs_killed() -> None:
    async with running() as service:
        held = soon(batch(service, "hold", "hold"))
        await until(lambda: len(service.worker.calls) == 2)
        held.cancel()
        await until(lambda: len(service.worker.cancelled) == 2)
        assert service.gateway.dispatch.admission.calls == 0
        await asyncio.gather(held, return_exceptions=True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json", "origin": "https://evil.example"}, 403),
        ({"content-type": "application/json", "host": "evil.example"}, 403),
    ],
)
async def test_a_web_page_cannot_use_the_adapter(headers: dict[str, str], status: int) -> None:
    async with running() as service:
        answer = await service.client.post("/run", content=b'{"type": "python", "solution": "say x"}', headers=headers)
        assert answer.status_code == status and not service.worker.calls


async def test_a_adapter_that_is_shut_is_404() -> None:
    async with running(adapters=["piston"]) as service:
        problem(await service.client.post("/run", json={"type": "python", "solution": ""}), 404, "not_found")
        assert (await service.client.get("/api/v2/runtimes")).status_code == 200
        assert (await service.run()).status_code == 200
