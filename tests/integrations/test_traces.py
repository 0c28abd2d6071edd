"""The traces of a rollout in Phoenix, a published OTLP receiver. TRACE_PICTURE=FILE also takes a picture of its page."""

import contextlib
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from common import answers, wait_until
from conftest import VENVS
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from service_harness import serving
from web_harness import PATIENCE_MS, browsing

from loadtest.support.processes import free_port

TURNS = ["import numpy; print(numpy.arange(4).sum())", "import time; time.sleep(0.05)", "print(1 / 0)"]


@contextlib.contextmanager
def phoenix(folder: Path) -> Iterator[str]:
    program = VENVS / "phoenix" / "bin" / "phoenix"
    if not (VENVS / "phoenix" / "installed").exists():
        pytest.skip("Phoenix cannot be installed here: see .integrations/phoenix/pip.log")
    port, grpc_port = free_port(), free_port()
    settings = {"PORT": port, "GRPC_PORT": grpc_port, "HOST": "127.0.0.1", "WORKING_DIR": folder, "TELEMETRY_ENABLED": "false"}
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    environment |= {f"PHOENIX_{name}": str(value) for name, value in settings.items()}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([str(program), "serve"], env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/healthz"), (folder / "log").read_text, 180, 0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def run_rollout(service: Any, receiver: str) -> None:
    """As a trainer with OpenTelemetry does: a span of its own, and calls with its `traceparent`."""
    provider = TracerProvider(resource=Resource.create({"service.name": "trainer"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{receiver}/v1/traces")))
    with provider.get_tracer("trainer").start_as_current_span("rollout") as span:
        context = span.get_span_context()
        header = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-01"}
        for step, code in enumerate(TURNS):
            body = {"code": code, "tags": {"run": "my-run", "step": step}}
            assert service.http.post("/v1/run", json=body, headers=header).status_code == 200
    provider.shutdown()


def test_receiver_shows_each_call_of_a_rollout_with_its_stages(tmp_path: Path) -> None:
    with phoenix(tmp_path) as receiver:
        with serving(profiles='{"bare": [], "numpy": ["numpy"]}', otlp_endpoint=receiver) as service:
            run_rollout(service, receiver)
        # The service has sent everything when it has ended; the receiver writes it to its database in its own time.

        def spans() -> list[dict[str, Any]]:
            return list(httpx.get(f"{receiver}/v1/projects/default/spans", params={"limit": 100}).json()["data"])

        wait_until(lambda: len(spans()) == 1 + 4 * len(TURNS), lambda: str(spans()), 60, 0.5)
        found = spans()
        assert Counter(span["name"] for span in found) == {"rollout": 1} | {
            f"exec.{name}": len(TURNS) for name in ("call", "queue", "start", "run")
        }
        assert len({span["context"]["trace_id"] for span in found}) == 1
        ids = {span["name"]: {one["context"]["span_id"] for one in found if one["name"] == span["name"]} for span in found}
        for span in found:
            if span["name"] != "rollout":
                assert span["parent_id"] in ids["rollout" if span["name"] == "exec.call" else "exec.call"]
        statuses = {
            span["attributes"]["exec.step"]: span["attributes"]["exec.status"]
            for span in found
            if "exec.step" in span["attributes"]
        }
        assert statuses == {0: "ok", 1: "ok", 2: "error"}
        if picture := os.environ.get("TRACE_PICTURE"):
            take_picture(receiver, found[0]["context"]["trace_id"], picture)


def take_picture(receiver: str, trace: str, file: str) -> None:
    [project] = httpx.get(f"{receiver}/v1/projects").json()["data"]
    with browsing() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{receiver}/projects/{project['id']}/traces/{trace}")
        page.get_by_text("exec.call").first.click()
        page.get_by_text("exec.profile").first.wait_for()
        time.sleep(2)  # its animations
        page.screenshot(path=file)
