"""Fields that nobody knows are accepted and named in the result."""

from typing import Any

import httpx
import pytest
from gateway_harness import Service, lines, running
from grpc_harness import all_results, caller, result

from exec_wire import proto

UNKNOWN = b"\xf8\x3f\x01"  # field 1023 of a protobuf message, a number


async def test_an_unknown_field_is_accepted_and_told_with_a_suggestion(shared: Service) -> None:
    body = (await shared.run("say hi", limits={"wall": 3}, stdn="x", qqq=[1, {"a": None}])).json()
    assert (body["status"], body["stdout"]) == ("ok", "hi")
    assert body["warnings"] == [
        "limits.wall: unknown field, did you mean wall_s?",
        "stdn: unknown field, did you mean stdin?",
        "qqq: unknown field",
    ]


async def test_a_call_without_unknown_fields_has_no_warnings(shared: Service) -> None:
    fields: dict[str, Any] = {"limits": {"wall_s": 3}, "tags": {"run": "r"}, "files": {"wall": ""}, "env": {"wall": ""}}
    assert (await shared.run("say hi", **fields)).json()["warnings"] == []


async def test_every_result_of_a_batch_has_the_warnings_of_its_call(shared: Service) -> None:
    calls = [{"code": "say 0"}, {"code": "say 1", "tags": {"steps": 1}}, {"code": "say 2"}]
    body = {"calls": calls, "strem": True}
    results = lines(await shared.client.post("/v1/batch", json=body))
    assert {result.index: result.warnings for result in results} == {
        0: ["strem: unknown field"],
        1: ["tags.steps: unknown field, did you mean step?"],
        2: [],
    }


async def test_warnings_belong_to_the_caller_and_not_to_the_recorded_result(shared: Service) -> None:
    odd = (await shared.run("say once", idempotency_key="w", foo=1)).json()
    plain = (await shared.run("say once", idempotency_key="w")).json()
    assert (odd["warnings"], plain["warnings"], plain["stdout"]) == (["foo: unknown field"], [], "once")


async def test_unknown_fields_without_end_are_told_in_few_words(shared: Service) -> None:
    body = (await shared.run("say hi", **{f"x{number}": 1 for number in range(5000)})).json()
    assert len(body["warnings"]) == 9 and "more" in body["warnings"][-1]


async def test_a_wrong_value_is_refused_although_there_is_an_unknown_field(shared: Service) -> None:
    answer = await shared.run("say hi", foo=1, limits={"wall_s": -1})
    assert (answer.status_code, answer.json()["field"]) == (422, "$.limits.wall_s")


async def test_judgements_and_verifications_carry_warnings(shared: Service) -> None:
    tests = [{"stdin": "a", "expected": "a"}, {"stdin": "b", "expcted": "b"}]
    judged = (await shared.client.post("/v1/judge", json={"code": "echo", "tests": tests})).json()
    assert judged["warnings"] == ["tests[1].expcted: unknown field, did you mean expected?"]
    item = {"answer": "7", "truth": "7", "kind": "exact"}
    one = (await shared.client.post("/v1/verify", json=item | {"extrct": "none"})).json()
    assert (one["equal"], one["warnings"]) == (True, ["extrct: unknown field, did you mean extract?"])
    answer: httpx.Response = await shared.client.post("/v1/verify", json={"items": [item, item | {"z": 1}]})
    several = {int(line["index"]): line["warnings"] for line in map(_json, answer.text.splitlines())}
    assert several == {0: [], 1: ["z: unknown field"]}


def _json(line: str) -> dict[str, Any]:
    made: dict[str, Any] = httpx.Response(200, text=line).json()
    return made


@pytest.mark.parametrize("inside", [True, False])
async def test_grpc_tells_unknown_fields_by_their_numbers(inside: bool) -> None:
    async with running(grpc=True) as service, caller(service.grpc_target) as calling:
        in_limits = b"\x3a\x03" if inside else b""
        message = proto.CALL.write(code="say hi") + in_limits + UNKNOWN
        told = result(proto.RESULT.read(await calling.run_(message, timeout=30)))
        assert (told.stdout, told.warnings) == ("hi", [f"{'limits.' * inside}field 1023: unknown field"])
        call = proto.CALL.write(code="say there") + UNKNOWN
        batch = proto.CALL_BATCH.write(calls=[{"code": "say a"}]) + b"\x0a" + bytes([len(call)]) + call
        results = await all_results(calling.run_batch_(batch, timeout=30))
        assert {one.stdout: one.warnings for one in results} == {"a": [], "there": ["field 1023: unknown field"]}


@pytest.mark.parametrize("body", [b'{"code": "x", "a": 1, "\xff": 1}', b'{"code": "x", "limits": {"a": 1, "\xff": 2}}'])
async def test_a_name_that_is_not_utf8_is_a_bad_request(shared: Service, body: bytes) -> None:
    answer = await shared.client.post("/v1/run", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_json")
