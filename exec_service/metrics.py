"""What the gateway counts, in a registry of its own. Children of labels are made once: `labels()` costs more than `inc()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from exec_service.fleet import Fleet
from exec_wire.messages import BLAME, Blame, Result, Status
from exec_wire.queue import TIERS

CONTENT_TYPE = CONTENT_TYPE_LATEST
STAGES = ("queue", "start", "run", "total")
STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
ROUTES = (
    *("/v1/run", "/v1/batch", "/v1/judge", "/v1/verify", "/v1/calls", "/v1/info"),
    *("/healthz", "/readyz", "/metrics", "/docs", "/openapi.json", "/v1/tools", "/mcp"),
    *("/ping", "/status", "/run", "/judge", "/run/batch", "/run/long-batch", "/judge/batch", "/judge/long-batch"),
    *("/v1/ping", "/run_code", "/run_jupyter", "/submit", "/execute", "/sessions", "/health"),
    *("/api/v2/execute", "/api/v2/runtimes"),
)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._calls = self._counter("exec_calls", "Calls by what became of them", "status", "blame")
        self._call = {(status, blame): self._calls.labels(status, blame) for status, blame in BLAME.items()}
        self._door_calls = self._counter(
            "exec_door_calls", "Calls that came through a door for other clients", "door", "status", "blame"
        )
        stages = Histogram(
            "exec_stage_seconds",
            "Time a call spent in each stage: waiting, starting, running, and all of it",
            ["stage"],
            buckets=STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self._queue, self._start, self._run, self._total = (stages.labels(stage) for stage in STAGES)
        self._rejected = self._counter("exec_rejected", "Requests refused, by problem code", "reason")
        self._requests = self._counter("exec_http_requests", "HTTP requests by route and status code", "route", "code")
        self._request: dict[tuple[str, int], Counter] = {}
        self._grpc_requests = self._counter("exec_grpc_requests", "gRPC requests by method and status code", "method", "code")
        self._late = Counter(
            "exec_late_answers",
            "Answers dropped because their call was already answered or cancelled",
            registry=self.registry,
        )

        self._republished = Counter(
            "exec_republished",
            "Calls published again because the queue had lost them",
            registry=self.registry,
        )

    def watch(self, fleet: Fleet, **depths: Callable[[], float]) -> None:
        """Gauges that are read when somebody looks: `depths` is in_flight, in_flight_bytes, waiting, released, queue_up."""
        help_of = {
            "in_flight": "Calls accepted and not yet delivered",
            "in_flight_bytes": "Bytes of accepted calls and undelivered results",
            "waiting": "Calls waiting in the gateway for a place at the workers",
            "released": "Calls released to workers and unanswered",
            "queue_up": "1 if the job queue can be used",
        }
        for name, read in depths.items():
            Gauge(f"exec_{name}", help_of[name], registry=self.registry).set_function(read)
        Gauge("exec_workers", "Live workers", registry=self.registry).set_function(lambda: len(fleet.workers))
        Gauge("exec_slots", "Slots of all live workers", registry=self.registry).set_function(lambda: fleet.slots)
        tiers = Gauge("exec_sandbox_tier", "Live workers by the isolation tier they offer", ["tier"], registry=self.registry)
        for tier in TIERS:
            tiers.labels(tier).set_function(partial(fleet.workers_of, tier))
        self.registry.register(Layers(fleet))

    def finished(self, result: Result, door: str = "") -> None:
        self._count(result.status, result.blame, door)
        timings = result.timings
        self._queue.observe(timings.queue_ms / 1000)
        self._total.observe(timings.total_ms / 1000)
        if timings.run_ms:  # what never ran has no times of running
            self._start.observe(timings.start_ms / 1000)
            self._run.observe(timings.run_ms / 1000)

    def cancelled(self, door: str = "") -> None:
        self._count("cancelled", "client", door)

    def late(self) -> None:
        self._late.inc()

    def republished(self, calls: int) -> None:
        self._republished.inc(calls)

    def rejected(self, code: str) -> None:
        self._rejected.labels(code).inc()

    def request(self, route: str, code: int) -> None:
        # A path that we do not serve must not become a label of its own.
        key = (route if route in ROUTES else "other", code)
        if key not in self._request:
            self._request[key] = self._requests.labels(key[0], str(code))
        self._request[key].inc()

    def grpc_request(self, method: str, code: str) -> None:
        self._grpc_requests.labels(method, code).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _count(self, status: Status, blame: Blame, door: str) -> None:
        child = self._call.get((status, blame))
        if child is None:
            child = self._call[(status, blame)] = self._calls.labels(status, blame)
        child.inc()
        if door:
            self._door_calls.labels(door, status, blame).inc()

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, labels, registry=self.registry)


class Layers(Collector):
    """A gauge per layer of isolation. Which ones there are is known only when the workers have said so."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        gauges = GaugeMetricFamily("exec_sandbox_layer", "1 if every live worker has this layer of isolation", labels=["layer"])
        for layer, everywhere in self._fleet.layer_everywhere().items():
            gauges.add_metric([layer], everywhere)
        yield gauges
