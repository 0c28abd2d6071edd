"""Traces reach a collector over OTLP; without one OpenTelemetry is not even imported."""

import asyncio
import gzip
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from gateway_harness import running

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Understands as much of OTLP over HTTP as the exporter says."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        body = await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
        if "content-encoding: gzip" in head:
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    async with await asyncio.start_server(collector.serve, "127.0.0.1", 0) as server:
        collector.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield collector


async def test_a_call_is_a_span_under_its_caller_with_its_stages() -> None:
    async with collecting() as collector:
        async with running(otlp_endpoint=collector.url) as service:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            calls = {"code": "lose", "tags": {"run": "r", "step": 3}, "tenant": "lab"}
            await service.client.post("/v1/run", json=calls, headers=headers)
        spans = {span.name: span for span in collector.spans}
    call = spans["exec.call"]
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE, PARENT)
    attributes = {pair.key: pair.value.string_value or pair.value.int_value for pair in call.attributes}
    assert attributes.items() >= {"exec.status": "worker_lost", "exec.blame": "infra", "exec.run": "r", "exec.step": 3}.items()
    assert call.status.code == 2  # an error, since it was our fault
    stages = [span for name, span in spans.items() if name != "exec.call"]
    assert "exec.start" in spans
    assert all(stage.parent_span_id == call.span_id for stage in stages)
    assert all(call.start_time_unix_nano <= stage.start_time_unix_nano for stage in stages)
    assert all(stage.end_time_unix_nano <= call.end_time_unix_nano for stage in stages)


async def test_a_caller_who_does_not_sample_is_not_traced() -> None:
    async with collecting() as collector, running(otlp_endpoint=collector.url) as service:
        await service.client.post("/v1/run", json={"code": "say"}, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert collector.spans == []


async def test_a_share_of_zero_traces_only_what_callers_trace() -> None:
    async with collecting() as collector, running(otlp_endpoint=collector.url, trace_ratio=0.0) as service:
        await service.run()
        await service.client.post("/v1/run", json={"code": "say"}, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}


def test_without_a_collector_opentelemetry_is_not_imported() -> None:
    code = "import sys, exec_service.app; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
