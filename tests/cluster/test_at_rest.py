"""A cluster at rest does next to nothing, whatever happened to it before: few commands and wake-ups, little CPU time."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from exec_client import Client
from loadtest.support import meter
from loadtest.support.processes import Part
from loadtest.support.proxy import Proxy
from loadtest.support.redis_server import RedisServer

LOOK_S = 4.0
# About 25 commands, 20 wake-ups and 0.003 cores are usual. A loop that does not wait makes thousands, or uses a core.
COMMANDS_PER_S, WAKE_UPS_PER_S, CORES = 60, 150, 0.2
PAST_LEASE_S = 7.0


def flush(server: RedisServer, worker: Part, proxy: Proxy) -> None:
    server.say("FLUSHALL")


def restart(server: RedisServer, worker: Part, proxy: Proxy) -> None:
    server.stop()
    time.sleep(1.0)
    server.start()


def break_connections(server: RedisServer, worker: Part, proxy: Proxy) -> None:
    for kind in ("normal", "pubsub"):
        server.say("CLIENT", "KILL", "TYPE", kind)


def stop_worker(server: RedisServer, worker: Part, proxy: Proxy) -> None:
    worker.kill(signal.SIGSTOP)
    time.sleep(PAST_LEASE_S)
    worker.kill(signal.SIGCONT)


def cut_off_worker(server: RedisServer, worker: Part, proxy: Proxy) -> None:
    proxy.stall()
    time.sleep(PAST_LEASE_S)
    proxy.go_on()


def wake_ups(part: Part) -> int:
    """Of its threads: how often one began to run."""
    lines = [line for file in Path(f"/proc/{part.pid}/task").glob("*/status") for line in file.read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def flush_restart_and_break_connections(server: RedisServer, worker: Part, proxy: Proxy) -> None:
    for fault in (flush, restart, break_connections):
        fault(server, worker, proxy)
        time.sleep(1.0)


SLOW_FAULTS = [pytest.param(fault, marks=pytest.mark.slow) for fault in (flush, restart, stop_worker, cut_off_worker)]


@pytest.mark.parametrize("fault", [flush_restart_and_break_connections, *SLOW_FAULTS])
def test_after_a_fault_a_cluster_at_rest_sends_few_commands_and_seldom_wakes_up(
    fault: Callable[[RedisServer, Part, Proxy], None], own_server: RedisServer
) -> None:
    with (
        Proxy(own_server.port) as proxy,
        Part.gateway(own_server.url) as gateway,
        Part.echo(proxy.url) as worker,
        Client(gateway.url) as client,
    ):
        gateway.wait_for_workers(1)
        assert len(client.run_many(["before"] * 100)) == 100
        fault(own_server, worker, proxy)
        assert client.run("after").stdout == "after"  # the worker takes calls again
        began, commands = time.monotonic(), own_server.info("total_commands_processed")
        before = [(part, wake_ups(part), meter.cpu_s(part.pid)) for part in (gateway, worker)]
        time.sleep(LOOK_S)
        looked_s = time.monotonic() - began
        assert (own_server.info("total_commands_processed") - commands) / looked_s < COMMANDS_PER_S
        for part, woken, cpu_s in before:
            assert (wake_ups(part) - woken) / looked_s < WAKE_UPS_PER_S, part.words
            assert (meter.cpu_s(part.pid) - cpu_s) / looked_s < CORES, part.words
