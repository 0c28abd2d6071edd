"""`POST /v1/judge` and `/v1/verify` at the gateway: refusals, retries, and what is charged."""

import asyncio
from typing import Any

import httpx
import msgspec
import pytest
from gateway_harness import Service, problem, running, soon, until

from exec_wire.messages.judging import Verification


async def judge(service: Service, code: str = "echo", *tests: tuple[str, str], **fields: object) -> httpx.Response:
    asked = [{"stdin": stdin, "expected": expected} for stdin, expected in tests or (("x", "x"),)]
    return await service.client.post("/v1/judge", json={"code": code, "tests": asked, **fields})


async def verify(service: Service, **fields: object) -> httpx.Response:
    return await service.client.post("/v1/verify", json=fields)


def lines(response: httpx.Response) -> list[Verification]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return sorted(msgspec.json.Decoder(Verification).decode_lines(response.content), key=lambda one: one.index)


async def test_answer_has_a_verdict_for_each_test(shared: Service) -> None:
    body = (await judge(shared, "echo", ("1", "1"), ("2", "3"), id="mine")).json()
    assert (body["verdict"], body["score"], body["passed"], body["total"], body["id"]) == ("WA", 0.5, 1, 2, "mine")
    assert [(test["index"], test["verdict"], test["message"]) for test in body["tests"]] == [
        (0, "AC", ""),
        (1, "WA", "token 1 differs"),
    ]
    assert body["tests"][1]["result"]["stdout"] == "2" and not body["retryable"] and body["request_id"]


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        ("error", "RE"),
        ("signal", "RE"),
        ("timeout", "TLE"),
        ("cpu_limit", "TLE"),
        ("memory_limit", "MLE"),
        ("output_limit", "OLE"),
        ("compile_error", "CE"),
    ],
)
async def test_status_becomes_a_verdict(shared: Service, status: str, verdict: str) -> None:
    body = (await judge(shared, f"end {status}")).json()
    assert (body["verdict"], body["score"], body["retryable"]) == (verdict, 0.0, False)


async def test_infra_results_are_tried_again_and_not_seen(service: Service) -> None:
    body = (await judge(service, "flaky 3", ("1", "1"), ("2", "2"))).json()
    assert (body["verdict"], body["score"]) == ("AC", 1.0)
    assert len(service.worker.jobs) == 8


async def test_infra_results_that_do_not_end_leave_no_score(service: Service) -> None:
    body = (await judge(service, "flaky 4", ("1", "1"))).json()
    assert (body["verdict"], body["score"], body["retryable"], body["passed"]) == ("INFRA", None, True, 0)
    assert body["tests"][0]["retryable"] and len(service.worker.jobs) == 4


async def test_rejected_call_is_not_scored_and_not_retryable(shared: Service) -> None:
    body = (await judge(shared, "end rejected")).json()
    assert (body["verdict"], body["score"], body["retryable"]) == ("INFRA", None, False)


async def test_expected_answers_never_reach_a_worker(service: Service) -> None:
    await judge(service, "echo", ("1", "the secret"))
    assert b"the secret" not in service.worker.jobs[0].payload


async def test_fields_of_the_judgement_reach_its_calls(service: Service) -> None:
    await judge(service, "echo", ("1", "1"), limits={"wall_s": 3}, tenant="t", priority="eval", tags={"run": "r"})
    [call] = service.worker.calls
    assert (call.limits.wall_s, call.tenant, call.priority, call.stdin) == (3, "t", "eval", "1")
    assert 0 < service.worker.jobs[0].remaining_ms <= 60_000


async def test_first_test_of_a_compiled_program_goes_alone(service: Service) -> None:
    service.worker.info = msgspec.structs.replace(service.worker.info, needs=["python", "cpp"])
    await until(lambda: "cpp" in service.gateway.worker_registry.languages)
    asking = soon(judge(service, "hold", *[("", "")] * 4, language="cpp"))
    await until(lambda: len(service.worker.jobs) == 1)
    await asyncio.sleep(0.05)
    assert len(service.worker.jobs) == 1
    service.worker.let_go.set()
    assert (await asking).json()["score"] == 1.0
    assert len(service.worker.jobs) == 4


async def test_many_tests_let_others_pass(service: Service) -> None:
    asking = soon(judge(service, "hold", *[("", "")] * 200))
    await until(lambda: len(service.worker.jobs) == 4)
    assert len(service.gateway.dispatch.waiting) + len(service.gateway.dispatch.released) == 16
    assert service.gateway.dispatch.admission.calls == 200
    service.worker.let_go.set()
    assert (await asking).json()["passed"] == 200
    assert (service.gateway.dispatch.admission.calls, service.gateway.dispatch.admission.bytes) == (0, 0)


