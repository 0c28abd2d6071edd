"""`DELETE /v1/calls?request=ID&index=N` and gRPC's `Cancel`: single calls of a request, and cancels that come first."""

import asyncio
from collections.abc import Sequence

import pytest
from gateway_harness import Service, lines, problem, running, soon, until
from grpc_harness import all_results, caller, calls

from exec_client import AsyncClient
from exec_wire.messages.calls import Call, Selection, Tags
from exec_wire.queue.protocol import Job, QueueUnavailable


async def cancel(service: Service, query: str) -> int:
    response = await service.client.delete(f"/v1/calls?{query}")
    assert response.status_code == 200, response.text
    count: int = response.json()["cancelled"]
    return count


def post(service: Service, request_id: str, *calls: object) -> asyncio.Task[dict[int, str]]:
    """Send a batch; the statuses of its calls."""

    async def send() -> dict[int, str]:
        response = await service.client.post("/v1/batch", json={"calls": calls}, headers={"x-request-id": request_id})
        assert response.headers["x-request-id"] == request_id
        return {result.index: result.status for result in lines(response)}

    return soon(send())


HOLD = {"code": "hold"}


@pytest.mark.parametrize("transport", ["http", "grpc"])
async def test_a_cancelled_run_frees_its_slot_while_others_share_its_request(transport: str) -> None:
    async with running(slots=6, grpc=True) as service:
        url = service.url if transport == "http" else f"grpc://{service.grpc_target}"
        async with AsyncClient(url) as client:
            runs = [asyncio.create_task(client.run("hold", id=str(number))) for number in range(6)]
            await until(lambda: len(service.worker.jobs) == 6)
            for run in runs[:5]:
                run.cancel()
            await until(lambda: len(service.worker.cancelled) == 5 and len(service.gateway.dispatch.released) == 1)
            service.worker.let_go.set()
            assert (await runs[5]).status == "ok"


async def test_only_the_calls_that_are_named_are_cancelled(service: Service) -> None:
    sent = post(service, "req-1", HOLD, HOLD, HOLD, HOLD)
    await until(lambda: len(service.worker.jobs) == 4)
    assert await cancel(service, "request=req-1&index=1&index=3") == 2
    await until(lambda: len(service.worker.cancelled) == 2)
    service.worker.let_go.set()
    assert await sent == {0: "ok", 1: "cancelled", 2: "ok", 3: "cancelled"}


async def test_without_an_index_the_whole_request_is_cancelled(service: Service) -> None:
    sent, other = post(service, "req-1", HOLD, HOLD), post(service, "req-2", HOLD)
    await until(lambda: len(service.worker.jobs) == 3)
    assert await cancel(service, "request=req-1") == 2
    assert set((await sent).values()) == {"cancelled"}
    service.worker.let_go.set()
    assert await other == {0: "ok"}


async def test_a_single_run_is_call_0_of_its_request(service: Service) -> None:
    sent = soon(service.client.post("/v1/run", json=HOLD, headers={"x-request-id": "r"}))
    await until(lambda: len(service.worker.jobs) == 1)
    assert await cancel(service, "request=r&index=0") == 1
    assert (await sent).json()["status"] == "cancelled"


async def test_tags_that_are_given_too_must_match(service: Service) -> None:
    sent = post(service, "r", HOLD | {"tags": {"step": 1}}, HOLD | {"tags": {"step": 2}})
    await until(lambda: len(service.worker.jobs) == 2)
    assert await cancel(service, "request=r&step=2") == 1
    service.worker.let_go.set()
    assert await sent == {0: "ok", 1: "cancelled"}


async def test_requests_of_one_tenant_with_the_same_id_are_all_meant_and_other_tenants_are_not(service: Service) -> None:
    mine = [post(service, "same", HOLD | {"tenant": "a"}) for _ in range(2)]
    other = post(service, "same", HOLD | {"tenant": "b"})
    await until(lambda: len(service.worker.jobs) == 3)
    assert await cancel(service, "request=same&index=0&tenant=a") == 2
    assert [await sent for sent in mine] == [{0: "cancelled"}] * 2
    service.worker.let_go.set()
    assert await other == {0: "ok"}


async def test_grpc_cancels_by_request_and_index_and_counts_the_calls_of_a_stream() -> None:
    async with running(grpc=True) as service, caller(service.grpc_target) as there:
        there.metadata = (("x-request-id", "s"),)
        stream = there.stream()
        for _ in range(2):
            await stream.write(calls("hold", "hold"))
        await until(lambda: len(service.worker.jobs) == 4)
        assert await there.cancel(request="s", index=[0, 3]) == 2
        await until(lambda: len(service.worker.cancelled) == 2)
        service.worker.let_go.set()
        await stream.done_writing()
        statuses = {result.index: result.status for result in await all_results(stream)}
    assert statuses == {0: "cancelled", 1: "ok", 2: "ok", 3: "cancelled"}


async def test_sessions_are_not_selected_by_request(service: Service) -> None:
    body = problem(await service.client.get("/v1/sessions?request=r"), 422, "bad_query")
    assert body["field"] == "request"


# -- what comes before its call -------------------------------------------------------------------------------------------


async def test_a_cancel_that_comes_before_its_request_acts_when_that_comes(service: Service) -> None:
    assert await cancel(service, "request=early&index=1&index=2") == 0
    assert await post(service, "early", {"code": "say 0"}, {"code": "say 1"}) == {0: "ok", 1: "cancelled"}
    assert service.worker.codes == ["say 0"]
    assert await post(service, "early", {"code": "say 0"}, {"code": "say 1"}) == {0: "ok", 1: "ok"}  # it has acted


