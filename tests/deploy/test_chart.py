"""The chart renders every scenario into objects that Kubernetes knows, and refuses values that cannot be meant."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from chart_harness import CHART, ROOT, SCENARIOS, all_of, container, helm, one, pods, refusal, render, text_of, tool

KUBERNETES = ["1.30", "1.33", "1.37"]
SCHEMAS = Path(__file__).parent / "schemas"
each_scenario = pytest.mark.parametrize("scenario", SCENARIOS)


def test_the_scenarios_are_all_there() -> None:
    assert SCENARIOS == ["gvisor", "keda", "minimal", "production", "unprivileged"]


@each_scenario
def test_scenario_passes_the_linter(scenario: str) -> None:
    done = helm("lint", scenario, "--strict")
    assert done.returncode == 0, done.stdout


@each_scenario
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_fits_the_schemas_of_kubernetes(scenario: str, version: str, tmp_path: Path) -> None:
    file = tmp_path / "objects.yaml"
    file.write_text(text_of(scenario))
    done = tool("kubernetes-validate", "--strict", "--kubernetes-version", version, str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    unknown = set(re.findall(r"Couldn't find schema for kind (\w+)", done.stdout + done.stderr))
    assert unknown <= {path.stem for path in SCHEMAS.glob("*.json")}


@each_scenario
def test_every_object_of_another_api_fits_our_own_strict_schema(scenario: str) -> None:
    for found in render(scenario):
        schema = SCHEMAS / f"{found['kind']}.json"
        if schema.exists():
            jsonschema.validate(found, json.loads(schema.read_text()))


@each_scenario
def test_names_are_unique_begin_with_the_release_and_carry_the_usual_labels(scenario: str) -> None:
    objects = render(scenario)
    names = [(found["kind"], found["metadata"]["name"]) for found in objects]
    assert len(set(names)) == len(names)
    for found in objects:
        meta = found["metadata"]
        assert meta["name"].startswith("rel-exec-service")
        assert meta["namespace"] == "exec"
        assert meta["labels"]["app.kubernetes.io/instance"] == "rel"


@each_scenario
def test_selectors_find_their_pods_and_no_others(scenario: str) -> None:
    objects = render(scenario)
    labels = {
        found["metadata"]["name"]: found["spec"]["template"]["metadata"]["labels"]
        for found in objects
        if "template" in found.get("spec", {})
    }
    for found in all_of(objects, "Deployment") + all_of(objects, "DaemonSet"):
        wanted = found["spec"]["selector"]["matchLabels"].items()
        assert [name for name, have in labels.items() if wanted <= have.items()] == [found["metadata"]["name"]]
    for found in all_of(objects, "PodDisruptionBudget"):
        wanted = found["spec"]["selector"]["matchLabels"].items()
        assert [name for name, have in labels.items() if wanted <= have.items()] == [found["metadata"]["name"]]
        assert found["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@each_scenario
def test_pods_have_time_to_finish_their_calls(scenario: str) -> None:
    """Killed no earlier than preStop, the process's own patience and a margin; and that patience covers the longest call."""
    objects = render(scenario)
    longest = scenario_value(scenario, "longestCallSeconds")
    for found in all_of(objects, "Deployment"):
        name, pod = found["metadata"]["name"], found["spec"]["template"]["spec"]
        part = found["metadata"]["labels"]["app.kubernetes.io/component"]
        if part not in ("gateway", "worker"):
            continue
        drain = float(one(objects, "ConfigMap", name.removeprefix("rel-exec-service"))["data"]["EXEC_DRAIN_S"])
        pause = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert drain >= longest
        assert pod["terminationGracePeriodSeconds"] >= pause + drain + 10