async def test_stop_on_fail_skips_also_what_had_ended_well(shared: Service) -> None:
    body = (await judge(shared, "echo", ("1", "1"), ("1", "2"), ("3", "3"), stop_on_fail=True)).json()
    assert [test["verdict"] for test in body["tests"]] == ["AC", "WA", "SKIPPED"]
    assert (body["verdict"], body["score"], body["tests"][2]["result"]) == ("WA", 1 / 3, None)


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"tests": []}, "bad_field", "$.tests"),
        ({"language": "cobol"}, "unknown_language", "$.language"),
        ({"checker": {"kind": "program"}}, "bad_field", "$.checker.code"),
        ({"checker": {"kind": "program", "code": "x", "language": "cobol"}}, "unknown_language", "$.checker.language"),
        ({"checker": {"kind": "fuzzy"}}, "bad_field", "$.checker.kind"),
        ({"checker": {"abs_tol": -1}}, "bad_field", "$.checker.abs_tol"),
        ({"function": "solve()"}, "bad_field", "$.function"),
        ({"function": "solve", "tests": [{"stdin": "[]", "expected": "1"}, {"stdin": "5"}]}, "bad_field", "$.tests[1].stdin"),
        ({"function": "solve", "tests": [{"stdin": "[]", "expected": "yes"}]}, "bad_field", "$.tests[0].expected"),
        ({"function": "solve", "tests": [{"stdin": "[" * 100_000}]}, "bad_field", "$.tests[0].stdin"),
        ({"compile_args": ["\0"]}, "bad_field", "$.compile_args[0]"),
        ({"tests": [{"argv": ["a\0"]}]}, "bad_field", "$.tests[0].argv[0]"),
        ({"tests": [{"limits": {"wall_s": 0}}]}, "bad_field", "$.tests[0].limits.wall_s"),
        ({"require_tier": "S"}, "tier_unavailable", "$.require_tier"),
        ({"deadline_s": 0}, "bad_field", "$.deadline_s"),
        ({"code": None}, "bad_field", "$.code"),
    ],
)
async def test_wrong_requests_are_422_and_name_the_field(
    shared: Service, fields: dict[str, Any], code: str, field: str
) -> None:
    response = await shared.client.post("/v1/judge", json={"code": "echo", "tests": [{}]} | fields)
    assert problem(response, 422, code)["field"] == field


async def test_functions_are_pythons(service: Service) -> None:
    service.worker.info = msgspec.structs.replace(service.worker.info, needs=["python", "cpp"])
    await until(lambda: "cpp" in service.gateway.worker_registry.languages)
    response = await judge(service, "x", ("[]", "1"), language="cpp", function="solve")
    assert problem(response, 422, "bad_field")["field"] == "$.function"


async def test_too_many_tests_are_413() -> None:
    async with running(max_calls_per_request=3) as service:
        assert problem(await judge(service, "echo", *[("", "")] * 4), 413, "too_many_calls")["field"] == "$.tests"
        many = await service.client.post("/v1/verify", json={"items": [{"answer": "", "truth": ""}] * 4})
        assert problem(many, 413, "too_many_calls")["field"] == "$.items"


async def test_judgement_is_admitted_as_a_whole_or_not_at_all() -> None:
    async with running(max_calls=10, max_calls_per_request=10) as service:
        asking = soon(judge(service, "hold", *[("", "")] * 8))
        await until(lambda: len(service.worker.jobs) == 4)
        problem(await judge(service, "echo", *[("1", "1")] * 3), 429, "overloaded")
        service.worker.let_go.set()
        assert (await asking).json()["score"] == 1.0


async def test_judgement_that_can_never_fit_is_413() -> None:
    async with running(max_bytes=1 << 20, max_body_bytes=1 << 20) as service:
        problem(await judge(service, "echo " + "x" * 600_000, ("", ""), ("", "")), 413, "body_too_large")


async def test_drain_waits_for_a_judgement_and_finishes_it() -> None:
    async with running(drain_s=5, slots=1) as service:
        asking = soon(judge(service, "hold", *[("", "")] * 5))
        await until(lambda: len(service.worker.jobs) == 1)
        draining = soon(service.gateway.drain(5))
        await asyncio.sleep(0.05)
        problem(await judge(service), 503, "draining")
        service.worker.let_go.set()
        assert (await asking).json()["score"] == 1.0
        await draining


async def test_drain_that_takes_too_long_answers_without_a_score() -> None:
    async with running(slots=1) as service:
        asking = soon(judge(service, "silent", *[("", "")] * 40))
        await until(lambda: len(service.worker.jobs) == 1)
        await service.gateway.drain(0.1)
        body = (await asking).json()
        assert (body["verdict"], body["score"], body["retryable"]) == ("INFRA", None, True)


