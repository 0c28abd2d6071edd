"""What a connection may cost: headers, bodies, time and number; and what a stream says while nothing lands."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from gateway_harness import JSON, Service, lines, raw_request, running, soon, until
from grpc_harness import caller, calls, drained, refused, results

from exec_client import AsyncClient, Call
from exec_service.api import streaming
from exec_service.rpc import server as grpc_api
from exec_service.telemetry.metrics_server import metrics_server
from exec_service.telemetry.processes import Question, Report
from exec_wire import proto
from exec_wire.supervisor import Supervisor

HEAD = b"POST /v1/run HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


class Peer:
    """A connection that sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # it may be refused before all of it has left
            self.writer.write(data)
            await self.writer.drain()

    async def answer(self) -> bytes:
        """All that comes until the other side closes."""
        got = bytearray()
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                while piece := await self.reader.read(65536):
                    got += piece
        return bytes(got)


@contextlib.asynccontextmanager
async def peers(port: int, count: int = 1) -> AsyncIterator[list[Peer]]:
    opened = [Peer(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(count)]
    try:
        yield opened
    finally:
        for peer in opened:
            peer.writer.close()


async def is_well(service: Service) -> bool:
    """Over a new connection: alive, and programs are run."""
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as other:
        health = await other.get("/healthz")
        canary = await other.post("/v1/run", json={"code": "say canary"})
    return health.status_code == 200 and canary.json()["stdout"] == "canary"


async def rejected(service: Service, code: str) -> float:
    return await service.metric("exec_rejected_total", reason=code)


# -- headers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endless", [b"x: " + b"a" * 65536, b"x: a\r\n" * 10923, b"\r\n" * 40_000], ids=["one", "many", "none"])
async def test_headers_without_end_are_refused(shared: Service, endless: bytes) -> None:
    async with peers(shared.port) as [peer]:
        await peer.send(endless if endless.startswith(b"\r") else b"GET /healthz HTTP/1.1\r\n" + endless)
        assert (await peer.answer()).startswith(b"HTTP/1.1 431 ")
    assert await is_well(shared)


async def test_headers_that_are_too_large_are_refused_even_if_they_come_at_once(shared: Service) -> None:
    head = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: %s\r\n\r\n"
    got = await raw_request(shared.port, head % (b"a" * 80_000))
    assert got.startswith(b"HTTP/1.1 431 ") and b'"code":"headers_too_large"' in got
    assert (await raw_request(shared.port, head % (b"a" * 60_000))).startswith(b"HTTP/1.1 200 ")


async def test_large_body_is_not_taken_for_headers(shared: Service) -> None:
    body = b'{"code": "say %s"}' % (b"x" * 200_000)
    got = await raw_request(shared.port, HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body))
    assert got.startswith(b"HTTP/1.1 200 ")