def scenario_value(scenario: str, name: str) -> Any:
    given = yaml.safe_load((CHART / "ci" / f"{scenario}-values.yaml").read_text())
    return given.get(name, yaml.safe_load((CHART / "values.yaml").read_text())[name])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "gateway.config.drain_s=29"], "gateway: config.drain_s (29) is below longestCallSeconds (30)"),
        (["--set", "worker.config.drain_s=1"], "worker pool default: config.drain_s (1) is below longestCallSeconds (30)"),
        (["--set", "gateway.terminationGracePeriodSeconds=44"], "below preStop + drain_s + 10 = 45"),
        (["--set", "worker.pools.default.terminationGracePeriodSeconds=39"], "below preStop + drain_s + 10 = 40"),
        (["--set", "keys.existingSecret="], "exec-service keys add"),
        (["--set", "keys.file=x"], "one of the two"),
        (["--set", "valkey.enabled=false"], "the URL of the job queue"),
        (["--set", "valuesVersion=null,gateway.config.doors={mcp}"], "--reset-then-reuse-values"),
        (["--set", "redis.url=redis://:secret@host:6379"], "put the URL into a Secret"),
        (["--set", "worker.sandbox.profile=unprivileged"], "set config.min_tier"),
        (["--set", "worker.sandbox.profile=runtimeClass"], "needs runtimeClassName"),
        (["--set", "worker.config.min_tier=E"], "tier E is no isolation"),
        (["--set", "worker.autoscaling.mode=keda"], "worker.autoscaling.prometheus"),
        (["--set", "gateway.config.max_cals=1"], "max_cals"),
        (["--set", "gateway.config.max_calls=0"], "max_calls"),
        (["--set", "worker.pools.default.replica=1"], "replica"),
        (["--set", "worker.pools.Big_one.replicas=1"], "Big_one"),
        (["--set", "worker.sandbox.profile=root"], "profile"),
        (["--set", "gateway.replicas=two"], "gateway.replicas"),
        (["--set", "jobs.folder.size=big"], "jobs.folder.size"),
        (["--set", "jobs.folder.accessModes={ReadOnlyMany}"], "jobs.folder.accessModes"),
        (["--set", "jobs.config.jobs_chunks=0"], "jobs_chunks"),
    ],
)
def test_values_that_cannot_be_meant_are_refused_by_name(arguments: list[str], words: str) -> None:
    assert words in refusal("minimal", *arguments)


def test_all_values_that_are_missing_are_named_at_once() -> None:
    done = tool("helm", "template", "rel", str(CHART))
    assert done.returncode != 0
    for name in ("image.registry", "keys.existingSecret", "redis.existingSecret.name"):
        assert f"- {name}: " in done.stderr


def test_a_registry_in_the_names_of_the_images_is_enough() -> None:
    parts = ("gateway", "worker", "worker.runner")
    names = [f"{part}.image.repository=registry.example/rl/{part.rpartition('.')[2]}" for part in parts]
    words = text_of("minimal", "--set", "image.registry=", *(word for name in names for word in ("--set", name)))
    assert "registry.example/rl/runner:" in words


def test_notes_wait_for_one_deployment_at_a_time(tmp_path: Path) -> None:
    """kubectl takes one name, as TYPE/NAME. `helm template` leaves the notes out, so they are rendered as an object."""
    chart = tmp_path / "exec-service"
    shutil.copytree(CHART, chart)
    (chart / "templates" / "NOTES.txt").rename(chart / "notes")
    (chart / "templates" / "notes.yaml").write_text('kind: Notes\ntext: {{ tpl (.Files.Get "notes") . | quote }}\n')
    values = str(CHART / "ci" / "production-values.yaml")
    done = tool("helm", "template", "rel", str(chart), "--namespace", "exec", "--values", values)
    assert done.returncode == 0, done.stderr
    [notes] = [found["text"] for found in yaml.safe_load_all(done.stdout) if found and found["kind"] == "Notes"]
    waits = re.findall(r"^  (kubectl .* rollout status .*)$", notes, re.M)
    names = [f"deployment/rel-exec-service-worker-{pool}" for pool in ("default", "eval")]
    assert waits == [f"kubectl -n exec rollout status {name}" for name in names]


def test_settings_reach_the_processes_as_they_are_written() -> None:
    objects = render("minimal", "--set", "worker.config.compile_cache_bytes=2000000001,gateway.processes=4")
    gateway, worker = (one(objects, "ConfigMap", name)["data"] for name in ("-gateway", "-worker-default"))
    assert gateway["EXEC_MAX_BYTES"] == "1073741824"  # not 1.073741824e+09
    assert gateway["EXEC_RELEASE_FACTOR"] == "1.25"
    assert gateway["EXEC_PROCESSES"] == "4"
    assert worker["EXEC_COMPILE_CACHE_BYTES"] == "2000000001"
    assert worker["EXEC_MIN_TIER"] == "B"
    assert json.loads(worker["EXEC_PROFILES"])["numpy"] == ["numpy"]


