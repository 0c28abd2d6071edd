"""A real Prometheus that scrapes a real service, and the rules and dashboards that it is asked for."""

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from common import answers, unavailable, wait_until

from loadtest.support.processes import free_port

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "exec-service"
RULES = CHART / "rules" / "exec-service.yaml"
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
UNPACKED = ROOT / ".tools" / "debian" / "usr" / "bin"
VARIABLES = {"$__rate_interval": "5s", "$namespace": ".*", "$run": ".*"}


def tool(name: str) -> str:
    """Its path; skipped on a laptop that has it not, failed in CI."""
    path = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if path is None:
        unavailable(f"there is no {name}: sh deploy/test-tools.sh")
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

        def has_value() -> bool:
            return bool(found := self.query(expression)) and all(sample["value"][1] != "NaN" for sample in found)

        wait_until(has_value, expression, every_s=0.5)

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
    port = free_port()
    command = [
        *(tool("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/-/ready"), (folder / "log").read_text, 60, 0.05)
        yield prometheus
    finally:
        process.terminate()
        process.wait(20)


def queries(dashboard: Path) -> list[tuple[str, str]]:
    """Title of the panel and expression, as Grafana would send it."""
    panels = json.loads(dashboard.read_text())["panels"]
    return [(panel["title"], filled(target["expr"])) for panel in panels for target in panel.get("targets", [])]


def filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert not re.search(r"\$\w", expression), f"a variable that this test does not know: {expression}"
    return expression
