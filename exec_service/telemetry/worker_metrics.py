"""Metrics of a worker, read at each scrape."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from exec_service.telemetry.metric_types import labelled, process_metrics
from exec_wire.supervisor import Supervisor
from worker.consumer import Consumer
from worker.echo import EchoPool
from worker.pool import Pool


class WorkerMetrics(Collector):
    def __init__(self, pool: Pool | EchoPool, consumer: Consumer, supervisor: Supervisor | None = None) -> None:
        """`supervisor`: of a worker in a process of its own; else the gateway reports its tasks."""
        self._pool, self._consumer, self._supervisor = pool, consumer, supervisor
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        pool, consumer = self._pool, self._consumer
        answers = CounterMetricFamily("exec_worker_answers", "Answers by status and blame", labels=["status", "blame"])
        for labels, count in consumer.answered.items():
            answers.add_metric(labels, count)
        yield answers
        yield GaugeMetricFamily("exec_worker_slots", "Programs that can run at the same time", pool.slots)
        yield GaugeMetricFamily("exec_worker_busy", "Programs that run now", pool.slots - pool.free_slots)
        yield GaugeMetricFamily("exec_worker_queue_up", "1 if the job queue is available", not consumer.queue_unavailable)
        up = "1 if this server of the job queue can be used, if there are several"
        yield labelled(GaugeMetricFamily("exec_worker_shard_up", up, labels=["shard"]), consumer.shard_states)
        yield GaugeMetricFamily("exec_worker_draining", "1 if the worker takes no more jobs", consumer.draining)
        yield CounterMetricFamily("exec_worker_taken", "Jobs taken from the queue", consumer.taken)
        again = "Of these, jobs delivered before, to this or another worker"
        yield CounterMetricFamily("exec_worker_taken_again", again, consumer.taken_again)
        again = "Programs started again because their zygote died"
        yield CounterMetricFamily("exec_worker_started_again", again, consumer.started_again)
        yield CounterMetricFamily("exec_worker_zygote_restarts", "Zygotes replaced", pool.zygote_restarts)
        help = "Entries of the job queue that could not be read, by kind"
        yield labelled(CounterMetricFamily("exec_worker_unreadable_entries", help, labels=["kind"]), consumer.unreadable)
        if self._supervisor is not None:
            yield from process_metrics(self._supervisor)