def test_a_change_of_settings_restarts_the_pods() -> None:
    def checksum(*arguments: str) -> str:
        pod = one(render("minimal", *arguments), "Deployment", "-gateway")["spec"]["template"]
        return str(pod["metadata"]["annotations"]["checksum/config"])

    assert checksum() != checksum("--set", "gateway.config.max_calls=50000")


@pytest.mark.parametrize(("cpu", "slots"), [("4", "12"), ("7500m", "22"), ("500m", "1"), ("2.5", "7")])
def test_a_worker_has_three_slots_for_each_core_of_its_runner(cpu: str, slots: str) -> None:
    objects = render("minimal", "--set-string", f"worker.runner.resources.requests.cpu={cpu}")
    assert one(objects, "ConfigMap", "-worker-default")["data"]["EXEC_SLOTS"] == slots


def test_slots_can_be_said() -> None:
    assert one(render("minimal", "--set", "worker.config.slots=3"), "ConfigMap", "-worker-default")["data"]["EXEC_SLOTS"] == "3"


def test_pools_share_what_they_do_not_say_themselves() -> None:
    objects = render("production")
    default, evals = (pods(objects)[f"rel-exec-service-worker-{name}"] for name in ("default", "eval"))
    assert default["nodeSelector"] == evals["nodeSelector"] == {"dedicated": "untrusted"}
    assert container(default, "runner")["resources"]["requests"]["cpu"] == "16"
    assert [one(objects, "ConfigMap", f"-worker-{name}")["data"]["EXEC_SLOTS"] for name in ("default", "eval")] == ["48", "22"]


def test_what_is_scaled_has_no_number_of_its_own() -> None:
    """Otherwise every `helm upgrade` would set it back."""
    objects = render("production")
    assert "replicas" not in one(objects, "Deployment", "-gateway")["spec"]
    assert "replicas" not in one(objects, "Deployment", "-worker-default")["spec"]
    assert one(objects, "Deployment", "-worker-eval")["spec"]["replicas"] == 2


def test_workers_are_scaled_on_the_wait_in_the_gateways_and_never_on_a_stream() -> None:
    [metric] = one(render("production"), "HorizontalPodAutoscaler", "-worker-default")["spec"]["metrics"]
    assert (metric["type"], metric["external"]["metric"]["name"]) == ("External", "exec_queue_wait_seconds")
    [trigger] = one(render("keda"), "ScaledObject", "-worker-default")["spec"]["triggers"]
    assert trigger["type"] == "prometheus"
    assert (
        'exec_stage_seconds_bucket{stage="queue",namespace="exec",job="rel-exec-service-gateway"}'
        in trigger["metadata"]["query"]
    )
    for scenario in ("production", "keda"):
        words = text_of(scenario).lower()
        assert not [word for word in ("lagcount", "streamlength", "redis-streams", "pendingentries") if word in words]


def test_a_pool_is_never_scaled_to_nothing() -> None:
    assert one(render("keda"), "ScaledObject", "-worker-default")["spec"]["minReplicaCount"] >= 1


def test_replicas_are_spread_over_nodes_and_zones() -> None:
    for name, pod in pods(render("production")).items():
        if "gateway" in name or "worker" in name:
            keys = [rule["topologyKey"] for rule in pod["topologySpreadConstraints"]]
            assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]


def test_password_of_the_own_queue_comes_from_a_secret_only() -> None:
    objects = render("keda")
    server = container(pods(objects)["rel-exec-service-valkey"], "valkey")
    assert "$(VALKEY_PASSWORD)" in server["args"]
    for part in ("gateway", "worker-default"):
        variables = pods(objects)[f"rel-exec-service-{part}"]["containers"][0]["env"]
        assert variables[0]["valueFrom"]["secretKeyRef"] == {"name": "exec-valkey", "key": "password"}
        assert variables[1]["value"] == "redis://:$(VALKEY_PASSWORD)@rel-exec-service-valkey:6379/0"


