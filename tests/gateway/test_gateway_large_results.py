"""Large results at the gateway: bounded by settings, written beside the event loop, and not piled up."""

import asyncio
import threading
from typing import Any

import pytest
from gateway_harness import Service, lines, problem, running, until
from grpc_harness import caller

from exec_wire import Call, Display, Result, encode_json, verdict
from exec_wire.messages.sessions import Files

LARGE = 'a\0\x1b"\\é€😀\ufffd' * 100_000


def large(service: Service, text: str = LARGE) -> None:
    """What `flaky` answers from now on."""
    service.worker._flaky = lambda *_: verdict("ok", stdout=text, files={"f": "QUJD" * 200_000})  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/run", {"code": "say", "limits": {"output_kb": 4097}}, "$.limits.output_kb"),
        (
            "/v1/batch",
            {"calls": [{"code": "say"}, {"code": "say", "limits": {"output_kb": 65536}}]},
            "$.calls[1].limits.output_kb",
        ),
        ("/v1/sessions", {"limits": {"output_kb": 4097}}, "$.limits.output_kb"),
        ("/v1/judge", {"code": "", "tests": [{"expected": ""}], "limits": {"output_kb": 4097}}, "$.limits.output_kb"),
        ("/v1/judge", {"code": "", "tests": [{"expected": "", "limits": {"output_kb": 4097}}]}, "$.tests[0].limits.output_kb"),
    ],
)
async def test_more_output_than_the_setting_allows_is_422_and_names_the_field(path: str, body: Any, field: str) -> None:
    async with running() as service:
        refused = problem(await service.client.post(path, json=body), 422, "bad_field")
        assert refused["field"] == field
        assert "EXEC_MAX_OUTPUT_KB" in refused["detail"] and "4096" in refused["detail"]


async def test_the_most_output_can_be_set_and_is_told() -> None:
    async with running(max_output_kb=8192) as service:
        assert (await service.client.get("/v1/info")).json()["limits"]["maximum"]["output_kb"] == 8192
        assert (await service.run("say hi", limits={"output_kb": 8192})).json()["stdout"] == "hi"
        problem(await service.run("say hi", limits={"output_kb": 8193}), 422, "bad_field")


async def test_large_results_are_the_same_by_every_route(monkeypatch: pytest.MonkeyPatch) -> None:
    from exec_service.api import encoding

    threads = []
    in_slices = encoding.in_slices
    monkeypatch.setattr(encoding, "in_slices", lambda m: (threads.append(threading.current_thread()), in_slices(m))[1])
    async with running(grpc=True) as service:
        large(service)
        assert (await service.run("flaky 0")).json()["stdout"] == LARGE
        [landed] = lines(await service.batch({"code": "flaky 0"}))
        assert (landed.stdout, len(landed.files["f"])) == (LARGE, 800_000)
        both = (await service.batch({"code": "flaky 0"}, {"code": "say small"}, stream="false")).json()["results"]
        assert [one["stdout"] for one in both] == [LARGE, "small"]
        async with caller(service.grpc_target) as grpc:
            assert (await grpc.run("flaky 0")).stdout == LARGE
    assert len(threads) == 3 and threading.main_thread() not in threads


@pytest.mark.parametrize(
    "message",
    [
        Result("ok", stdout=LARGE, stderr="x" * 300_000, files={"a": "b" * 100_000, "c": ""}, display=[Display({"t": LARGE})]),
        Result("ok"),
        Files({"a": LARGE}),
    ],
)
async def test_json_in_slices_is_the_same_json(message: Any) -> None:
    from exec_service.api.encoding import encode, in_slices

    assert in_slices(message) == encode_json(message) == await encode(message)


async def test_no_program_is_started_while_unread_results_fill_all_of_admission() -> None:
    async with running(max_bytes=200_000, max_body_bytes=50_000) as service:
        service.worker._flaky = lambda *_: verdict("ok", stdout="x" * 50_000)  # type: ignore[method-assign]
        dispatch = service.gateway.dispatch
        async with dispatch.run([Call("flaky 0")] * 40) as order:
            await until(lambda: dispatch.admission.bytes > dispatch.admission.max_bytes)
            for _ in range(200):
                await asyncio.sleep(0.002)
            assert len(service.worker.jobs) < 20
            seen = 0
            while landed := await order.take():
                seen += len(landed)
            assert seen == 40
        assert dispatch.admission.bytes == 0


async def test_results_that_wait_for_each_other_do_not_hold_up_everybody() -> None:
    async with running(max_bytes=4_000_000, max_body_bytes=1_000_000, slots=2) as service:
        large(service)
        calls = [{"code": "flaky 0", "deadline_s": 600}] * 12
        refused = problem(await service.batch(*calls, stream="false"), 429, "overloaded")
        assert "as a stream" in refused["detail"]
        await until(lambda: service.gateway.dispatch.admission.bytes == 0)
        assert (await service.run("say well")).json()["stdout"] == "well"
