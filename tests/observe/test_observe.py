"""Metrics, alert rules and dashboards fit each other, and a real Prometheus understands them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import promql_parser
import pytest
import yaml
from common import wait_until
from observe_harness import DASHBOARDS, ROOT, RULES, VARIABLES, Prometheus, promtool, queries, scraping
from service_harness import Service, serving
from web_harness import load

TESTS_OF_RULES = Path(__file__).parent / "rules.test.yaml"
RULE_LIST = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
ALERTS = [rule["alert"] for rule in RULE_LIST]
# In a cluster workers have these and gateways have not, or the other way around; `up` has both.
PANELS = [(f"{file.stem}: {title}", expression) for file in DASHBOARDS for title, expression in queries(file)]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving(profiles='{"bare": [], "numpy": ["numpy"]}') as service:
        yield service


@pytest.fixture(scope="module")
def prometheus(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It scrapes the service, which is under load."""
    with scraping(service.url, tmp_path_factory.mktemp("prometheus")) as prometheus, load(service.url, callers=2, per_batch=8):
        yield prometheus


def test_prometheus_scrapes_the_service(prometheus: Prometheus) -> None:
    prometheus.wait_for("up == 1")
    prometheus.wait_for("sum(rate(exec_calls_total[5s])) > 1")


@pytest.mark.parametrize("expression", [pytest.param(expression, id=panel) for panel, expression in PANELS])
def test_every_panel_has_data_under_load(prometheus: Prometheus, expression: str) -> None:
    prometheus.wait_for(expression)


def test_every_rule_is_evaluated_and_none_fires_in_peace(prometheus: Prometheus) -> None:
    wait_until(lambda: all(rule["health"] == "ok" for rule in prometheus.rules()), "it has looked at all rules", every_s=0.5)
    rules = prometheus.rules()
    assert [rule["name"] for rule in rules] == ALERTS
    assert {rule["health"] for rule in rules} == {"ok"}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


def test_the_metrics_are_named_by_convention(service: Service) -> None:
    service.run("print(1)")
    checked = promtool("check", "metrics", stdin=httpx.get(f"{service.url}/metrics").content)
    complaints = [line for line in (checked.stdout + checked.stderr).decode().splitlines() if line.startswith("exec_")]
    # `_created` is how the text format tells when a counter began.
    assert [line for line in complaints if "_created" not in line] == []


def test_every_metric_that_is_asked_for_exists(service: Service) -> None:
    service.run("print(1)")
    text = httpx.get(f"{service.url}/metrics").text
    known = set(re.findall(r"^# TYPE (\S+) ", text, re.M)) | set(re.findall(r"^(\w+)[{ ]", text, re.M))
    asked = {name for expression in _expressions() for name in re.findall(r"\b(?:exec|process)_\w+", expression)}
    assert asked - known == set()


def test_every_metric_is_in_the_documentation(service: Service) -> None:
    service.run("print(1)")
    text = httpx.get(f"{service.url}/metrics").text
    families = {name for name in re.findall(r"^# TYPE (exec_\S+) ", text, re.M) if not name.endswith("_created")}
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert {name for name in families if f"`{name}`" not in page} == set()


def _expressions() -> list[str]:
    return [expr for file in DASHBOARDS for _, expr in queries(file)] + [rule["expr"] for rule in RULE_LIST]


def test_every_expression_parses() -> None:
    for expression in _expressions():
        promql_parser.parse(expression)


def test_promtool_accepts_the_rules_and_their_tests_pass() -> None:
    checked = promtool("check", "rules", str(RULES))
    assert checked.returncode == 0, checked.stderr.decode()
    tested = promtool("test", "rules", str(TESTS_OF_RULES))
    assert tested.returncode == 0, (tested.stdout + tested.stderr).decode()


def test_every_alert_is_tested_to_fire_and_to_be_quiet() -> None:
    cases = [case for test in yaml.safe_load(TESTS_OF_RULES.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(ALERTS)
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == set(ALERTS)


def test_every_alert_is_explained_and_leads_there() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text()
    assert re.findall(r"^## (\w+)$", page, re.M) == ALERTS
    for rule in RULE_LIST:
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        severity = re.search(rf"^## {rule['alert']}\n\n(\w+)\.", page, re.M)
        assert severity is not None and severity[1] == rule["labels"]["severity"]


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_a_dashboard_has_panels_with_titles_that_do_not_overlap(file: Path) -> None:
    dashboard = json.loads(file.read_text())
    assert dashboard["uid"].startswith("exec-") and "exec-service" in dashboard["tags"]
    assert {variable["name"] for variable in dashboard["templating"]["list"]} >= {
        name.removeprefix("$") for name in VARIABLES if name in file.read_text() and name != "$__rate_interval"
    }
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        box = panel["gridPos"]
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert panel["title"] and box["x"] + box["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
