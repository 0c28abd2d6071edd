"""One call through the real app: what comes back, and who made it."""

import asyncio
from typing import Any

import msgspec
import pytest
from gateway_harness import Service, lines, problem, running, soon, until
from msgspec.structs import replace

from exec_service.dispatch.requests import CallRequest
from exec_wire.messages.calls import Call, Result
from exec_wire.queue.protocol import Answer, Job

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_run_returns_the_result_with_the_callers_label(service: Service) -> None:
    response = await service.run("say hello", id="label-1")
    result = msgspec.json.decode(response.content, type=Result)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert (result.status, result.stdout, result.id, result.index, result.worker) == ("ok", "hello", "label-1", 0, "w1")


async def test_the_programs_failure_is_a_normal_answer(service: Service) -> None:
    response = await service.run("fail")
    assert (response.status_code, response.json()["status"], response.json()["exit_code"]) == (200, "error", 1)


async def test_timings_are_the_gateways_total_and_what_the_worker_did_not_account_for(service: Service) -> None:
    timings = (await service.run()).json()["timings"]
    assert (timings["start_ms"], timings["run_ms"]) == (1.0, 2.0)
    assert timings["total_ms"] > 0
    assert timings["queue_ms"] == pytest.approx(max(0.0, timings["total_ms"] - 3.0), abs=0.01)


async def test_the_worker_gets_the_call_without_what_only_the_gateway_needs(service: Service) -> None:
    await service.run("say x", id="mine", deadline_s=30, tags={"run": "r", "step": 3}, idempotency_key="k", argv=["a"])
    [job], [call] = service.worker.jobs, service.worker.calls
    assert call == Call(code="say x", argv=["a"])
    assert job.id != "mine"
    assert job.reply_to == "g1"
    assert 29_000 < job.remaining_ms <= 30_000


async def test_ids_are_unique_whatever_the_callers_send(service: Service) -> None:
    await asyncio.gather(*(service.run(id="same") for _ in range(5)))
    assert len({job.id for job in service.worker.jobs}) == 5


async def test_request_id_and_traceparent_pass_through_to_the_result(service: Service) -> None:
    headers = {"x-request-id": "req-7", "traceparent": TRACEPARENT}
    response = await service.client.post("/v1/run", json={"code": "say x"}, headers=headers)
    assert response.headers["x-request-id"] == "req-7"
    assert (response.json()["request_id"], response.json()["traceparent"]) == ("req-7", TRACEPARENT)


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, 'quo"te', "é"])
async def test_an_unusable_request_id_is_replaced(service: Service, bad: str) -> None:
    response = await service.client.post("/v1/run", json={"code": ""}, headers={b"x-request-id": bad.encode("latin-1")})
    assert response.headers["x-request-id"] not in ("", bad)
    assert response.json()["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize(
    "bad", ["nonsense", "ff" + TRACEPARENT[2:], "00-" + "0" * 32 + TRACEPARENT[35:], TRACEPARENT.upper(), TRACEPARENT + "x"]
)
async def test_a_traceparent_of_a_wrong_shape_is_dropped(service: Service, bad: str) -> None:
    response = await service.client.post("/v1/run", json={"code": ""}, headers={"traceparent": bad})
    assert response.json()["traceparent"] == ""


async def test_an_answer_that_cannot_be_read_is_an_internal_error(service: Service) -> None:
    result = (await service.run("garbage")).json()
    assert (result["status"], result["blame"], result["retryable"]) == ("internal_error", "infra", True)


async def test_the_second_answer_of_a_call_is_counted_and_dropped(service: Service) -> None:
    assert (await service.run("twice")).json()["status"] == "ok"
    await asyncio.sleep(0)
    assert (await service.run("say after")).json()["stdout"] == "after"
    assert await service.metric("exec_late_answers_total") == 1


async def test_no_more_calls_are_released_than_the_window_of_slots(service: Service) -> None:
    answering = soon(service.batch(*({"code": "hold"} for _ in range(20))))
    await until(lambda: len(service.worker.jobs) == 4)
    assert len(service.gateway.dispatch.released) == 5  # ceil(1.25 x 4)
    assert len(service.gateway.dispatch.waiting) == 15
    service.worker.let_go.set()
    response = await answering
    assert len(lines(response)) == len(service.worker.jobs) == 20


@pytest.mark.parametrize(("holds", "window"), [(3, 8), (1000, 9)])
async def test_one_more_call_is_released_for_each_that_a_worker_would_hold_at_most_one_per_slot(
    service: Service, holds: int, window: int
) -> None:
    service.worker.info = replace(service.worker.info, holds=holds)
    await until(lambda: service.gateway.worker_registry.window == window)
    answering = soon(service.batch(*({"code": "hold"} for _ in range(20))))
    await until(lambda: len(service.worker.jobs) == 4)
    assert len(service.gateway.dispatch.released) == window
    service.worker.let_go.set()
    assert len(lines(await answering)) == 20