async def test_trailers_without_end_are_refused(shared: Service) -> None:
    async with peers(shared.port) as [peer]:
        await peer.send(HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
        for _ in range(4):
            await peer.send(b"x: " + b"a" * 65536)
        assert (await peer.answer()).startswith(b"HTTP/1.1 431 ")
    assert await is_well(shared)


async def test_slow_headers_are_given_up() -> None:
    async with running(header_s=0.5) as service, peers(service.port, 3) as [silent, slow, second]:
        await slow.send(b"GET /healthz HT")
        await second.send(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await second.reader.readuntil(b"}")
        await second.send(b"GET /heal")
        assert (await slow.answer()).startswith(b"HTTP/1.1 408 ")
        assert (await silent.answer()).startswith(b"HTTP/1.1 408 ")
        assert (await second.answer()).startswith(b"HTTP/1.1 408 ")
        assert await rejected(service, "too_slow") == 3
        assert await is_well(service)


async def test_idle_connection_is_not_taken_for_a_slow_one() -> None:
    async with running(header_s=0.2) as service, httpx.AsyncClient(base_url=service.url) as client:
        await client.get("/healthz")
        async with peers(service.port) as [peer]:  # whose time passes
            await peer.answer()
        (kept,) = client._transport._pool.connections  # type: ignore[attr-defined]
        assert (await client.get("/healthz")).status_code == 200 and not kept.is_closed()


async def test_requests_ahead_of_their_answers_are_bounded(shared: Service) -> None:
    async with peers(shared.port) as [peer]:
        await peer.send(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10_000)
        assert (await peer.answer()).count(b"HTTP/1.1 ") < 100
    assert await is_well(shared)


# -- bodies ---------------------------------------------------------------------------------------------------------------


async def test_slow_body_is_given_up() -> None:
    async with running(body_s=0.5) as service, peers(service.port, 2) as [slow, refused_early]:
        await slow.send(HEAD + b'content-length: 100\r\n\r\n{"code": ')
        await refused_early.send(b"POST /v1/none HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert (await slow.answer()).startswith(b"HTTP/1.1 408 ")
        assert (await refused_early.answer()).startswith(b"HTTP/1.1 404 ")  # and was closed, though its body never ended
        assert await is_well(service)


async def test_unfinished_bodies_are_charged_as_they_arrive() -> None:
    mb = 1 << 20
    async with running(max_bytes=8 * mb, max_body_bytes=3 * mb) as service, peers(service.port, 3) as held:
        admission = service.gateway.dispatch.admission
        for number, peer in enumerate(held):
            await peer.send(HEAD + b"content-length: %d\r\n\r\n" % (3 * mb) + b" " * (mb + mb // 4))
            await until(lambda number=number: admission.arriving == (number + 1) * (mb + mb // 4))  # type: ignore[misc]
        assert admission.bytes == admission.arriving
        await held[0].send(b" " * mb)  # more than half of all bytes
        assert b" 429 " in await held[0].reader.readuntil(b"\r\n")
        await until(lambda: admission.arriving == 2 * (mb + mb // 4))
        assert await is_well(service)
        for peer in held:
            peer.writer.close()
        await until(lambda: admission.bytes == 0 and admission.arriving == 0)


async def test_unfinished_items_of_a_job_are_charged_too(tmp_path: Any) -> None:
    async with running(jobs_dir=str(tmp_path)) as service, peers(service.port) as [peer]:
        head = b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-ndjson\r\n"
        await peer.send(head + b'content-length: 9999999\r\n\r\n{"call": {"code": "' + b"x" * 1_000_000)
        await until(lambda: service.gateway.dispatch.admission.arriving > 1_000_000)
        peer.writer.close()
        await until(lambda: service.gateway.dispatch.admission.bytes == 0)


async def test_client_that_reads_nothing_is_cut_off_on_every_route() -> None:
    ask = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 64
    async with running(write_stall_s=0.5) as service, peers(service.port) as [peer]:
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        while not peer.writer.is_closing():
            with contextlib.suppress(ConnectionError):
                peer.writer.write(ask)
            if (await rejected(service, "bad_http")) or not service_connections(service):
                break
            await asyncio.sleep(0.05)
        await until(lambda: not service_connections(service))


def service_connections(service: Service) -> int:
    """Open connections, without that of the test's own client."""
    import psutil

    return sum(
        one.status == "ESTABLISHED" and one.laddr and one.laddr.port == service.port
        for one in psutil.Process().net_connections("tcp")
    )


# -- how many -------------------------------------------------------------------------------------------------------------


async def test_connections_without_a_request_make_room_for_others() -> None:
    async with running(max_connections=8) as service:
        held = soon(service.run("hold"))
        await until(lambda: len(service.worker.calls) == 1)
        async with peers(service.port, 20) as many:
            for peer in many:
                await peer.send(b"GET /healthz HTTP/1.1\r\nx: ")
            assert b'"code":"connections_full"' in await many[0].answer()
            assert await is_well(service)
        service.worker.let_go.set()
        assert (await held).json()["status"] == "ok"  # whoever waits for an answer is not sent away


async def test_connection_is_refused_if_all_others_wait_for_an_answer() -> None:
    async with running(max_connections=2) as service:
        held = [soon(service.run("hold")) for _ in range(2)]
        await until(lambda: len(service.worker.calls) == 2)
        async with peers(service.port) as [peer]:
            assert (await peer.answer()).startswith(b"HTTP/1.1 503 ")
        service.worker.let_go.set()
        assert [(await one).json()["status"] for one in held] == ["ok", "ok"]
        assert await is_well(service)


async def test_connection_that_is_being_closed_does_not_keep_others_from_making_room() -> None:
    """Its answer is large, and the peer does not read it."""
    async with running(max_connections=4) as service, peers(service.port) as [stalled]:
        body = b'{"code": "say %s"}' % (b"x" * 20_000_000)
        head = b"POST /v1/run HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        await stalled.send(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: len(service.worker.calls) == 1 and not service.gateway.dispatch.released)
        async with peers(service.port, 12) as many:
            refused = [asyncio.create_task(peer.answer()) for peer in many[:6]]
            for peer in many:
                await peer.send(b"GET /healthz HTTP/1.1\r\nx: ")
            assert any(b'"code":"connections_full"' in answer for answer in await asyncio.gather(*refused))


@pytest.mark.parametrize("line", [b"GET http://host HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"GET http://a:99999/ HTTP/1.1"])
async def test_url_without_a_path_is_answered_and_logged_as_no_error(
    shared: Service, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with peers(shared.port) as [peer]:
        await peer.send(line + b"\r\nHost: localhost\r\n\r\n")
        assert (await peer.answer()).startswith(b"HTTP/1.1 4")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_metrics_port_has_the_same_bounds() -> None:
    async def report(_: Question) -> Report:
        return Report()

    async with metrics_server(report, "127.0.0.1", 0, Supervisor()) as url:
        port = int(url.rsplit(":", 1)[1])
        async with peers(port, 100) as many:
            await many[-1].send(b"GET /healthz HTTP/1.1\r\nx: " + b"a" * 100_000)
            assert (await many[-1].answer()).startswith(b"HTTP/1.1 431 ")
            assert b"connections_full" in await many[0].answer()
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{url}/healthz")).status_code == 200


# -- gRPC -----------------------------------------------------------------------------------------------------------------


async def test_grpc_message_that_does_not_come_is_given_up() -> None:
    async with running(grpc=True, body_s=0.5) as service, caller(service.grpc_target) as one:
        never = one.channel.stream_unary(f"/{proto.SERVICE}/Run")
        with refused("DEADLINE_EXCEEDED", "too_slow"):
            await never(nothing(), timeout=30)
        assert (await one.run("say hi")).stdout == "hi"


async def test_slow_grpc_messages_are_charged_as_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_api, "SLOW_S", 0.05)
    limits = {"max_bytes": 1 << 20, "max_body_bytes": 1 << 20}
    async with running(grpc=True, **limits) as service, caller(service.grpc_target) as one:  # type: ignore[arg-type]
        never = one.channel.stream_unary(f"/{proto.SERVICE}/Run")
        first = never(nothing(), timeout=30)
        await until(lambda: service.gateway.dispatch.admission.arriving == 1 << 20)
        with refused("RESOURCE_EXHAUSTED", "overloaded"):
            await never(nothing(), timeout=30)
        first.cancel()
        await until(lambda: service.gateway.dispatch.admission.arriving == 0)
        assert (await one.run("say hi")).stdout == "hi"


async def test_grpc_connections_are_bounded() -> None:
    async with (
        running(grpc=True, max_connections=8) as service,
        peers(service.gateway.config.grpc_port, 2),
        caller(service.grpc_target) as one,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await one.run("say hi", timeout=2)
        assert error.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert await is_well(service)


async def nothing() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


# -- silence --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/batch", {"calls": [{"code": "hold"}]}), ("/v1/verify", {"items": [{"answer": "1", "truth": "1"}]})],
)
async def test_stream_without_results_sends_empty_lines(monkeypatch: pytest.MonkeyPatch, path: str, body: object) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    async with running(worker=path == "/v1/batch") as service, service.client.stream("POST", path, json=body) as answer:
        pieces = answer.aiter_raw()
        assert [await anext(pieces), await anext(pieces)] == [b"\n", b"\n"]


async def test_client_skips_empty_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    async with running() as service, AsyncClient(service.url) as client:
        running_ = soon(client.run(Call("hold")))
        await until(lambda: len(service.worker.calls) == 1)
        async with service.client.stream("POST", "/v1/batch", json={"calls": [{"code": "hold"}]}) as other:
            pieces = other.aiter_raw()
            assert [await anext(pieces), await anext(pieces)] == [b"\n", b"\n"]
            service.worker.let_go.set()
        assert (await running_).status == "ok"


async def test_grpc_stream_without_results_sends_empty_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    async with running(grpc=True) as service, caller(service.grpc_target) as one:
        answer = one.run_batch_(calls("hold"), timeout=30)
        assert [await answer.read(), await answer.read()] == [b"", b""]
        service.worker.let_go.set()
        while not (landed := results(await answer.read())):
            pass
        assert landed[0].status == "ok"
        answer.cancel()
        await drained(answer)


async def test_ordinary_batch_has_no_empty_lines(shared: Service) -> None:
    answer = await shared.client.post("/v1/batch", json={"calls": [{"code": "say 1"}]}, headers=JSON)
    assert answer.content.count(b"\n") == 1 and lines(answer)[0].stdout == "1"
