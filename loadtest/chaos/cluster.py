"""The cluster that faults are injected into: real processes on this machine."""

import contextlib
import http.client
import random
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import msgspec

from loadtest.support import meter
from loadtest.support.moved_clock import MovedServer
from loadtest.support.processes import Part
from loadtest.support.proxy import Proxy
from loadtest.support.redis_cluster import RedisCluster
from loadtest.support.steady_load import Program

WORKERS, GATEWAYS = 3, 2
PATIENCE_S = 60.0
SERVER_HZ = 10  # Redis' default; at 500 it uses 2 % of a core at rest
GATEWAY_SETTINGS = {"max_calls": 1000, "max_calls_per_request": 500, "write_stall_s": 4}
ECHO_SETTINGS = {"slots": 64, "echo_ms": 50}
SANDBOX_SETTINGS = {"slots": 2, "profiles": '{"bare": []}', "min_tier": "D"}
PROBES = 8  # of each program
PROBE_S = 300.0  # the deadline of a probe: shorter, a busy machine would be blamed for an endless program
VERDICTS = {"print(1)": ("ok", "none"), "raise SystemExit(3)": ("error", "model"), "while True: pass": ("timeout", "model")}
COUNTERS = {
    "late": "exec_late_answers_total",
    "published_again": "exec_republished_total",
    "taken_again": "exec_worker_taken_again_total",
    "started_again": "exec_worker_started_again_total",
}