async def test_as_many_calls_as_were_released_go_before_another_tenants_however_many_wait(service: Service) -> None:
    service.worker.info = replace(service.worker.info, holds=4)
    await until(lambda: service.gateway.worker_registry.window == 9)
    many = soon(service.batch(*({"code": "hold", "tenant": "many"} for _ in range(4000))))
    await until(lambda: len(service.worker.jobs) == 4 and len(service.gateway.dispatch.waiting) == 3991)
    one = soon(service.run("say hi", tenant="one"))
    await until(lambda: len(service.gateway.dispatch.waiting) == 3992)
    service.worker.let_go.set()
    assert (await one).json()["status"] == "ok"
    before = [call.tenant for call in service.worker.calls].index("one")
    assert before <= 9 + 1  # what was released, and one when it is its turn
    await many


async def test_a_call_waits_for_a_worker_to_come() -> None:
    async with running(worker=False) as service:
        answering = soon(service.run("say late"))
        await until(lambda: len(service.gateway.dispatch.waiting) == 1)
        assert not service.gateway.dispatch.released
        async with service.worker:
            assert (await answering).json()["stdout"] == "late"


async def test_calls_wait_while_no_worker_has_slots() -> None:
    async with running(slots=0) as service:
        waiting = soon(service.batch({"code": "hold"}, {"code": "hold"}))
        await until(lambda: len(service.gateway.dispatch.waiting) == 2)
        await asyncio.sleep(0.1)
        assert not service.gateway.dispatch.released
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_calls_are_released_first_come_first_served() -> None:
    async with running(slots=1) as service:
        response = await service.batch(*({"code": f"say {number}"} for number in range(10)))
        assert response.status_code == 200
        assert service.worker.codes == [f"say {number}" for number in range(10)]


async def test_what_could_not_be_published_is_published_again_in_its_order(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = service.gateway.dispatch._queue.publish, iter([True, True, False])

    async def flaky(jobs: list[Job]) -> None:
        if next(failures, False):
            raise ConnectionError("the queue is away")
        await real(jobs)

    monkeypatch.setattr(service.gateway.dispatch._queue, "publish", flaky)
    monkeypatch.setattr("exec_service.dispatch.release.RETRY_S", 0.01)
    response = await service.batch(*({"code": f"say {number}"} for number in range(3)), stream="false")
    assert [result["stdout"] for result in response.json()["results"]] == ["0", "1", "2"]
    assert service.worker.codes == ["say 0", "say 1", "say 2"]


async def test_the_reader_survives_a_queue_that_fails(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = service.gateway.dispatch._queue.receive, iter([True])

    async def flaky() -> list[Answer]:
        if next(failures, False):
            raise ConnectionError("the queue is away")
        return await real()

    monkeypatch.setattr(service.gateway.dispatch._queue, "receive", flaky)
    monkeypatch.setattr("exec_service.dispatch.dispatch.RETRY_S", 0.01)
    for text in ("one", "two", "three"):
        assert (await service.run(f"say {text}")).json()["stdout"] == text


async def test_an_answer_that_breaks_the_reader_loses_no_other_and_is_counted(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = CallRequest.deliver, iter([True])

    def flaky(*given: Any) -> None:
        if next(failures, False):
            raise ZeroDivisionError
        real(*given)

    monkeypatch.setattr(CallRequest, "deliver", flaky)
    results = lines(await service.batch(*({"code": f"say {number}", "deadline_s": 3} for number in range(4))))
    assert sorted(result.status for result in results) == ["internal_error", "ok", "ok", "ok"]
    assert await service.metric("exec_task_failures_total", task="answers") == 1


async def test_unknown_fields_are_ignored(service: Service) -> None:
    assert (await service.run("say x", from_the_future=1)).status_code == 200


async def test_require_tier_is_met_by_the_best_live_worker() -> None:
    async with running(tier="B") as service:
        assert (await service.run(require_tier="B")).status_code == 200
        assert (await service.run(require_tier="C")).status_code == 200
        body = problem(await service.run(require_tier="A"), 422, "tier_unavailable")
        assert body["field"] == "$.require_tier"
        body = problem(await service.batch({"code": ""}, {"code": "", "require_tier": "S"}), 422, "tier_unavailable")
        assert body["field"] == "$.calls[1].require_tier"
        assert service.worker.codes == ["say hi", "say hi"]


async def test_require_tier_without_a_worker_is_503_and_worth_retrying() -> None:
    async with running(worker=False) as service:
        assert problem(await service.run(require_tier="E"), 503, "not_ready")["retry_after_s"] == 1.0