async def test_caller_who_leaves_cancels_the_judgement(service: Service) -> None:
    leaving = soon(service.client.post("/v1/judge", json={"code": "silent", "tests": [{}] * 30}))
    await until(lambda: len(service.worker.jobs) == 4)
    leaving.cancel()
    await until(lambda: len(service.worker.cancelled) == 4)
    await until(lambda: service.gateway.dispatch.admission.calls == 0)
    assert (len(service.worker.jobs), len(service.gateway.dispatch.waiting)) == (4, 0)


async def test_one_item_is_answered_as_json_and_many_as_lines(shared: Service) -> None:
    one = await verify(shared, answer="5", truth="5.0", kind="numeric", id="a")
    assert (one.json()["equal"], one.json()["id"], one.headers["content-type"]) == (True, "a", "application/json")
    many = await verify(shared, items=[{"answer": str(n), "truth": "1", "kind": "exact"} for n in range(3)])
    assert [(found.index, found.equal) for found in lines(many)] == [(0, False), (1, True), (2, False)]
    assert lines(await verify(shared, items=[])) == []


async def test_kinds_that_need_no_sandbox_send_no_call(service: Service) -> None:
    items = [{"answer": "A", "truth": "A", "kind": kind} for kind in ("exact", "multiple_choice")]
    assert [found.equal for found in lines(await verify(service, items=items))] == [True, True]
    assert service.worker.jobs == []


async def test_answer_that_is_not_there_is_not_equal(service: Service) -> None:
    body = (await verify(service, answer="5", truth="5", extract="boxed")).json()
    assert (body["equal"], body["extracted"], body["blame"]) == (False, None, "none")
    assert service.worker.jobs == []


async def test_truth_of_another_kind_is_not_scored(shared: Service) -> None:
    body = (await verify(shared, answer="5", truth="five", kind="numeric")).json()
    assert (body["equal"], body["status"], body["blame"], body["retryable"]) == (None, "rejected", "client", False)


async def test_math_is_a_call_with_our_program_and_the_texts_as_data(service: Service) -> None:
    await verify(service, answer=r"\boxed{print(1)}", truth="2x", wall_s=2, tenant="t", tags={"run": "r"})
    call = service.worker.calls[0]
    assert "math_verify" in call.code and "print(1)" not in call.code
    assert msgspec.json.decode(call.stdin) == {"answer": r"\boxed{print(1)}", "truth": r"\boxed{2x}"}
    assert (call.limits.wall_s, call.tenant) == (2, "t")


async def test_math_without_a_word_from_the_program_is_our_fault(service: Service) -> None:
    body = (await verify(service, answer="5", truth="5")).json()  # the scripted worker prints something else
    assert (body["equal"], body["status"], body["blame"]) == (None, "internal_error", "infra")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"answer": "5"}, "$.truth"),
        ({"answer": "5", "truth": "5", "kind": "vibes"}, "$.kind"),
        ({"answer": "5", "truth": "5", "wall_s": 0}, "$.wall_s"),
        ({"items": 5}, "$.items"),
        ({"items": [{"answer": "5", "truth": "5"}, {"answer": "5"}]}, "$.items[1].truth"),
    ],
)
async def test_wrong_items_are_422_and_name_the_field(shared: Service, body: dict[str, Any], field: str) -> None:
    assert problem(await verify(shared, **body), 422, "bad_field")["field"] == field


async def test_routes_are_described_and_counted(service: Service) -> None:
    await judge(service)
    await verify(service, answer="5", truth="5", kind="exact")
    document = (await service.client.get("/openapi.json")).json()
    assert {"/v1/judge", "/v1/verify"} <= document["paths"].keys()
    assert {"Judge", "Judgement", "Test", "Checker", "Verdict", "Verify", "VerifyBatch", "Verification"} <= document[
        "components"
    ]["schemas"].keys()
    for route in ("/v1/judge", "/v1/verify"):
        assert await service.metric("exec_http_requests_total", route=route, code="200") == 1
    assert (await service.client.get("/docs")).status_code == 200


async def test_cancelling_some_items_by_their_tags_leaves_the_others() -> None:
    async with running(slots=1) as service:
        items = [{"answer": "5", "truth": "5", "tags": {"run": "ab"[n % 2]}} for n in range(40)]
        asking = soon(verify(service, items=items))
        await until(lambda: len(service.worker.jobs) > 3)
        await service.client.delete("/v1/calls", params={"run": "a"})
        found = lines(await asking)
    assert {one.status for one in found[1::2]} == {"internal_error"}  # the scripted worker is not Math-Verify
    assert {one.status for one in found[0::2]} == {"internal_error", "cancelled"}
    assert all(one.equal is None for one in found)
