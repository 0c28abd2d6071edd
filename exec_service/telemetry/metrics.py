"""Metrics of the gateway, in a registry of its own.

Labels are bounded: names that callers choose (runs, tenants) are labels for the most recent ones only (`BoundedLabels`), and no
metric has two such labels, since series multiply. Steps are no label: `GET /v1/stats?run=…` has them (`live_stats`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.core import GaugeMetricFamily as gauge
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from exec_service.api.web_page import PAGE_ROUTES
from exec_service.telemetry.live_stats import LiveStats
from exec_service.telemetry.logs import log_infra
from exec_service.telemetry.metric_types import NONE, BoundedLabels, FastCounter, FastHistogram, labelled, process_metrics
from exec_service.telemetry.tracing import Traces
from exec_wire.messages.calls import BLAME, Blame, Result, Tags
from exec_wire.problems import PROBLEMS
from exec_wire.queue.protocol import TIERS, GatewayQueue
from exec_wire.supervisor import Supervisor

if TYPE_CHECKING:
    from exec_service.dispatch.dispatch import Dispatch
    from exec_service.dispatch.workers import WorkerRegistry

CONTENT_TYPE = CONTENT_TYPE_LATEST
STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
ROUTES = (
    *("/v1/run", "/v1/batch", "/v1/judge", "/v1/verify", "/v1/calls", "/v1/info"),
    *("/v1/sessions", "/v1/sessions/{id}", "/v1/sessions/{id}/run", "/v1/sessions/{id}/fork", "/v1/sessions/{id}/rollback"),
    *("/v1/sessions/{id}/interrupt", "/v1/sessions/{id}/files"),
    *("/healthz", "/readyz", "/metrics", "/docs", "/openapi.json", "/v1/tools", "/mcp"),
    *("/ping", "/status", "/run", "/judge", "/run/batch", "/run/long-batch", "/judge/batch", "/judge/long-batch"),
    *("/v1/ping", "/run_code", "/run_jupyter", "/submit", "/execute", "/sessions", "/sessions/{id}", "/health"),
    *("/api/v2/execute", "/api/v2/runtimes"),
    *("/v1/stats", "/v1/jobs", *PAGE_ROUTES),
)
SESSION_PREFIXES = ("/v1/sessions/", "/sessions/")  # followed by an id
SESSION_EVENTS = {
    "started": "Sessions started, without forks",
    "forks": "Forks of sessions",
    "rollbacks": "Sessions rolled back to their checkpoint",
    "expired": "Sessions ended because nobody used them",
    "lost": "Sessions lost with their zygote",
}
RUNS = TENANTS = 20  # with a label of their own
IDLE_S = 300.0  # for which a name keeps its label
NO_ADAPTER = "own"  # label of a call that came by our own HTTP or gRPC endpoints
NO_TAGS = Tags()
ENDS = tuple(BLAME.items())  # a status with another blame than its usual one is counted when it happens
BLAMES = tuple((blame,) for blame in get_args(Blame))

F = TypeVar("F", bound=Collector)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.live_stats = LiveStats()
        self.traces: Traces | None = None
        self._call = self._counter("exec_calls", "Calls by status and blame", "status", "blame")
        by_adapter = "Calls by the adapter that translated them"
        self._adapter_call = self._counter("exec_adapter_calls", by_adapter, "adapter", "status", "blame", rest=ENDS)
        self._stage = self._histogram("exec_stage_seconds", "Time of a call per stage: queue, start, run, total", "stage")
        starts = "Time to start a program, by profile of the warm interpreter"
        self._profile_start = self._histogram("exec_profile_start_seconds", starts, "profile")
        self._runs = BoundedLabels(RUNS, IDLE_S, self._forget_run)
        self._run_call = self._counter("exec_run_calls", "Calls by training run", "run", "status", "blame", rest=ENDS)
        self._run_total = self._histogram("exec_run_call_seconds", "Time from acceptance to result, by training run", "run")
        self._tenants = BoundedLabels(TENANTS, IDLE_S, self._forget_tenant)
        self._tenant_call = self._counter("exec_tenant_calls", "Calls by tenant", "tenant", "blame", rest=BLAMES)
        self._tenant_slot = self._counter("exec_tenant_slot_seconds", "Time that programs held a slot, by tenant", "tenant")
        self._rejected = self._counter("exec_rejected", "Requests refused, by problem code", "reason")
        self.requests = self._counter("exec_http_requests", "HTTP requests by route and status code", "route", "code")
        self.grpc_requests = self._counter("exec_grpc_requests", "gRPC requests by method and status code", "method", "code")
        self.late_answers = self._counter(
            "exec_late_answers", "Answers dropped because their call was already answered or cancelled"
        )
        self.republished = self._counter("exec_republished", "Calls published again because the queue had lost them")
        self.late_answers.begin()
        self.republished.begin()
        for status, blame in ENDS:
            self._call.begin(status, blame)
        for code in PROBLEMS:
            self._rejected.begin(code)

    def finished(
        self, result: Result, adapter: str = "", tenant: str = "", tags: Tags = NO_TAGS, *, answered: bool = True
    ) -> None:
        """Count a result; log it if the blame is `infra`. Not `answered`: the caller left before it."""
        timings, status, blame = result.timings, result.status, result.blame
        run = self._runs.label(tags.run) if tags.run else NONE
        of_tenant = self._tenants.label(tenant) if tenant else NONE
        self._call.counts[status, blame] += 1
        self._adapter_call.counts[adapter or NO_ADAPTER, status, blame] += 1
        self._run_call.counts[run, status, blame] += 1
        self._tenant_call.counts[of_tenant, blame] += 1
        self.live_stats.note(result, tenant, tags, answered=answered)
        if not answered:
            return
        stages = self._stage.rows
        times = [
            (stages["queue"], timings.queue_ms),
            (stages["total"], timings.total_ms),
            (self._run_total.rows[run], timings.total_ms),
        ]
        if timings.run_ms:  # it ran
            of_profile = self._profile_start.rows[result.sandbox.profile or "none"]
            times += (stages["start"], timings.start_ms), (stages["run"], timings.run_ms), (of_profile, timings.start_ms)
            self._tenant_slot.counts[(of_tenant,)] += (timings.start_ms + timings.run_ms) / 1000
        for row, ms in times:
            row[bisect_left(STAGE_BUCKETS_S, ms / 1000)] += 1
            row[-1] += ms / 1000
        if blame == "infra":
            log_infra(result, tenant)
        if self.traces is not None:
            self.traces.call(result, adapter or NO_ADAPTER, tenant, tags)

    def rejected(self, code: str) -> None:
        self._rejected.counts[(code,)] += 1

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _forget_run(self, run: str) -> None:
        self._run_call.forget(run)
        self._run_total.forget(run)

    def _forget_tenant(self, tenant: str) -> None:
        self._tenant_call.forget(tenant)
        self._tenant_slot.forget(tenant)

    def _counter(self, name: str, help: str, *labels: str, rest: Collection[tuple[str, ...]] = ()) -> FastCounter:
        return self._registered(FastCounter(name, help, labels, rest))

    def _histogram(self, name: str, help: str, label: str) -> FastHistogram:
        return self._registered(FastHistogram(name, help, label, STAGE_BUCKETS_S))

    def _registered(self, collector: F) -> F:
        self.registry.register(collector)
        return collector


@lru_cache(1024)
def route_of(path: str) -> str:
    """The label of a path."""
    for prefix in SESSION_PREFIXES:
        if path.startswith(prefix):
            _, _, verb = path.removeprefix(prefix).partition("/")
            path = f"{prefix}{{id}}/{verb}".rstrip("/")
    return path if path in ROUTES else "other"


class GatewayCollector(Collector):
    """What is read at each scrape: calls of this gateway, the heartbeats of live workers, and counts that should stay at 0."""

    def __init__(
        self, dispatch: Dispatch, worker_registry: WorkerRegistry, supervisor: Supervisor, queue: GatewayQueue
    ) -> None:
        self._dispatch, self._worker_registry, self._supervisor, self._queue = dispatch, worker_registry, supervisor, queue

    def collect(self) -> Iterator[Metric]:
        dispatch, registry, workers = self._dispatch, self._worker_registry, self._worker_registry.workers
        admission, oldest = dispatch.admission, "How long the call that waits longest for a credit has waited"
        yield gauge("exec_in_flight", "Calls accepted and not yet delivered", admission.calls)
        yield gauge("exec_in_flight_bytes", "Bytes of accepted calls and undelivered results", admission.bytes)
        yield gauge("exec_waiting", "Calls that wait in the gateway for a credit", len(dispatch.waiting))
        yield gauge("exec_released", "Calls released to workers and unanswered", len(dispatch.released))
        yield gauge("exec_queue_up", "1 if the job queue is available", not dispatch.away_because)
        states = self._queue.shards.states if self._queue.shards is not None else {}
        up = gauge("exec_shard_up", "1 if this server of the job queue can be used, if there are several", labels=["shard"])
        yield labelled(up, {name: state.available for name, state in states.items()})
        unanswered = gauge("exec_shard_released", "Calls released to workers by this server and unanswered", labels=["shard"])
        yield labelled(unanswered, {name: state.unanswered for name, state in states.items()})
        yield gauge("exec_queue_oldest_seconds", oldest, dispatch.oldest_wait_s)
        yield gauge("exec_workers", "Live workers", len(workers))
        yield gauge("exec_slots", "Slots of all live workers", registry.slots)
        tiers = dict.fromkeys(TIERS, 0) | Counter(worker.tier for worker in workers if worker.tier in TIERS)
        yield labelled(gauge("exec_sandbox_tier", "Live workers by the isolation tier they offer", labels=["tier"]), tiers)
        layers = gauge("exec_sandbox_layer", "1 if every live worker has this layer of isolation", labels=["layer"])
        yield labelled(layers, registry.layer_everywhere())
        sessions = gauge("exec_sessions", "Live sessions and forks of sessions", labels=["worker"])
        yield labelled(sessions, {worker.id: worker.sessions for worker in workers})
        memory = gauge("exec_session_memory_bytes", "Memory in use by sessions", labels=["worker"])
        yield labelled(memory, {worker.id: worker.session_memory_bytes for worker in workers})
        for event, help in SESSION_EVENTS.items():
            events = CounterMetricFamily(f"exec_sessions_{event}", help, labels=["worker"])
            yield labelled(events, {worker.id: worker.session_counts.get(event, 0) for worker in workers})
        yield from process_metrics(self._supervisor)
        unreadable = "Messages from workers and other gateways that could not be read, by kind"
        yield labelled(CounterMetricFamily("exec_unreadable_messages", unreadable, labels=["kind"]), self._queue.unreadable)
