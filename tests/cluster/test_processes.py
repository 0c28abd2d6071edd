"""The commands of a cluster as an operator meets them."""

import asyncio
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from common import answers, wait_until
from redis_harness import need_redis
from sandbox_harness import need_sandbox

from exec_client import Client
from exec_wire.queue.protocol import Answer, Job, WorkerInfo
from exec_wire.queue.redis import RedisQueue
from loadtest.support.processes import ROOT, Part, environment, free_port
from loadtest.support.redis_server import RedisServer

pytestmark = pytest.mark.one_server  # commands and their words


def failed(*arguments: str, **settings: object) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "exec_service", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
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
    assert own_server.say("SCARD", "x1:workers") + own_server.say("SCARD", "x1:gateways") == ":0\r\n:0\r\n"


def test_a_worker_that_is_killed_is_reported_as_lost_and_one_that_stops_is_not(own_server: RedisServer) -> None:
    with Part.gateway(own_server.url) as gateway, Part.echo(own_server.url) as stopped, Part.echo(own_server.url) as killed:
        stopped.kill(signal.SIGTERM)
        assert stopped.wait() == 0
        killed.kill()
        wait_until(lambda: "a worker was lost" in gateway.words, "lost")
        assert gateway.words.count("a worker was lost") == 1


def test_a_worker_whose_queue_is_away_is_alive_and_not_ready(own_server: RedisServer) -> None:
    with Part.echo(own_server.url) as worker:
        own_server.stop()
        wait_until(lambda: not answers(f"{worker.side_url}/readyz"), "not ready")
        assert httpx.get(f"{worker.side_url}/readyz").text == "job queue unavailable\n"
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


BREAK_TAKE = """
import asyncio, os
from exec_wire.queue.redis_worker import RedisWorkerEnd
take = RedisWorkerEnd.take
async def take_until_broken(self, most, **more):
    while not os.path.exists({flag!r}):
        try:
            return await asyncio.wait_for(take(self, most, **more), 0.2)
        except TimeoutError:
            pass
    raise ZeroDivisionError("broken on purpose")
RedisWorkerEnd.take = take_until_broken
"""
BREAK_REFRESH = """
import os
from exec_service.dispatch.workers import WorkerRegistry
refresh = WorkerRegistry.refresh
async def refresh_until_broken(self, *arguments):
    if os.path.exists({flag!r}):
        raise ZeroDivisionError("broken on purpose")
    await refresh(self, *arguments)
WorkerRegistry.refresh = refresh_until_broken
"""
LONG_MS = 12_000  # what runs while the part gives up


class Breakable:
    """Parts that are started while it is in use break when they are told to."""

    def __init__(self, folder: Path, patch: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flag = folder / "broken"
        (folder / "sitecustomize.py").write_text(patch.format(flag=str(self.flag)))
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")

    def wait_not_ready(self, part: Part) -> str:
        """What it says while it finishes what it has."""

        def reason() -> str:
            answer = httpx.get(f"{part.side_url}/readyz")
            return answer.text if answer.status_code == 503 and "5 times" in answer.text else ""

        return str(wait_until(reason, "not ready, with the reason"))


def run_long(gateway: Part) -> Future[str]:
    """The status of a call that takes `LONG_MS`."""

    def run() -> str:
        return str(httpx.post(f"{gateway.url}/v1/run", json={"code": "x"}, timeout=60).json()["status"])

    return ThreadPoolExecutor(1).submit(run)


def test_a_worker_whose_task_keeps_failing_announces_no_slots_drains_and_exits_with_70(
    own_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Part.gateway(own_server.url) as gateway:
        breakable = Breakable(tmp_path, BREAK_TAKE, monkeypatch)
        with Part.echo(own_server.url, slots=2, echo_ms=LONG_MS) as worker:
            gateway.wait_for_workers(1)
            running = run_long(gateway)
            wait_until(lambda: worker.metrics()["exec_worker_busy"] == 1)
            breakable.flag.touch()
            assert "'take' failed 5 times" in breakable.wait_not_ready(worker)
            assert worker.metrics()['exec_task_failures_total{task="take"}'] >= 5
            wait_until(lambda: gateway.metrics()["exec_slots"] == 0)
            assert running.result(60) == "ok"
            assert worker.wait() == 70
            assert "ZeroDivisionError: broken on purpose" in worker.words and "Traceback" in worker.words


def test_a_gateway_whose_task_keeps_failing_is_not_ready_drains_and_exits_with_70(
    own_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Part.echo(own_server.url, slots=2, echo_ms=LONG_MS):
        breakable = Breakable(tmp_path, BREAK_REFRESH, monkeypatch)
        with Part.gateway(own_server.url) as gateway:
            gateway.wait_for_workers(1)
            running = run_long(gateway)
            wait_until(lambda: gateway.metrics()["exec_released"] == 1)
            breakable.flag.touch()
            assert "'worker_registry' failed 5 times" in breakable.wait_not_ready(gateway)
            assert gateway.metrics()['exec_task_failures_total{task="worker_registry"}'] >= 5
            assert running.result(60) == "ok"
            assert gateway.wait() == 70
            assert "ZeroDivisionError: broken on purpose" in gateway.words and "Traceback" in gateway.words


def test_a_service_on_one_machine_whose_task_keeps_failing_exits_with_70(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_sandbox()
    breakable = Breakable(tmp_path, BREAK_REFRESH, monkeypatch)
    with Part.up(profiles='{"bare": []}', slots=1) as service:
        breakable.flag.touch()
        assert service.wait() == 70
        assert "ZeroDivisionError: broken on purpose" in service.words
