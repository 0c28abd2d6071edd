"""Sends a span for each call to an OpenTelemetry collector (OTLP over HTTP).

A span is made when its call has ended, from the timings in the result: workers take no part in tracing, and a service without
a collector does not import OpenTelemetry.
"""

import asyncio
import time

from exec_service.config import ConfigError
from exec_wire.messages.calls import Result, Tags

MISSING = "EXEC_OTLP_ENDPOINT is set, but OpenTelemetry is not installed: pip install 'exec-service[otel]'"


class Traces:
    def __init__(self, endpoint: str, ratio: float) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(f"{MISSING} ({error})") from None
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)), resource=Resource.create({"service.name": "exec-service"})
        )
        # Exports in a thread of its own; drops spans while its queue is full because the collector is unavailable.
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")))
        self._tracer = self._provider.get_tracer("exec_service")
        self._context_of = TraceContextTextMapPropagator().extract
        self._as_parent = trace.set_span_in_context
        self._server, self._failed = trace.SpanKind.SERVER, trace.Status(trace.StatusCode.ERROR)

    def call(self, result: Result, adapter: str, tenant: str, tags: Tags) -> None:
        """A span from acceptance to now, with a child span for each stage."""
        timings, end = result.timings, time.time_ns()
        begin = end - _ns(timings.total_ms)
        span = self._tracer.start_span(
            "exec.call",
            context=self._context_of({"traceparent": result.traceparent}),
            kind=self._server,
            start_time=begin,
            attributes=attributes_of(result, adapter, tenant, tags),
        )
        if span.is_recording():
            parent, at = self._as_parent(span), begin
            for stage, ms in (("queue", timings.queue_ms), ("start", timings.start_ms), ("run", timings.run_ms)):
                until = min(end, at + _ns(ms))  # a recorded result has the timings of an earlier run
                if until > at:
                    self._tracer.start_span(f"exec.{stage}", context=parent, start_time=at).end(until)
                at = until
        if result.blame == "infra":
            span.set_status(self._failed)
        span.end(end)

    async def close(self) -> None:
        """Send the remaining spans, in a thread: the collector may be slow or unavailable."""
        await asyncio.to_thread(self._provider.shutdown)


def attributes_of(result: Result, adapter: str, tenant: str, tags: Tags) -> dict[str, str | int]:
    known: dict[str, str | int | None] = {
        "exec.status": result.status,
        "exec.blame": result.blame,
        "exec.adapter": adapter,
        "exec.tenant": tenant,
        "exec.run": tags.run,
        "exec.step": tags.step,
        "exec.worker": result.worker,
        "exec.tier": result.sandbox.tier,
        "exec.profile": result.sandbox.profile,
        "exec.request_id": result.request_id,
    }
    return {name: value for name, value in known.items() if value is not None and value != ""}


def _ns(ms: float) -> int:
    return int(ms * 1e6)
