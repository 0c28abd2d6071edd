"""A real Prometheus that scrapes a real service, and the rules and dashboards that it is asked for."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "exec-service"
RULES = CHART / "rules" / "exec-service.yaml"
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
PATIENCE_S = 120.0
UNPACKED = ROOT / ".tools" / "debian" / "usr" / "bin"
VARIABLES = {"$__rate_interval": "5s", "$namespace": ".*", "$run": ".*"}


def tool(name: str) -> str:
    """Its path; skipped on a laptop that has it not, failed in CI."""
    path = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if path is None:
        words = f"there is no {name}: sh deploy/test-tools.sh"
        if os.environ.get("CI") == "true":
            pytest.fail(words)
        pytest.skip(words)
    return path


def promtool(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([tool("promtool"), *arguments], input=stdin, capture_output=True, timeout=60, cwd=ROOT)


class Prometheus:
    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=20)

    def query(self, expression: str) -> list[dict[str, Any]]:
        body = self.http.get("/api/v1/query", params={"query": expression}).json()
        assert body["status"] == "success", (expression, body)
        return list(body["data"]["result"])

    def wait_for(self, expression: str) -> None:
        """Until it has a value: a scrape may have failed, or be too young for a rate."""
        give_up = time.monotonic() + PATIENCE_S
        while not (found := self.query(expression)) or any(sample["value"][1] == "NaN" for sample in found):
            assert time.monotonic() < give_up, (expression, found)
            time.sleep(0.5)

    def rules(self) -> list[dict[str, Any]]:
        groups = self.http.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@contextlib.contextmanager
def scraping(target: str, folder: Path) -> Iterator[Prometheus]:
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "exec-service", "static_configs": [{"targets": [target.removeprefix("http://")]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        *(tool("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        wait_ready(prometheus, folder / "log")
        yield prometheus
    finally:
        process.terminate()
        process.wait(20)


def wait_ready(prometheus: Prometheus, log: Path) -> None:
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        with contextlib.suppress(httpx.TransportError):
            if prometheus.http.get("/-/ready").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def queries(dashboard: Path) -> list[tuple[str, str]]:
    """Title of the panel and expression, as Grafana would send it."""
    panels = json.loads(dashboard.read_text())["panels"]
    return [(panel["title"], filled(target["expr"])) for panel in panels for target in panel.get("targets", [])]


def filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert not re.search(r"\$\w", expression), f"a variable that this test does not know: {expression}"
    return expression