def test_several_servers_of_the_chart_are_one_queue_and_the_first_serves_bulk_jobs() -> None:
    objects = render("minimal", "--set", "valkey.shards=3,jobs.enabled=true")
    names = ["rel-exec-service-valkey", "rel-exec-service-valkey-2", "rel-exec-service-valkey-3"]
    assert set(names) <= set(pods(objects))
    urls = [f"redis://{name}:6379/0" for name in names]
    for part in ("gateway", "worker"):
        [pod] = [pod for name, pod in pods(objects).items() if f"-{part}" in name]
        given = {one["name"]: one.get("value") for one in container(pod, part)["env"]}
        assert given["EXEC_REDIS"] == ",".join(urls)
        assert given.get("EXEC_JOBS_REDIS") == (urls[0] if part == "gateway" else None)
    policy = one(objects, "NetworkPolicy", "-valkey")["spec"]["podSelector"]["matchExpressions"]
    assert policy[0]["values"] == [name.removeprefix("rel-exec-service-") for name in names]


def test_files_of_rules_and_dashboards_are_taken_up(tmp_path: Path) -> None:
    chart = tmp_path / "exec-service"
    shutil.copytree(CHART, chart)
    for file in [*chart.glob("rules/*.yaml"), *chart.glob("dashboards/*.json")]:
        file.unlink()
    rule = {"alert": "Slow", "expr": "vector(1) > 0", "for": "1m", "annotations": {"summary": "{{ $value }} is too slow"}}
    (chart / "rules" / "a.yaml").write_text(yaml.safe_dump({"groups": [{"name": "a", "rules": [rule]}]}))
    (chart / "dashboards" / "overview.json").write_text('{"title": "{{ of grafana }}"}')
    values = str(CHART / "ci" / "production-values.yaml")
    done = tool("helm", "template", "rel", str(chart), "--namespace", "exec", "--values", values)
    assert done.returncode == 0, done.stderr
    objects = [found for found in yaml.safe_load_all(done.stdout) if found]
    rules = one(objects, "PrometheusRule", "")
    jsonschema.validate(rules, json.loads((SCHEMAS / "PrometheusRule.json").read_text()))
    assert rules["spec"]["groups"][0]["rules"] == [rule]
    assert json.loads(one(objects, "ConfigMap", "-dashboard-overview")["data"]["overview.json"]) == {
        "title": "{{ of grafana }}"
    }


def test_the_test_pod_runs_a_program_through_the_service() -> None:
    pod = pods(render("minimal"))["rel-exec-service-test"]
    arguments = pod["containers"][0]["args"]
    assert arguments[:4] == ["run", "--url", "http://rel-exec-service-gateway:8080", "-c"]


def test_every_value_is_documented() -> None:
    """A comment above each key that is not only a place for others."""
    lines = ["", *(CHART / "values.yaml").read_text().splitlines(), ""]
    naked = [
        line
        for above, line, below in zip(lines, lines[1:], lines[2:], strict=False)
        if re.match(r" *\w+:", line) and not above.strip().startswith("#") and not opens_a_block(line, below)
    ]
    known = {"requests", "limits", "scaleUp", "scaleDown", "stabilizationWindowSeconds", "policies", "default"}
    assert [line for line in naked if line.split(":")[0].strip() not in known] == []


def opens_a_block(line: str, below: str) -> bool:
    return line.rstrip().endswith(":") and len(below) - len(below.lstrip()) > len(line) - len(line.lstrip())


def test_the_schema_knows_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(value: Any, rule: dict[str, Any], path: str) -> None:
        if "$ref" in rule:
            rule = schema["definitions"][rule["$ref"].rsplit("/", 1)[1]]
        if rule.get("additionalProperties") is not False or not isinstance(value, dict):
            return
        known = set(rule["properties"])
        assert set(value) <= known, path
        if not path.endswith((".resources", ".podDisruptionBudget", "Profile")):
            assert known <= set(value), path
        for name, inner in value.items():
            compare(inner, rule["properties"][name], f"{path}.{name}")

    compare(values, schema["then"], "values")


def test_version_of_the_chart_is_that_of_the_service() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None and chart["appVersion"] == chart["version"] == version[1]