async def test_a_cancel_of_a_whole_request_that_comes_before_it_acts_on_every_call(service: Service) -> None:
    assert await cancel(service, "request=early") == 0
    assert set((await post(service, "early", *[{"code": "say x"}] * 5)).values()) == {"cancelled"}
    assert service.worker.codes == []


async def test_an_early_cancel_is_its_tenants_own(service: Service) -> None:
    assert await cancel(service, "request=early&index=0&tenant=a") == 0
    assert await post(service, "early", {"code": "say b", "tenant": "b"}) == {0: "ok"}
    assert await post(service, "early", {"code": "say a", "tenant": "a"}) == {0: "cancelled"}


async def test_a_cancel_acts_on_a_request_whose_body_is_still_being_sent(service: Service) -> None:
    body = b'{"calls": [{"code": "say never"}]}'
    head = b"POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-Request-Id: slow\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:5])
    await writer.drain()
    assert await cancel(service, "request=slow&index=0") == 0
    writer.write(body[5:])
    async with asyncio.timeout(10):
        assert b'"status":"cancelled"' in await reader.readuntil(b"\r\n0\r\n")
    writer.close()
    assert service.worker.codes == []


async def test_a_recorded_result_is_given_although_its_call_was_cancelled_early(service: Service) -> None:
    keyed = {"code": "say x", "idempotency_key": "k"}
    assert await post(service, "first", keyed) == {0: "ok"}
    assert await cancel(service, "request=second&index=0") == 0
    assert await post(service, "second", keyed) == {0: "ok"}


def test_early_cancels_are_forgotten_after_a_while_and_bounded() -> None:
    from exec_wire.queue.early_cancels import EarlyCancels

    now = [0.0]
    cancels: EarlyCancels[int] = EarlyCancels(lambda: now[0], keep_s=10, most=3)
    for number in range(4):
        cancels.add(number)
    assert [number in cancels for number in range(4)] == [False, True, True, True]
    assert cancels.take(1) and not cancels.take(1)
    now[0] = 9.0
    cancels.add(2)  # again: from now on
    now[0] = 11.0
    assert 2 in cancels and 3 not in cancels
    cancels.add(7)
    assert len(cancels) == 2


# -- what survives --------------------------------------------------------------------------------------------------------


async def test_a_cancellation_goes_on_when_the_task_that_asked_for_it_is_cancelled() -> None:
    async with running(worker=False) as service, service.gateway.dispatch.run([Call("", tags=Tags("r"))] * 3000) as order:
        cancelling = soon(service.gateway.dispatch.cancel(Selection(run="r")))
        while not order.arrived:  # noqa: ASYNC110 - in the very turn in which the first have landed
            await asyncio.sleep(0)
        assert order.pending
        cancelling.cancel()
        await until(lambda: not order.pending)


async def test_a_shutdown_sends_again_the_cancels_that_it_interrupts(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, begun, sent = service.gateway.dispatch._queue, asyncio.Event(), []
    real = queue.cancel

    async def slow_at_first(ids: Sequence[str]) -> list[str]:
        if not begun.is_set():
            begun.set()
            await asyncio.Event().wait()
        sent.extend(ids)
        return await real(ids)

    monkeypatch.setattr(queue, "cancel", slow_at_first)
    async with service.gateway.dispatch.run([Call("hold")]):
        await until(lambda: len(service.worker.jobs) == 1)
    await begun.wait()
    await service.gateway.dispatch.stop()
    assert sent == [service.worker.jobs[0].id]
    await until(lambda: service.worker.cancelled == sent)


async def test_a_shutdown_waits_a_while_for_a_queue_that_is_unavailable(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, failures = service.gateway.dispatch._queue, iter([True, True, True])
    real = queue.cancel

    async def unavailable_at_first(ids: Sequence[str]) -> list[str]:
        if next(failures, False):
            raise QueueUnavailable("unavailable", sent=False)
        return await real(ids)

    monkeypatch.setattr(queue, "cancel", unavailable_at_first)
    async with service.gateway.dispatch.run([Call("hold")]):
        await until(lambda: len(service.worker.jobs) == 1)
    await service.gateway.dispatch.stop()
    await until(lambda: len(service.worker.cancelled) == 1)


async def test_a_shutdown_cancels_at_the_workers_the_calls_of_connections_that_it_drops(service: Service) -> None:
    sent = post(service, "r", HOLD, HOLD)
    await until(lambda: len(service.worker.jobs) == 2)
    service.stop.set()  # drains for 0.2 s
    await until(lambda: len(service.worker.cancelled) == 2)
    assert set((await sent).values()) == {"internal_error"}


async def test_a_call_cancelled_after_a_publication_of_unknown_outcome_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue had the job, its answer was lost, and the call waits to be published again when it is cancelled."""
    async with running(worker=False, slots=1) as service:
        dispatch, queue = service.gateway.dispatch, service.gateway.dispatch._queue
        await service.worker.end.announce(service.worker.info)
        real, published = queue.publish, asyncio.Event()

        async def publish(jobs: Sequence[Job]) -> None:
            if not published.is_set():
                await real(jobs)
                published.set()
            raise QueueUnavailable("the answer was lost", sent=True)

        with monkeypatch.context() as patch:
            patch.setattr(queue, "publish", publish)
            async with dispatch.run([Call("say never", tags=Tags("r"))]):
                await service.gateway.worker_registry.refresh()
                dispatch.release.look_again()
                await until(lambda: published.is_set() and len(dispatch.waiting) == 1)
                assert await dispatch.cancel(Selection(run="r")) == 1
            await until(lambda: not dispatch.release.to_cancel)
        async with service.worker:
            assert (await service.run("say next")).json()["stdout"] == "next"
        assert service.worker.codes == ["say next"]
