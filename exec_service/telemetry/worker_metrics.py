"""What a worker of a cluster counts, read when somebody looks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from exec_service.telemetry.metric_types import counted, dropped_log_lines, task_failures
from exec_wire.supervisor import Supervisor
from worker.consumer import Consumer
from worker.echo import EchoPool
from worker.pool import Pool


class WorkerMetrics(Collector):
    def __init__(self, pool: Pool | EchoPool, consumer: Consumer, supervisor: Supervisor | None = None) -> None:
        """`supervisor`: of a worker in a process of its own; else the gateway tells of its tasks."""
        self._pool, self._consumer, self._supervisor = pool, consumer, supervisor
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        pool, consumer = self._pool, self._consumer
        answers = CounterMetricFamily("exec_worker_answers", "Answers by what became of the call", labels=["status", "blame"])
        for labels, count in consumer.answered.items():
            answers.add_metric(labels, count)
        yield answers
        yield GaugeMetricFamily("exec_worker_slots", "Programs that can run at the same time", pool.slots)
        yield GaugeMetricFamily("exec_worker_busy", "Programs that run", pool.slots - pool.free_slots)
        yield GaugeMetricFamily("exec_worker_queue_up", "1 if the job queue can be used", not consumer.queue_unavailable)
        yield GaugeMetricFamily("exec_worker_draining", "1 if nothing more is taken", consumer.draining)
        yield CounterMetricFamily("exec_worker_taken", "Jobs taken from the queue", consumer.taken)
        yield CounterMetricFamily(
            "exec_worker_taken_again", "Of these, delivered before, here or elsewhere", consumer.taken_again
        )
        yield CounterMetricFamily(
            "exec_worker_started_again", "Programs started again because they were lost with a zygote", consumer.started_again
        )
        yield CounterMetricFamily("exec_worker_zygote_restarts", "Warm interpreters replaced", pool.zygote_restarts)
        help = "Entries of the job queue that could not be read, by kind"
        yield counted("exec_worker_unreadable_entries", help, "kind", consumer.unreadable)
        if self._supervisor is not None:
            yield task_failures(self._supervisor)
            yield dropped_log_lines()
