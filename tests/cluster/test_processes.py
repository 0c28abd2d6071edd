"""The commands of a cluster as an operator meets them."""

from __future__ import annotations

import asyncio
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import httpx
import pytest
from redis_harness import need_redis

from exec_client import Client
from exec_wire.queue import Answer, Job, WorkerInfo
from exec_wire.redis_queue import RedisQueue
from loadtest.parts import ROOT, Part, environment
from loadtest.ports import free_port
from loadtest.redis_server import RedisServer


def failed(*arguments: str, **settings: object) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "exec_service", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=environment(settings),
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("part", ["gateway", "worker"])
def test_without_a_queue_a_part_says_which_setting_is_missing(part: str) -> None:
    code, words = failed(part)
    assert code == 2 and "--redis" in words and "exec-service up" in words


@pytest.mark.parametrize("part", ["gateway", "worker"])
def test_an_address_that_is_none_is_refused_without_showing_the_password(part: str) -> None:
    code, words = failed(part, "--redis", "http://:secret@localhost")
    assert code == 2 and "redis://" in words and "secret" not in words


def test_echo_needs_to_be_called_insecure() -> None:
    code, words = failed("worker", "--redis", "redis://localhost", "--runtime", "echo")
    assert code == 2 and "--insecure" in words
    code, words = failed("worker", "--redis", "redis://localhost", runtime="echo")
    assert code == 2 and "--insecure" in words


def test_a_worker_refuses_a_sandbox_weaker_than_b() -> None:
    code, words = failed("worker", "--redis", "redis://localhost:1", mask_layers='["pidns"]', profiles='{"bare": []}')
    assert code == 69 and "tier B is required" in words


def test_parts_tell_where_they_are_and_stop_cleanly(own_server: RedisServer) -> None:
    with Part.gateway(own_server.url) as gateway, Part.echo(own_server.url) as worker:
        with Client(gateway.url) as client:
            results = client.run_many([f"program {number}" for number in range(200)])
        assert [result.stdout for result in results] == [f"program {number}" for number in range(200)]
        assert {result.sandbox.tier for result in results} == {"none"}
        assert gateway.metrics()['exec_calls_total{blame="none",status="ok"}'] == 200
        assert gateway.metrics()["exec_slots"] == 64
        served = worker.metrics()
        assert served['exec_worker_answers_total{blame="none",status="ok"}'] == 200
        assert (served["exec_worker_slots"], served["exec_worker_taken_total"]) == (64, 200)
        for part in (gateway, worker):
            assert httpx.get(f"{part.side_url}/readyz").text == "ready\n"
            assert httpx.get(f"{part.side_url}/healthz").status_code == 200
            part.kill(signal.SIGTERM)
            assert part.wait() == 0
        assert "Traceback" not in gateway.words + worker.words
    assert own_server.say("SCARD", "x:workers") + own_server.say("SCARD", "x:gateways") == ":0\r\n:0\r\n"


def test_a_worker_whose_queue_is_away_is_alive_and_not_ready(own_server: RedisServer) -> None:
    with Part.echo(own_server.url) as worker:
        own_server.stop()
        give_up = time.monotonic() + 60
        while httpx.get(f"{worker.side_url}/readyz").status_code == 200 and time.monotonic() < give_up:
            time.sleep(0.1)
        assert httpx.get(f"{worker.side_url}/readyz").text == "the queue is away\n"
        assert httpx.get(f"{worker.side_url}/healthz").status_code == 200


async def test_a_gateway_that_is_killed_breaks_the_connection_and_another_one_answers(own_server: RedisServer) -> None:
    """The client sends the same keys again; what was recorded is not run again."""
    with Part.gateway(own_server.url) as one, Part.gateway(own_server.url) as two, Part.echo(own_server.url) as worker:
        calls = [{"code": f"{number}", "idempotency_key": f"k{number}"} for number in range(100)]
        async with httpx.AsyncClient(timeout=30) as client:
            first = await client.post(f"{one.url}/v1/batch?stream=false", json={"calls": calls[:60]})
            assert len(first.json()["results"]) == 60
            one.kill()
            with pytest.raises(httpx.TransportError):
                await client.post(f"{one.url}/v1/batch", json={"calls": calls})
            again = await client.post(f"{two.url}/v1/batch?stream=false", json={"calls": calls})
        assert [result["stdout"] for result in again.json()["results"]] == [str(number) for number in range(100)]
        assert worker.metrics()["exec_worker_taken_total"] == 100


async def try_queue(url: str) -> list[Answer]:
    """One job through both ends."""
    queue = RedisQueue(url)
    gateway, worker = queue.gateway("g1"), queue.worker("w1")
    try:
        await gateway.announce(False)
        await worker.announce(WorkerInfo("w1", 1))
        await gateway.publish([Job("j1", b"", 60_000, "g1")])
        await asyncio.wait_for(worker.take(1), 30)
        await worker.answer([Answer("j1", b"result")])
        return await asyncio.wait_for(gateway.receive(), 30)
    finally:
        await worker.leave()
        await gateway.leave()


async def test_a_password_comes_with_the_address() -> None:
    need_redis()
    with RedisServer(requirepass="it's/secret") as server:
        url = f"redis://:it%27s%2Fsecret@127.0.0.1:{server.port}/3"
        assert [answer.payload for answer in await try_queue(url)] == [b"result"]


async def test_tls_comes_with_the_address(own_server: RedisServer, tmp_path: Path) -> None:
    """The server here may be built without TLS; what ends it in front of the server is a stock library."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(  # noqa: ASYNC221
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", own_server.port)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer), return_exceptions=True)

    async with await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context) as front:
        port = front.sockets[0].getsockname()[1]
        url = f"rediss://localhost:{port}/0?ssl_ca_certs={certificate}"
        assert [answer.payload for answer in await try_queue(url)] == [b"result"]


def test_metrics_of_a_gateway_are_at_the_port_that_was_given(own_server: RedisServer) -> None:
    port = free_port()
    with Part.gateway(own_server.url, "--metrics-port", str(port)) as gateway:
        assert gateway.side_url == f"http://127.0.0.1:{port}"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{gateway.url}/metrics")
        taken, words = failed("gateway", "--redis", own_server.url, "--port", "0", "--metrics-port", str(port))
    assert taken == 69 and str(port) in words
