"""One gateway of several processes: to its callers and operators it is one gateway."""

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from common import wait_until
from test_processes import failed

from exec_client import Client
from exec_service.telemetry.processes import Question, ask
from exec_service.tenants.keys import add_key
from loadtest.support.processes import Part, free_port
from loadtest.support.redis_server import RedisServer

pytestmark = pytest.mark.one_server  # how processes share a gateway does not depend on it
OK = 'exec_calls_total{blame="none",status="ok"}'


def gateway(server: RedisServer, *arguments: str, **settings: object) -> Part:
    return Part.gateway(server.url, "--processes", "2", *arguments, **settings)


def children(part: Part) -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{part.pid}/task/{part.pid}/children").read_text().split()}


def figure(pid: int, name: str = OK) -> float:
    """A metric of this process alone."""
    [socket] = Path(tempfile.gettempdir()).glob(f"exec-service-*/{pid}")
    report = asyncio.run(ask(socket, Question("metrics")))
    assert report is not None
    return next(float(line.split()[-1]) for line in report.metrics.splitlines() if line.startswith(name))


@contextmanager
def stalled(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def run(part: Part, code: str = "x", **fields: object) -> Any:
    """By a connection of its own."""
    return httpx.post(f"{part.url}/v1/run", json={"code": code, **fields}, timeout=60).json()


def stats(part: Part, **query: str) -> Any:
    return httpx.get(f"{part.url}/v1/stats", params=query, timeout=30).json()


def test_every_process_shows_the_calls_of_all_and_the_metrics_port_adds_them_up(own_server: RedisServer) -> None:
    with gateway(own_server) as part, Part.echo(own_server.url) as worker:
        part.wait_for_workers(1)
        for pid in sorted(children(part)):
            with stalled(pid):  # the other one accepts what comes
                results = [run(part, f"{number}", tags={"run": "r", "step": 1}) for number in range(20)]
            assert [result["stdout"] for result in results] == [str(number) for number in range(20)]
        assert [figure(pid) for pid in children(part)] == [20, 20]
        metrics = part.metrics()
        assert (metrics[OK], metrics['exec_run_calls_total{blame="none",run="r",status="ok"}']) == (40, 40)
        assert metrics['exec_stage_seconds_count{stage="total"}'] == 40
        assert (metrics["exec_workers"], metrics["exec_slots"]) == (1, 64)
        assert worker.metrics()["exec_worker_taken_total"] == 40
        assert stats(part)["runs"][0]["calls"] == 40
        assert stats(part, run="r")["steps"][0]["statuses"] == {"ok": 40}
        wait_until(lambda: sum(second["none"] for second in stats(part)["seconds"]) == 40, "whole seconds in the live view")


def test_a_killed_process_loses_no_call_and_no_count_and_is_replaced(own_server: RedisServer) -> None:
    with gateway(own_server) as part, Part.echo(own_server.url, slots=8, echo_ms=50):
        part.wait_for_workers(1)
        before, codes = children(part), [f"{number}" for number in range(400)]
        counted = part.metrics()[OK]
        with Client(part.url) as client, ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.run_many, codes)
            wait_until(lambda: part.metrics()[OK] >= 20)
            busy = max(before, key=figure)
            counted = part.metrics()[OK]
            os.kill(busy, signal.SIGKILL)
            assert [result.stdout for result in running.result(120)] == codes
        wait_until(lambda: len(children(part)) == 2 and busy not in children(part), "another process")
        assert part.metrics()[OK] > counted
        assert f"process {busy} was killed by signal 9" in part.words
        assert part.metrics()['exec_task_failures_total{task="processes"}'] == 1


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_rolling_restart_under_load_loses_and_refuses_nothing(own_server: RedisServer, transport: str) -> None:
    port = free_port()
    with gateway(own_server, "--grpc-port", str(port)) as part, Part.echo(own_server.url, echo_ms=20):
        part.wait_for_workers(1)
        before, over, sent, wrong = children(part), threading.Event(), [0], list[object]()

        def call_by_http() -> None:
            """Without a second attempt at anything."""
            with httpx.Client(timeout=60) as client:
                while not over.is_set():
                    sent[0] += 1
                    answer = client.post(f"{part.url}/v1/run", json={"code": "x"})
                    if answer.status_code != 200 or answer.json()["status"] != "ok":
                        wrong.append(answer.text)

        def call_by_grpc() -> None:
            with Client(f"grpc://127.0.0.1:{port}") as client:
                while not over.is_set():
                    sent[0] += 20
                    wrong.extend(result for result in client.run_many(["x"] * 20) if result.status != "ok")

        call = call_by_http if transport == "http" else call_by_grpc
        with ThreadPoolExecutor(4) as pool:
            calling = [pool.submit(call) for _ in range(4)]
            part.kill(signal.SIGHUP)
            try:
                wait_until(lambda: len(children(part)) == 2 and not children(part) & before, "two new processes")
            finally:
                over.set()
            for one in calling:
                one.result(60)
        assert wrong == [] and sent[0] > 0
        assert part.metrics()[OK] == sent[0] or transport == "grpc"  # a call sent again is answered twice, to one caller once
        assert part.metrics()['exec_task_failures_total{task="processes"}'] == 0
        assert "Traceback" not in part.words


