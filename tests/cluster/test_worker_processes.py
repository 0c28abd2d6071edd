"""One worker of several processes: to Redis it is several workers, to its operator one."""

import os
import signal

import httpx
import pytest
from common import wait_until
from sandbox_harness import need_sandbox
from test_gateway_processes import children
from test_processes import failed

from exec_client import Client
from loadtest.support.processes import Part
from loadtest.support.redis_server import RedisServer

pytestmark = pytest.mark.one_server


def test_processes_share_the_slots_and_one_that_dies_or_is_replaced_loses_no_call(own_server: RedisServer) -> None:
    codes = [f"{number}" for number in range(300)]
    with Part.gateway(own_server.url) as gateway, Part.echo(own_server.url, 5, processes=2, echo_ms=50) as worker:
        gateway.wait_for_workers(2)
        assert gateway.metrics()["exec_slots"] == 5
        assert sorted(one["slots"] for one in httpx.get(f"{gateway.url}/v1/info").json()["worker_list"]) == [2, 3]
        with Client(gateway.url) as client:
            assert [result.stdout for result in client.run_many(codes)] == codes
            assert worker.metrics()['exec_worker_answers_total{blame="none",status="ok"}'] == 300
            assert (worker.metrics()["exec_worker_slots"], worker.metrics()["exec_worker_queue_up"]) == (5, 1)
            before = children(worker)
            os.kill(before.pop(), signal.SIGKILL)
            assert [result.stdout for result in client.run_many(codes)] == codes
            wait_until(lambda: len(children(worker)) == 2, "another process")
            before = children(worker)
            worker.kill(signal.SIGHUP)
            assert [result.stdout for result in client.run_many(codes)] == codes
            wait_until(lambda: len(children(worker)) == 2 and not children(worker) & before, "two new processes")
        worker.kill(signal.SIGTERM)
        assert worker.wait() == 0
        wait_until(lambda: own_server.say("SCARD", "x1:workers") == ":0\r\n", "all deregistered, or were forgotten")


def test_each_process_has_a_sandbox_of_its_own(own_server: RedisServer) -> None:
    need_sandbox()
    settings = {"processes": 2, "slots": 2, "profiles": '{"bare": []}'}
    with Part.gateway(own_server.url) as gateway, Part.worker(own_server.url, **settings), Client(gateway.url) as client:
        gateway.wait_for_workers(2)
        results = client.run_many(["import os; print(os.getuid())"] * 20)
        assert {result.status for result in results} == {"ok"}
        assert len({result.worker for result in results}) == 2


def test_processes_that_cannot_be_are_refused() -> None:
    code, words = failed("worker", "--redis", "redis://localhost:1", "--processes", "3", "--slots", "2")
    assert code == 2 and "3 processes for 2 slots" in words
    code, words = failed("worker", "--redis", "redis://localhost:1", processes=2, runner_socket="/run/none.sock")
    assert code == 2 and "its own runners" in words
