"""The settings of the service and those of the chart are the same, both ways."""

import json
from pathlib import Path

import msgspec
import pytest
import yaml
from chart_harness import CHART, ROOT, all_of, one, render, render_settings

REMEDY = "run: python deploy/render_settings.py"

each_part = pytest.mark.parametrize("part", ["gateway", "worker", "jobs"])
NAMES = {"gateway": "-gateway", "worker": "-worker-default", "jobs": "-jobs"}


@each_part
def test_every_setting_is_a_value_or_set_by_the_chart_and_every_value_a_setting(part: str) -> None:
    fields = {field.name for field in msgspec.structs.fields(render_settings.CONFIGS[part])}
    values = set(yaml.safe_load((CHART / "values.yaml").read_text())[part]["config"])
    assert values == fields - render_settings.SET_BY_THE_CHART[part] - render_settings.LEFT_OUT[part], REMEDY
    assert fields >= render_settings.SET_BY_THE_CHART[part] | render_settings.LEFT_OUT[part], (
        "render_settings.py names settings that are gone"
    )


@pytest.mark.parametrize(("name", "renew"), [("values.yaml", "new_values"), ("values.schema.json", "new_schema")])
def test_help_defaults_and_bounds_are_those_of_the_classes(name: str, renew: str) -> None:
    text = (CHART / name).read_text()
    assert getattr(render_settings, renew)(text) == text, REMEDY


@each_part
def test_what_the_chart_sets_is_set(part: str) -> None:
    objects = render("minimal", "--set", "jobs.enabled=true,jobs.redis.url=redis://of.jobs")
    name = NAMES[part]
    container = one(objects, "Deployment", name)["spec"]["template"]["spec"]["containers"][0]
    given = set(one(objects, "ConfigMap", name)["data"]) | {variable["name"] for variable in container["env"]}
    assert {f"EXEC_{setting.upper()}" for setting in render_settings.SET_BY_THE_CHART[part]} <= given


@each_part
def test_the_service_accepts_what_the_chart_gives_it(part: str) -> None:
    from exec_service.config import read_environment

    for scenario in ("production",) if part == "jobs" else ("minimal", "production", "unprivileged", "gvisor", "keda"):
        given = one(render(scenario), "ConfigMap", NAMES[part])["data"]
        config = read_environment(render_settings.CONFIGS[part], given | {"EXEC_REDIS": "redis://of.a.secret"})
        for variable, text in given.items():
            value = getattr(config, variable.removeprefix("EXEC_").lower())
            assert value == (text if isinstance(value, str) else json.loads(text)), variable


def test_defaults_of_the_chart_are_those_of_the_service() -> None:
    from exec_service.config import GatewayConfig, read_environment

    given = one(render("minimal"), "ConfigMap", "-gateway")["data"]
    own = {f"EXEC_{name.upper()}" for name in render_settings.SET_BY_THE_CHART["gateway"]}
    config = read_environment(GatewayConfig, {name: value for name, value in given.items() if name not in own})
    assert config == GatewayConfig()


def test_gateways_and_jobs_workers_have_the_same_folder_and_volume() -> None:
    objects = render("production")
    assert len({one(objects, "ConfigMap", name)["data"]["EXEC_JOBS_DIR"] for name in ("-gateway", "-jobs")}) == 1
    specs = [one(objects, "Deployment", name)["spec"]["template"]["spec"] for name in ("-gateway", "-jobs")]
    volumes = [next(volume for volume in spec["volumes"] if volume["name"] == "jobs") for spec in specs]
    mounts = [mount for spec in specs for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "jobs"]
    assert volumes[0] == volumes[1] and mounts == [{"name": "jobs", "mountPath": "/var/lib/exec-service"}] * 2
    claim = one(objects, "PersistentVolumeClaim", "-jobs")
    assert volumes[0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"], "storageClassName": "nfs", "resources": {"requests": {"storage": "200Gi"}},
    }  # fmt: skip
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_claim_of_ones_own_is_used_and_none_is_made() -> None:
    objects = render("minimal", "--set", "jobs.enabled=true,jobs.folder.existingClaim=mine")
    volumes = one(objects, "Deployment", "-jobs")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "jobs", "persistentVolumeClaim": {"claimName": "mine"}} in volumes
    assert not all_of(objects, "PersistentVolumeClaim")


def test_without_bulk_jobs_there_is_nothing_of_them() -> None:
    objects = render("minimal")
    assert not [found for found in objects if found["metadata"]["name"].endswith("-jobs")]
    assert one(objects, "ConfigMap", "-gateway")["data"]["EXEC_JOBS_DIR"] == ""
    volumes = one(objects, "Deployment", "-gateway")["spec"]["template"]["spec"]["volumes"]
    assert {volume["name"] for volume in volumes} == {"keys", "tmp"}


def test_no_folder_of_this_machine_is_in_the_chart() -> None:
    for file in (path for path in CHART.rglob("*") if path.is_file()):
        assert str(Path(ROOT)) not in file.read_text(), file
