"""Batches: results as they land, or all in order."""

import asyncio

import httpx
import msgspec
import pytest
from gateway_harness import Service, lines, running, until

from exec_wire.messages.calls import Result


async def test_each_result_is_sent_as_it_lands(service: Service) -> None:
    body = {"calls": [{"code": "hold", "id": "slow"}, {"code": "say quick", "id": "fast"}]}
    async with service.client.stream("POST", "/v1/batch", json=body) as response:
        received = response.aiter_lines()
        first = msgspec.json.decode(await anext(received), type=Result)
        assert (first.id, first.index, first.stdout) == ("fast", 1, "quick")
        service.worker.let_go.set()
        second = msgspec.json.decode(await anext(received), type=Result)
        assert (second.id, second.index) == ("slow", 0)
        assert [line async for line in received] == []


async def test_results_without_stream_are_in_the_order_of_the_calls(service: Service) -> None:
    calls = [{"code": f"say {number}", "id": str(number)} for number in range(50)]
    response = await service.batch(*calls, stream="false")
    assert response.headers["content-type"] == "application/json"
    results = response.json()["results"]
    assert [result["stdout"] for result in results] == [str(number) for number in range(50)]
    assert [result["index"] for result in results] == list(range(50))


async def test_lines_that_are_ready_together_are_one_write() -> None:
    async with running(slots=100) as service:
        # All are held by the worker and let go at once, so they land within one turn of the loop or a few.
        body = {"calls": [{"code": "hold"} for _ in range(100)]}
        async with service.client.stream("POST", "/v1/batch", json=body) as response:
            await until(lambda: len(service.worker.jobs) == 100)
            service.worker.let_go.set()
            chunks = [chunk async for chunk in response.aiter_raw()]
        assert sum(chunk.count(b"\n") for chunk in chunks) == 100
        assert len(chunks) < 20


async def test_every_call_gets_exactly_one_result() -> None:
    async with running(slots=64) as service:
        calls = [{"code": f"say {number}", "id": "same"} for number in range(4096)]
        results = lines(await service.batch(*calls))
        assert sorted(result.index for result in results) == list(range(4096))
        assert all(result.stdout == str(result.index) for result in results)
        assert all(result.id == "same" for result in results)


async def test_many_large_results_arrive_whole(service: Service) -> None:
    text = "x" * 300_000
    results = lines(await service.batch(*({"code": f"say {text}"} for _ in range(20))))
    assert [len(result.stdout) for result in results] == [300_000] * 20


async def test_an_empty_batch_is_an_empty_answer(service: Service) -> None:
    streamed = await service.batch()
    assert (streamed.status_code, streamed.content) == (200, b"")
    assert (await service.batch(stream="false")).json() == {"results": []}


async def test_a_batch_carries_its_request_id_into_every_result(service: Service) -> None:
    response = await service.batch({"code": "say 1"}, {"code": "say 2"})
    assert {result.request_id for result in lines(response)} == {response.headers["x-request-id"]}


async def test_one_lost_call_does_not_hold_its_batch(service: Service) -> None:
    calls = [{"code": "silent", "deadline_s": 0.1}, {"code": "say fine"}]
    service.gateway.dispatch._config = msgspec.structs.replace(service.gateway.config, answer_grace_s=0.1)
    results = lines(await service.batch(*calls))
    assert [(result.index, result.status) for result in results] == [(1, "ok"), (0, "worker_lost")]


async def test_concurrent_batches_do_not_mix(service: Service) -> None:
    async def one(name: str) -> set[str]:
        return {result.stdout for result in lines(await service.batch(*({"code": f"say {name}"} for _ in range(30))))}

    names = [f"batch{number}" for number in range(10)]
    assert await asyncio.gather(*map(one, names)) == [{name} for name in names]


async def test_delivered_results_make_room_while_their_batch_goes_on(service: Service) -> None:
    body = {"calls": [{"code": "say quick"}, {"code": "say quick"}, {"code": "hold"}]}
    async with service.client.stream("POST", "/v1/batch", json=body) as response:
        received = response.aiter_lines()
        await anext(received)
        await anext(received)
        await until(lambda: service.gateway.dispatch.admission.calls == 1)
        service.worker.let_go.set()
        assert len([line async for line in received]) == 1


async def test_a_fault_in_the_middle_of_a_stream_breaks_it_rather_than_ending_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    body = {"calls": [{"code": "say quick"}, {"code": "hold"}]}
    with pytest.raises(httpx.RemoteProtocolError):
        async with service.client.stream("POST", "/v1/batch", json=body) as response:
            received = response.aiter_lines()
            await anext(received)
            monkeypatch.setattr("exec_service.api.calls.portions", broken)
            service.worker.let_go.set()
            async for _ in received:
                pass
    assert service.gateway.dispatch.admission.calls == 0