def test_the_limits_of_a_tenant_hold_for_all_processes_together(own_server: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    headers = {"authorization": f"Bearer {add_key(file, 'small', max_calls=3)[0]}"}
    with gateway(own_server, keys=str(file)) as part, Part.echo(own_server.url, echo_ms=60_000):
        part.wait_for_workers(1)
        one, two = sorted(children(part))

        def call(timeout_s: float) -> str:
            try:
                answer = httpx.post(f"{part.url}/v1/run", json={"code": "x"}, headers=headers, timeout=timeout_s)
                return str(answer.json()["code"])
            except httpx.TransportError:
                return ""

        with ThreadPoolExecutor(3) as pool:
            with stalled(one):
                held = [pool.submit(call, 120) for _ in range(3)]
                wait_until(lambda: figure(two, "exec_in_flight") == 3, "three calls at one process")

            def refused_by_the_other() -> bool:
                call(1)
                return figure(one, 'exec_rejected_total{reason="tenant_busy"}') > 0

            wait_until(refused_by_the_other, "the other process knows")
            wait_until(lambda: part.metrics()["exec_in_flight"] == 3, "what it had accepted before is cancelled")
            part.kill()  # and with it its children
            assert [one.result(60) for one in held] == ["", "", ""]


def test_the_children_end_with_their_parent(own_server: RedisServer) -> None:
    with gateway(own_server) as part:
        pids = children(part)
        part.kill()
        part.wait()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "no process is left")


def test_sigterm_finishes_the_calls_of_every_process_and_a_second_gateway_has_the_port(own_server: RedisServer) -> None:
    with gateway(own_server) as part, Part.echo(own_server.url, echo_ms=3000):
        part.wait_for_workers(1)
        url, pids = part.url, children(part)
        with ThreadPoolExecutor(8) as pool:
            running = [pool.submit(run, part) for _ in range(8)]
            wait_until(lambda: part.metrics()["exec_in_flight"] == 8)
            part.kill(signal.SIGTERM)
            assert [one.result(60)["status"] for one in running] == ["ok"] * 8
        assert part.wait() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        with gateway(own_server, "--port", url.rpartition(":")[2]) as second:
            assert second.url == url


def test_it_is_ready_while_one_process_is(own_server: RedisServer) -> None:
    with gateway(own_server) as part:
        one, two = children(part)
        with stalled(one):
            assert httpx.get(f"{part.side_url}/readyz", timeout=30).text == "ready\n"
            with stalled(two):
                answer = httpx.get(f"{part.side_url}/readyz", timeout=30)
                assert answer.status_code == 503 and "does not answer" in answer.text


def test_processes_that_keep_dying_end_the_gateway_with_70(own_server: RedisServer) -> None:
    with gateway(own_server) as part:
        for _ in range(5):
            wait_until(lambda: len(children(part)) == 2 or not part.alive, "both run")
            os.kill(children(part).pop(), signal.SIGKILL)
            wait_until(lambda: len(children(part)) != 2, "one died")
        assert part.wait() == 70
        assert "'processes' failed 5 times" in part.words


def test_a_gateway_that_cannot_start_exits_as_its_processes_do(own_server: RedisServer, tmp_path: Path) -> None:
    code, words = failed("gateway", "--processes", "2", "--redis", own_server.url, "--keys", str(tmp_path / "none.json"))
    assert code == 2 and "cannot read the key file" in words
    code, words = failed("gateway", "--processes", "0", "--redis", own_server.url)
    assert code == 2 and "at least 1" in words
    with gateway(own_server) as part:
        port = part.url.rpartition(":")[2]
        code, words = failed("gateway", "--processes", "2", "--redis", own_server.url, "--port", port, "--grpc-port", "0")
        assert code == 69 and port in words
