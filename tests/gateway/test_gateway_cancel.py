"""A caller who leaves takes the calls along."""

import asyncio

import pytest
from gateway_harness import JSON, Service, running, soon, until

from exec_wire.messages.calls import Call


@pytest.mark.parametrize("route", ["/v1/run", "/v1/batch", "/v1/batch?stream=false"])
async def test_disconnect_cancels_what_runs_and_drops_what_waits(route: str) -> None:
    async with running(slots=1) as service:
        body = {"code": "hold"} if route == "/v1/run" else {"calls": [{"code": "hold"}] * 5}
        count = 1 if route == "/v1/run" else 5
        leaving = soon(service.client.post(route, json=body))
        await until(lambda: len(service.worker.jobs) == 1 and service.gateway.dispatch.admission.calls == count)
        leaving.cancel()
        await until(lambda: service.worker.cancelled == [service.worker.jobs[0].id])
        dispatch = service.gateway.dispatch
        assert (dispatch.admission.calls, dispatch.admission.bytes, len(dispatch.waiting), len(dispatch.released)) == (
            0,
            0,
            0,
            0,
        )
        assert await service.metric("exec_calls_total", status="cancelled", blame="client") == count
        assert (await service.run("say next")).json()["stdout"] == "next"
        assert service.worker.codes == ["hold", "say next"]


async def test_disconnect_in_the_middle_of_a_stream_cancels_the_rest(service: Service) -> None:
    body = {"calls": [{"code": "say quick"}, {"code": "hold"}, {"code": "hold"}]}
    async with service.client.stream("POST", "/v1/batch", json=body) as response:
        await anext(response.aiter_lines())
    await until(lambda: len(service.worker.cancelled) == 2)
    assert service.gateway.dispatch.admission.calls == 0


async def test_disconnect_while_the_body_is_sent_accepts_nothing(service: Service) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(b"POST /v1/run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await service.run("say fine")).status_code == 200
    assert service.worker.codes == ["say fine"]


@pytest.mark.parametrize(("route", "calls"), [("/v1/batch", 30), ("/v1/batch?stream=false", 30), ("/v1/run", 1)])
async def test_a_reader_who_stalls_is_disconnected(route: str, calls: int) -> None:
    async with running(write_stall_s=3, slots=16) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port, limit=1024)
        call = b'{"code": "say %s"}' % (b"x" * (30_000_000 // calls))
        body = call if calls == 1 else b'{"calls": [' + b",".join([call] * calls) + b"]}"
        head = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
        writer.write(head.format(route, len(body)).encode() + body)
        await writer.drain()
        await until(lambda: len(service.worker.jobs) == calls and not service.gateway.dispatch.released)
        await asyncio.sleep(0.1)
        assert service.gateway.dispatch.admission.calls > 0
        await until(lambda: service.gateway.dispatch.admission.calls == 0)
        assert service.gateway.dispatch.admission.bytes == 0
        writer.close()
        del reader


async def test_leaving_the_block_cancels_what_is_pending(service: Service) -> None:
    async with service.gateway.dispatch.run([Call("say a"), Call("hold"), Call("hold")]) as request:
        assert [result.stdout for result in await request.take()] == ["a"]
    await until(lambda: len(service.worker.cancelled) == 2)
    assert service.gateway.dispatch.admission.calls == 0


async def test_run_gives_every_result(service: Service) -> None:
    async with service.gateway.dispatch.run([Call(f"say {number}") for number in range(10)]) as request:
        results = await request.take_all()
    assert sorted(result.index for result in results) == list(range(10))


async def test_closing_an_order_twice_gives_back_once(service: Service) -> None:
    async with service.gateway.dispatch.run([Call("hold")]) as order:
        order.close()
        order.close()
    assert (service.gateway.dispatch.admission.calls, service.gateway.dispatch.admission.bytes) == (0, 0)
    assert await order.take() == []


async def test_a_call_cancelled_before_its_release_never_reaches_a_worker() -> None:
    async with running(worker=False) as service:
        leaving = soon(service.client.post("/v1/run", content=b'{"code": "say never"}', headers=JSON))
        await until(lambda: len(service.gateway.dispatch.waiting) == 1)
        leaving.cancel()
        await until(lambda: len(service.gateway.dispatch.waiting) == 0)
        async with service.worker:
            assert (await service.run("say next")).status_code == 200
        assert service.worker.codes == ["say next"]
