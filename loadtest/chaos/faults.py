"""The faults, as data: name and function. A function returns when its fault is over, with the loads that were part of it."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

from loadtest.chaos.cluster import GATEWAY_SETTINGS, Cluster, command_of
from loadtest.support.moved_clock import MovedServer
from loadtest.support.steady_load import Program, SteadyLoad

Fault = Callable[[Cluster], list[SteadyLoad] | None]

PAST_LEASE_S = 8.0
OUTAGE_S = 3.0
LARGE_BYTES = 200_000


def kill_all(pids: Sequence[int]) -> None:
    if not pids:
        raise RuntimeError("found no process to kill")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_zygotes(cluster: Cluster) -> None:
    kill_all(cluster.inner("inside/zygote.py"))


def kill_jails(cluster: Cluster) -> None:
    kill_all([pid for pid in cluster.inner("bin/nsjail") if "worker.sandbox" not in command_of(pid)])


def kill_runners(cluster: Cluster) -> None:
    kill_all(cluster.inner("worker.sandbox.runner"))


def kill_worker(cluster: Cluster) -> None:
    cluster.remove(cluster.workers, signal.SIGKILL)


def kill_gateway(cluster: Cluster) -> None:
    cluster.remove(cluster.gateways, signal.SIGKILL)


def replace_workers(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.add_worker()
        cluster.remove(cluster.workers, signal.SIGTERM)


def stop_worker(cluster: Cluster) -> None:
    worker = cluster.chance.choice(cluster.workers)
    worker.kill(signal.SIGSTOP)
    time.sleep(PAST_LEASE_S)
    worker.kill(signal.SIGCONT)


def restart_redis(cluster: Cluster) -> None:
    cluster.redis.stop()
    time.sleep(OUTAGE_S)
    cluster.redis.start()


def flush_redis(cluster: Cluster) -> None:
    for _ in range(2):
        cluster.redis.say("FLUSHALL")
        time.sleep(0.3)


def fill_redis(cluster: Cluster) -> None:
    cluster.redis.say("CONFIG", "SET", "maxmemory", "1")
    time.sleep(OUTAGE_S)
    cluster.redis.say("CONFIG", "SET", "maxmemory", "0")


def stop_redis(cluster: Cluster) -> None:
    os.kill(cluster.redis.pid, signal.SIGSTOP)
    time.sleep(PAST_LEASE_S)
    os.kill(cluster.redis.pid, signal.SIGCONT)


def partition(cluster: Cluster) -> None:
    cluster.proxy.stall()
    time.sleep(PAST_LEASE_S)
    cluster.proxy.go_on()


def add_servers(cluster: Cluster) -> None:
    """From the first server alone, to which it goes back before: workers before gateways, as documented."""
    for used in (1, len(cluster.servers)):
        cluster.used = used
        steps = [cluster.restart_workers, cluster.restart_gateways]
        for step in steps if used > 1 else reversed(steps):
            step()


def kill_primary(cluster: Cluster) -> None:
    """Its replica takes over; then it comes back as the replica."""
    assert cluster.redis_cluster is not None
    cluster.redis.stop()
    time.sleep(PAST_LEASE_S)
    cluster.redis.start()
    cluster.redis_cluster.wait_until_whole()


def move_clock(cluster: Cluster) -> None:
    assert isinstance(cluster.redis, MovedServer)
    for seconds in (3600, -7200, 3600):
        cluster.redis.clock.move(seconds)
        time.sleep(1.0)


def read_slowly(cluster: Cluster) -> list[SteadyLoad]:
    """Some clients read slowly; one reads nothing until the gateway closes its connection."""
    stall_s = GATEWAY_SETTINGS["write_stall_s"] + 2.0
    large = lambda name: Program.echo(name.ljust(LARGE_BYTES, "x"))  # noqa: E731
    return run_all(
        SteadyLoad(lambda: cluster.urls, large, 1, name="slow", callers=4, batch=50, most=200, read_pause_s=0.05),
        SteadyLoad(lambda: cluster.urls, large, 1, name="stalled", callers=1, batch=50, most=50, first_pause_s=stall_s),
    )


def overload(cluster: Cluster) -> list[SteadyLoad]:
    most = 10 * GATEWAY_SETTINGS["max_calls"] * len(cluster.gateways)
    return run_all(SteadyLoad(lambda: cluster.urls, cluster.program, 1, name="burst", callers=40, batch=most // 40, most=most))


def run_all(*loads: SteadyLoad) -> list[SteadyLoad]:
    with contextlib.ExitStack() as stack:
        for load in loads:
            stack.enter_context(load)
        for load in loads:
            load.join()
    return list(loads)


SANDBOXED: dict[str, Fault] = {
    "kill -9 every zygote": kill_zygotes,
    "kill -9 every nsjail": kill_jails,
    "kill -9 every runner": kill_runners,
    "kill -9 a worker (sandboxed)": kill_worker,
    "kill -9 a gateway (sandboxed)": kill_gateway,
}
ECHOED: dict[str, Fault] = {
    "kill -9 a worker": kill_worker,
    "kill -9 a gateway": kill_gateway,
    "workers join and leave": replace_workers,
    f"SIGSTOP a worker for {PAST_LEASE_S:g} s": stop_worker,
    f"Redis gone for {OUTAGE_S:g} s, empty afterwards": restart_redis,
    "FLUSHALL, twice": flush_redis,
    f"Redis out of memory for {OUTAGE_S:g} s": fill_redis,
    f"Redis silent for {PAST_LEASE_S:g} s": stop_redis,
    f"a gateway and a worker cut off for {PAST_LEASE_S:g} s": partition,
    "Redis' clock jumps by hours": move_clock,
    "slow and stalled clients": read_slowly,
    "10 x overload": overload,
}
SHARDED: dict[str, Fault] = {
    f"one of three servers gone for {OUTAGE_S:g} s, empty afterwards": restart_redis,
    "FLUSHALL of one of three servers, twice": flush_redis,
    f"one of three servers silent for {PAST_LEASE_S:g} s": stop_redis,
    f"a gateway and a worker cut off from one of three servers for {PAST_LEASE_S:g} s": partition,
    "kill -9 a worker of three servers": kill_worker,
    "one server becomes three": add_servers,
}
CLUSTERED: dict[str, Fault] = {"kill -9 a primary of a Redis Cluster": kill_primary}
SOAKED: dict[str, Fault] = {
    "kill -9 a worker": kill_worker,
    "kill -9 every zygote": kill_zygotes,
    "FLUSHALL, twice": flush_redis,
    "kill -9 a gateway": kill_gateway,
    "kill -9 every runner": kill_runners,
    f"SIGSTOP a worker for {PAST_LEASE_S:g} s": stop_worker,
    "kill -9 every nsjail": kill_jails,
    f"Redis gone for {OUTAGE_S:g} s, empty afterwards": restart_redis,
    f"a gateway and a worker cut off for {PAST_LEASE_S:g} s": partition,
}