class Cluster:
    """Two gateways, three workers, and one Redis or several as one queue. The faults of a server meet `redis`, the last one.
    The last gateway and the last worker reach it through a proxy."""

    def __init__(self, *, sandbox: bool = False, seed: int, shards: int = 1, redis_cluster: bool = False) -> None:
        self.chance = random.Random(seed)
        self.program = Program.python if sandbox else Program.echo
        self.redis_cluster = RedisCluster(shards) if redis_cluster else None  # with a replica of each primary
        self.servers = self.redis_cluster.primaries if self.redis_cluster else [MovedServer(SERVER_HZ) for _ in range(shards)]
        self.used = shards  # how many of them are the queue
        self.redis, self.gateways, self.workers = self.servers[-1], list[Part](), list[Part]()
        self.sandbox = sandbox
        self._stack = contextlib.ExitStack()
        self._removed: Counter[str] = Counter()  # counters of processes that were removed

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for server in [self.redis_cluster] if self.redis_cluster else self.servers:
                stack.enter_context(server)
            self.proxy = stack.enter_context(Proxy(self.redis.port))
            stack.callback(self._close_parts)
            self.gateways = [self._gateway(last) for last in (False, True)]
            self.workers = [self._worker(last) for last in (False, False, True)]
            for part in (*self.gateways, *self.workers):
                part.wait_ready()
            self._stack = stack.pop_all()
        self.wait_for_workers()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _close_parts(self) -> None:
        parts = [*self.workers, *self.gateways]
        for part in parts:
            if part.alive:
                part.kill(signal.SIGCONT)
                part.kill(signal.SIGTERM)
        for part in parts:
            part.close()

    def _redis(self, last: bool) -> str:
        """EXEC_REDIS of a gateway or a worker; the `last` one uses the proxy."""
        if self.redis_cluster is not None:
            return self.redis_cluster.url
        urls = [server.url for server in self.servers[: self.used]]
        if last and self.used == len(self.servers):
            urls[-1] = self.proxy.url
        return ",".join(f"{url}#{number}" for number, url in enumerate(urls)) if len(self.servers) > 1 else urls[0]

    def _gateway(self, last: bool = False) -> Part:
        return Part.gateway(self._redis(last), **GATEWAY_SETTINGS)

    def _worker(self, last: bool = False) -> Part:
        redis = self._redis(last)
        return Part.worker(redis, **SANDBOX_SETTINGS) if self.sandbox else Part.echo(redis, **ECHO_SETTINGS)

    @property
    def urls(self) -> list[str]:
        return [gateway.url for gateway in self.gateways]

    def add_worker(self) -> None:
        self.workers.insert(0, self._worker().__enter__())

    def restart_all(self, parts: list[Part], start: Callable[[bool], Part]) -> None:
        """Replace one process after the other."""
        for number, part in enumerate(list(parts)):
            parts.insert(number, start(number == len(parts) - 1).__enter__())
            self.wait_for_workers()
            self._end(parts, part, signal.SIGTERM)

    def restart_workers(self) -> None:
        self.restart_all(self.workers, self._worker)

    def restart_gateways(self) -> None:
        self.restart_all(self.gateways, self._gateway)

    def remove(self, parts: list[Part], number: int) -> None:
        """Send a signal to a random process, but not to the last, which is behind the proxy, and wait for its end."""
        self._end(parts, self.chance.choice(parts[:-1]), number)

    def _end(self, parts: list[Part], part: Part, number: int) -> None:
        parts.remove(part)
        self._removed.update(counters_of(part))
        part.kill(number)
        part.wait()
        part.close()

    def replace_removed(self) -> None:
        while len(self.workers) < WORKERS:
            self.add_worker()
        while len(self.gateways) < GATEWAYS:
            self.gateways.insert(0, self._gateway().__enter__())
        self.wait_for_workers()

    def inner(self, name: str) -> list[int]:
        """The processes inside all workers whose command contains `name`."""
        pids = [pid for worker in self.workers for pid in meter.tree(worker.pid)]
        return [pid for pid in pids if name in command_of(pid)]

    def counters(self) -> Counter[str]:
        total = Counter(self._removed)
        for part in (*self.gateways, *self.workers):
            total.update(counters_of(part))
        return total

    def wait_for_workers(self) -> None:
        for gateway in self.gateways:
            gateway.wait_for_workers(len(self.workers), PATIENCE_S)

    def wait_until_healthy(self) -> None:
        """Until a new call to every gateway is answered within a second."""
        give_up = time.monotonic() + PATIENCE_S
        for url in self.urls:
            while not is_healthy(url) and time.monotonic() < give_up:
                time.sleep(0.05)

    def probe_workers(self) -> list[str]:
        """Problems after a fault: workers that take no calls, programs with a wrong verdict."""
        known = VERDICTS if self.sandbox else {"print(1)": ("ok", "none")}
        codes = [code for code in known for _ in range(PROBES)]
        calls = [{"code": code, "limits": {"wall_s": 0.3}, "tenant": "probe", "deadline_s": PROBE_S} for code in codes]
        seen: set[str] = set()
        wrong: Counter[str] = Counter()
        give_up = time.monotonic() + PATIENCE_S
        while len(seen) < len(self.workers) and time.monotonic() < give_up:
            answer = post(self.urls[0], "/v1/batch?stream=false", {"calls": calls}, PROBE_S) or {}
            for code, result in zip(codes, answer.get("results", []), strict=False):
                seen.add(result["worker"])
                verdict = (result["status"], result["blame"])
                if verdict != known[code]:
                    wrong[f"{code!r} ended as {verdict}"] += 1
        if len(seen) < len(self.workers):
            wrong[f"only {len(seen)} of {len(self.workers)} workers take calls"] += 1
        return list(wrong)


def counters_of(part: Part) -> dict[str, int]:
    metrics = part.metrics()
    return {name: int(metrics.get(metric, 0)) for name, metric in COUNTERS.items()}


def command_of(pid: int) -> str:
    return meter.proc_text(pid, "cmdline").replace("\0", " ")


def is_healthy(url: str) -> bool:
    answer = post(url, "/v1/run", {"code": "print(1)", "deadline_s": 5, "tenant": "probe"}, timeout_s=1.0)
    return answer is not None and answer.get("status") == "ok"


def post(url: str, path: str, body: Any, timeout_s: float) -> dict[str, Any] | None:
    """The response, or None if there is none in time, or if it is a refusal."""
    request = urllib.request.Request(url + path, msgspec.json.encode(body), {"content-type": "application/json"})
    with contextlib.suppress(OSError, http.client.HTTPException), urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return msgspec.json.decode(answer.read(), type=dict[str, Any])
    return None
