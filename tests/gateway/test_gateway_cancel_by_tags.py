"""`DELETE /v1/calls`: what matches is cancelled and answered, what waits at once, what runs after the kill."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import httpx
import pytest
from gateway_harness import Service, lines, problem, running, soon, until

from exec_service.dispatch.cancellation import CANCELS_PER_TURN
from exec_wire.messages.calls import Call, Selection, Tags
from exec_wire.queue.protocol import Job


async def cancel(service: Service, **query: object) -> int:
    response = await service.client.delete("/v1/calls", params=query)  # type: ignore[arg-type]
    assert response.status_code == 200, response.text
    count: int = response.json()["cancelled"]
    return count


def held(count: int = 1, **tags: object) -> list[dict[str, object]]:
    return [{"code": "hold", "id": str(number), "tags": tags} for number in range(count)]


def assert_cancelled(response: httpx.Response) -> None:
    result = response.json()
    assert (result["status"], result["blame"], result["retryable"]) == ("cancelled", "client", False)


def assert_empty(service: Service) -> None:
    dispatch = service.gateway.dispatch
    assert (len(dispatch.waiting), len(dispatch.released), len(dispatch.table.deadlines), len(dispatch.table.jobs)) == (
        0,
        0,
        0,
        0,
    )
    assert not dispatch.table.idempotency._running


async def test_what_waits_is_cancelled_at_once_on_its_own_connection() -> None:
    async with running(worker=False) as service:
        mine = [soon(service.run(**call)) for call in held(3, run="r")]  # type: ignore[arg-type]
        other = soon(service.run("say other", tags={"run": "s"}))
        await until(lambda: len(service.gateway.dispatch.waiting) == 4)
        assert await cancel(service, run="r") == 3
        answers = await asyncio.wait_for(asyncio.gather(*mine), 30)
        for number, answer in enumerate(answers):
            assert_cancelled(answer)
            assert answer.json()["id"] == str(number)
        assert await service.metric("exec_calls_total", status="cancelled", blame="client") == 3
        async with service.worker:
            assert (await other).json()["stdout"] == "other"
        assert service.worker.codes == ["say other"]


async def test_what_runs_is_answered_only_after_the_worker_killed_it(service: Service) -> None:
    service.worker.kill_gate.clear()
    answering = soon(service.run("hold", tags={"run": "r"}))
    await until(lambda: len(service.worker.jobs) == 1)
    assert await cancel(service, run="r") == 1
    await until(lambda: len(service.worker.cancelled) == 1)
    await asyncio.sleep(0.05)
    assert not answering.done()
    assert len(service.gateway.dispatch.released) == 1  # its slot is not free yet
    service.worker.kill_gate.set()
    answer = await answering
    assert_cancelled(answer)
    assert answer.json()["worker"] == "w1"
    assert_empty(service)


async def test_released_to_the_queue_but_taken_by_no_worker_is_answered_at_once() -> None:
    async with running(slots=1, answer_grace_s=300) as service:
        blocking = soon(service.run("hold", tags={"run": "other"}))
        await until(lambda: len(service.worker.jobs) == 1)
        untaken = soon(service.run("say never", tags={"run": "r"}))
        await until(lambda: len(service.gateway.dispatch.released) == 2)
        assert await cancel(service, run="r") == 1
        assert_cancelled(await asyncio.wait_for(untaken, 30))
        service.worker.let_go.set()
        await blocking
        assert service.worker.codes == ["hold"]


async def test_the_rest_of_a_stream_goes_on(service: Service) -> None:
    body = {"calls": [*held(2, run="r", step=1), *held(1, run="r", step=2)]}
    answering = soon(service.client.post("/v1/batch", json=body))
    await until(lambda: len(service.worker.jobs) == 3)
    assert await cancel(service, run="r", step=1) == 2
    await until(lambda: len(service.worker.cancelled) == 2)
    service.worker.let_go.set()
    assert sorted((result.index, result.status) for result in lines(await answering)) == [
        (0, "cancelled"),
        (1, "cancelled"),
        (2, "ok"),
    ]


@pytest.mark.parametrize(
    ("query", "picked"),
    [
        ({"run": "a"}, {0, 1, 2}),
        ({"run": "a", "step": "1"}, {0, 1}),
        ({"run": "a", "step": "1", "group": "g", "rollout": "x"}, {0}),
        ({"step": "0"}, {2}),
        ({"step": "-1"}, {3}),
        ({"group": "g"}, {0, 1, 3}),
        ({"rollout": "x"}, {0, 3}),
        ({"rollout": "nobody"}, set()),
        ({"run": "a", "group": "h"}, set()),
        ({"run": "a", "tenant": "other"}, {5}),
        ({"run": "a", "tenant": ""}, {0, 1, 2}),
    ],
)
async def test_all_that_is_given_must_match(query: dict[str, str], picked: set[int]) -> None:
    async with running(worker=False) as service:
        tags = Tags("a", 1, "g", "x"), Tags("a", 1, "g", "y"), Tags("a", 0), Tags("b", -1, "g", "x"), Tags()
        calls = [*(Call("", tags=one) for one in tags), Call("", tags=Tags("a"), tenant="other")]
        async with service.gateway.dispatch.run(calls) as order:
            assert await cancel(service, **query) == len(picked)
            assert {result.index for result in order.arrived} == picked
            assert {result.status for result in order.arrived} <= {"cancelled"}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", None),
        ("index=0", None),
        ("run=a&index=0", None),
        ("request=", "request"),
        ("request=" + "x" * 129, "request"),
        ("request=a&request=b", "request"),
        ("request=a&index=-1", "index[0]"),
        ("request=a&index=0&index=one", "index[1]"),
        ("request=a" + "&index=0" * 4097, "index"),
        ("tenant=t", None),
        ("run=", "run"),
        ("run=" + "x" * 257, "run"),
        ("run=a&run=b", "run"),
        ("step=one", "step"),
        ("step=", "step"),
        ("step=null", "step"),
        ("step=1.5", "step"),
        ("step=" + "9" * 5000, "step"),
        ("run=a&colour=red", "colour"),
        ("run=a&Step=1", "Step"),
        ("run=a&=1", None),
    ],
)
async def test_a_query_that_cannot_be_meant_is_422_and_names_the_parameter(
    shared: Service, query: str, field: str | None
) -> None:
    async with shared.gateway.dispatch.run([Call("hold", tags=Tags("a", 1))]) as order:
        body = problem(await shared.client.delete(f"/v1/calls?{query}"), 422, "bad_query")
        assert body.get("field") == field and body["detail"]
        assert not order.arrived


async def test_bytes_that_are_no_text_pick_nothing(shared: Service) -> None:
    assert (await shared.client.delete("/v1/calls?run=%ff%00")).json() == {"cancelled": 0}


async def test_a_foreign_page_cannot_cancel(shared: Service) -> None:
    response = await shared.client.delete("/v1/calls?run=a", headers={"origin": "http://evil.example"})
    problem(response, 403, "foreign_origin")


async def test_only_the_matching_one_of_two_who_share_a_run_is_cancelled(service: Service) -> None:
    staying = soon(service.run("hold", idempotency_key="k", tags={"step": 1}))
    leaving = soon(service.run("hold", idempotency_key="k", tags={"step": 2}))
    await until(lambda: service.gateway.dispatch.admission.calls == 2 and len(service.worker.jobs) == 1)
    assert await cancel(service, step=2) == 1
    assert_cancelled(await asyncio.wait_for(leaving, 30))
    assert not staying.done() and service.worker.cancelled == []
    service.worker.let_go.set()
    assert (await staying).json()["status"] == "ok"


async def test_a_shared_run_is_killed_when_all_who_wait_for_it_match(service: Service) -> None:
    sharing = [soon(service.run("hold", idempotency_key="k", tags={"run": "r"})) for _ in range(3)]
    await until(lambda: service.gateway.dispatch.admission.calls == 3 and len(service.worker.jobs) == 1)
    assert await cancel(service, run="r") == 3
    for answering in sharing:
        assert_cancelled(await answering)
    assert service.worker.cancelled == [service.worker.jobs[0].id]
    assert_empty(service)


async def test_the_key_of_a_cancelled_call_is_free_and_does_not_join_the_dying_run(service: Service) -> None:
    service.worker.kill_gate.clear()
    dying = soon(service.run("hold", idempotency_key="k", tags={"run": "r"}))
    await until(lambda: len(service.worker.jobs) == 1)
    assert await cancel(service, run="r") == 1
    again = soon(service.run("hold", idempotency_key="k", tags={"run": "r2"}))
    await until(lambda: len(service.worker.jobs) == 2)
    service.worker.kill_gate.set()
    assert_cancelled(await dying)
    joined = soon(service.run("hold", idempotency_key="k"))
    await until(lambda: service.gateway.dispatch.admission.calls == 2)
    service.worker.let_go.set()
    assert [(await answering).json()["status"] for answering in (again, joined)] == ["ok", "ok"]
    assert len(service.worker.jobs) == 2
    assert (await service.run("hold", idempotency_key="k")).json()["status"] == "ok"  # recorded: the second run
    assert len(service.worker.jobs) == 2


async def test_cancelling_twice_counts_once(service: Service) -> None:
    service.worker.kill_gate.clear()
    answering = soon(service.run("hold", tags={"run": "r"}))
    await until(lambda: len(service.worker.jobs) == 1)
    assert [await cancel(service, run="r") for _ in range(3)] == [1, 0, 0]
    service.worker.kill_gate.set()
    assert_cancelled(await answering)
    assert len(service.worker.cancelled) == 1


async def test_a_worker_that_does_not_confirm_the_kill_is_waited_for_no_longer_than_the_grace() -> None:
    async with running(answer_grace_s=0.2) as service:
        service.worker.kill_gate.clear()
        answering = soon(service.run("hold", tags={"run": "r"}, deadline_s=600))
        await until(lambda: len(service.worker.jobs) == 1)
        began = time.monotonic()
        assert await cancel(service, run="r") == 1
        assert_cancelled(await answering)
        assert 0.2 <= time.monotonic() - began < 30
        assert_empty(service)
        service.worker.kill_gate.set()  # its answer comes too late and is counted
        await until(lambda: service.gateway.metrics.registry.get_sample_value("exec_late_answers_total") == 1)


async def test_a_program_that_ended_before_the_kill_arrived_is_answered_cancelled_all_the_same(service: Service) -> None:
    service.worker.deaf = True
    answering = soon(service.run("hold", tags={"run": "r"}, idempotency_key="k"))
    await until(lambda: len(service.worker.jobs) == 1)
    assert await cancel(service, run="r") == 1
    service.worker.let_go.set()
    assert_cancelled(await answering)
    assert (await service.run("hold", idempotency_key="k")).json()["status"] == "ok"
    assert len(service.worker.jobs) == 2


async def test_a_caller_who_leaves_while_the_kill_is_awaited_harms_nobody(service: Service) -> None:
    service.worker.kill_gate.clear()
    leaving = soon(service.run("hold", tags={"run": "r"}, idempotency_key="k"))
    await until(lambda: len(service.worker.jobs) == 1)
    assert await cancel(service, run="r") == 1
    again = soon(service.run("hold", idempotency_key="k"))
    await until(lambda: len(service.worker.jobs) == 2)
    leaving.cancel()
    await until(lambda: service.gateway.dispatch.admission.calls == 1)
    joined = soon(service.run("hold", idempotency_key="k"))
    await until(lambda: service.gateway.dispatch.admission.calls == 2)
    service.worker.kill_gate.set()
    service.worker.let_go.set()
    assert [(await answering).json()["status"] for answering in (again, joined)] == ["ok", "ok"]
    assert len(service.worker.jobs) == 2 and len(service.worker.cancelled) == 1
    assert_empty(service)


async def test_what_was_cancelled_while_it_was_being_published_in_vain_is_answered_and_not_published_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishing, go_on = asyncio.Event(), asyncio.Event()

    async def broken(jobs: Sequence[Job]) -> None:
        publishing.set()
        await go_on.wait()
        raise ConnectionError("the queue is away")

    with monkeypatch.context() as patch:
        patch.setattr(service.gateway.dispatch._queue, "publish", broken)
        cancelled = soon(service.run("say never", tags={"run": "r"}))
        await publishing.wait()
        assert await cancel(service, run="r") == 1
        go_on.set()
        assert_cancelled(await asyncio.wait_for(cancelled, 30))
    assert (await service.run("say next")).json()["stdout"] == "next"
    assert service.worker.codes == ["say next"]


async def test_at_a_shutdown_what_is_being_cancelled_is_answered_cancelled(service: Service) -> None:
    service.worker.kill_gate.clear()
    answering = soon(service.run("hold", tags={"run": "r"}))
    await until(lambda: len(service.worker.jobs) == 1)
    assert await cancel(service, run="r") == 1
    await service.gateway.drain(0.01)
    assert_cancelled(await answering)
    assert await cancel(service, run="r") == 0  # still answers while it drains


async def test_cancelling_a_full_gateway_lets_others_have_their_turn() -> None:
    async with running(worker=False) as service, AsyncExitStack() as open_:
        dispatch, turns = service.gateway.dispatch, 0
        tagged = [[Call("", tags=Tags("r", number))] * 4096 for number in range(14)]
        orders = [await open_.enter_async_context(dispatch.run(calls)) for calls in tagged]
        other = await open_.enter_async_context(dispatch.run([Call("", tags=Tags("s"))]))

        async def watch() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        watching = soon(watch())
        assert await cancel(service, run="r") == 14 * 4096
        watching.cancel()
        assert turns > 14 * 4096 / 1000
        for order in orders:
            assert len(order.arrived) == 4096 and not order.pending
        assert len(other.pending) == 1
        await open_.aclose()
        assert (dispatch.admission.calls, dispatch.admission.bytes) == (0, 0)


async def test_a_caller_who_leaves_while_others_are_being_cancelled_harms_nobody() -> None:
    async with running(worker=False) as service:
        dispatch = service.gateway.dispatch
        async with dispatch.run([Call("", tags=Tags("r"))] * CANCELS_PER_TURN) as staying:
            async with dispatch.run([Call("", tags=Tags("r"))]) as leaving:
                cancelling = soon(dispatch.cancel(Selection(run="r")))
                while not staying.arrived:  # noqa: ASYNC110 - in the very turn in which the first have landed
                    await asyncio.sleep(0)
                assert len(staying.arrived) == CANCELS_PER_TURN and len(leaving.pending) == 1
            assert await cancelling == CANCELS_PER_TURN
        assert (dispatch.admission.calls, dispatch.admission.bytes) == (0, 0)


async def test_two_who_cancel_the_same_at_once_count_each_call_once() -> None:
    calls = [Call("hold", tags=Tags("r"))] * (CANCELS_PER_TURN + 100)
    async with running(slots=2 * CANCELS_PER_TURN) as service, service.gateway.dispatch.run(calls) as order:
        await until(lambda: len(service.worker.jobs) == CANCELS_PER_TURN + 100)
        counts = await asyncio.gather(*(service.gateway.dispatch.cancel(Selection(run="r")) for _ in range(3)))
        assert sum(counts) == CANCELS_PER_TURN + 100
        await until(lambda: len(order.arrived) == CANCELS_PER_TURN + 100)


async def test_openapi_describes_the_route(shared: Service) -> None:
    operation = (await shared.client.get("/openapi.json")).json()["paths"]["/v1/calls"]["delete"]
    assert [parameter["name"] for parameter in operation["parameters"]] == [
        *("run", "step", "group", "rollout", "tenant"),
        *("request", "index"),
    ]
    assert operation["parameters"][1]["schema"] == {"type": "integer"}
    assert {"200", "403", "422"} <= set(operation["responses"])
