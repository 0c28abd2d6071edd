"""The images built and started for real, and programs run through them: `make test-deploy`.

What is not in here: a scheduler, controllers of HPA and KEDA, NetworkPolicies, AppArmor, kubelet.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import container_harness as harness
import httpx
import pytest
from common import PATIENCE_S, answers, wait_until
from container_harness import ROOT, STATE, Containers, podman

pytestmark = pytest.mark.skipif(os.environ.get("EXEC_TEST_DEPLOY") != "1", reason="builds images: run `make test-deploy`")

QUICK = {"EXEC_SLOTS": "2", "EXEC_PROFILES": '{"bare": [], "numpy": ["numpy"]}'}
PROGRAMS = {
    "python": "import numpy; print(int(numpy.arange(4).sum()) * 7)",
    "cpp": "#include <iostream>\nint main() { std::cout << 6 * 7 << std::endl; }",
    "bash": "echo $((6 * 7))",
    "javascript": "console.log(6 * 7)",
}


@pytest.fixture(scope="module")
def images() -> None:
    done = subprocess.run(["sh", "deploy/tools.sh", "containers"], cwd=ROOT, timeout=900)
    assert done.returncode == 0
    harness.build_all()
    harness.install_seccomp_profile()


@pytest.fixture(scope="module")
def key(images: None) -> str:
    """Of the file STATE/keys.json, which has its hash."""
    file = STATE / "keys.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "exec_service", "keys", "add", "--file", str(file), "--tenant", "test"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    file.chmod(0o644)
    return made.stdout.strip()


class Door:
    """The gateway as a caller sees it."""

    def __init__(self, address: str, key: str) -> None:
        self.url = f"http://{address}:8080"
        self._client = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE_S)

    def run(self, code: str, **call: Any) -> dict[str, Any]:
        answer = self._client.post("/v1/run", json={"code": code, "deadline_s": 90, **call})
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = self._client.get("/v1/info").json()
        return info


@pytest.fixture
def containers(key: str) -> Iterator[Containers]:
    with Containers("exectest", STATE / "keys.json") as containers:
        yield containers


def start_queue(containers: Containers) -> str:
    containers.from_compose("valkey", {})
    return f"redis://{containers.address(containers.name('valkey'))}:6379/0"


def start_gateway(containers: Containers, redis: str, key: str) -> Door:
    containers.from_compose("gateway", {"EXEC_REDIS": redis})
    door = Door(containers.address(containers.name("gateway")), key)
    wait_until(lambda: answers(f"{door.url}/healthz"), "the gateway listens", every_s=0.3)
    return door


def test_services_of_the_compose_file_run_programs_of_every_language(containers: Containers, key: str) -> None:
    redis = start_queue(containers)
    door = start_gateway(containers, redis, key)
    containers.from_compose("worker", {"EXEC_REDIS": redis, **QUICK})  # before its runner: it waits
    containers.from_compose("runner", {})
    wait_until(lambda: door.info()["workers"] == 1, "a worker is there", every_s=0.3)

    info = door.info()
    assert info["tier"] in ("A", "B")
    assert set(info["languages"]) == set(PROGRAMS)
    for language, code in PROGRAMS.items():
        result = door.run(code, language=language)
        assert (result["status"], result["stdout"]) == ("ok", "42\n"), result
    assert httpx.post(f"{door.url}/v1/run", json={"code": "1"}).status_code == 401
    for name in ("gateway", "worker", "runner"):
        podman("healthcheck", "run", containers.name(name))


def test_worker_that_is_stopped_finishes_its_call_and_its_runner_leaves_after_it(containers: Containers, key: str) -> None:
    redis = start_queue(containers)
    door = start_gateway(containers, redis, key)
    containers.from_compose("runner", {})
    containers.from_compose("worker", {"EXEC_REDIS": redis, **QUICK})
    wait_until(lambda: door.info()["workers"] == 1, "a worker is there", every_s=0.3)

    results: list[dict[str, Any]] = []
    call = threading.Thread(target=lambda: results.append(door.run("import time; time.sleep(4); print('whole')")))
    call.start()
    wait_until(lambda: door.info()["worker_list"][0]["busy"] == 1, "the call runs", every_s=0.3)
    podman("kill", "--signal", "TERM", containers.name("worker"), containers.name("runner"))  # at once, as kubelet does
    call.join(PATIENCE_S)
    assert [(result["status"], result["stdout"]) for result in results] == [("ok", "whole\n")]
    for name in ("worker", "runner"):
        assert podman("wait", containers.name(name)).strip() == "0"


def test_runner_in_a_user_namespace_with_the_charts_capabilities_and_profile_reaches_tier_b(
    containers: Containers, key: str
) -> None:
    """What hostUsers: false makes of the pod; and the runner checks that it is so."""
    redis = start_queue(containers)
    door = start_gateway(containers, redis, key)
    maps = ["--uidmap", "0:2147483647:65536", "--gidmap", "0:2147483647:65536"]
    containers.from_compose("worker", {"EXEC_REDIS": redis, **QUICK}, *maps)
    service = harness.compose_service("runner")
    service |= {"volumes": service["volumes"][:1], "tmpfs": [*service["tmpfs"], "/run/exec-service"]}  # as in the pod
    options = harness.compose_options(service, containers.prefix, STATE / "keys.json", {})
    containers.run("runner", "runner", [*options, *maps], "--user-namespace")
    wait_until(lambda: door.info()["workers"] == 1, "a worker is there", every_s=0.3)

    assert door.info()["tier"] in ("A", "B")
    for language, code in PROGRAMS.items():
        assert door.run(code, language=language)["stdout"] == "42\n"
    runner = podman("inspect", "--format", "{{.State.Pid}}", containers.name("runner")).strip()
    assert Path(f"/proc/{runner}/uid_map").read_text().split() == ["0", "2147483647", "65536"]


def test_runner_that_is_root_of_the_machine_refuses_the_charts_user_namespace_profile(containers: Containers) -> None:
    service = harness.compose_service("runner")
    options = harness.compose_options(service, containers.prefix, STATE / "keys.json", {})
    containers.run("runner", "runner", options, "--user-namespace")
    assert podman("wait", containers.name("runner")).strip() == "69"
    assert "hostUsers: false" in containers.logs(containers.name("runner"))


def test_chart_played_as_pods_runs_a_program(containers: Containers, key: str) -> None:
    """`helm template … | podman kube play`: Deployments and ConfigMaps; a user namespace for the worker's pod by hostUsers.

    One replica of each: this podman gives two pods the same emptyDir.
    """
    redis = start_queue(containers)
    values = ["image.registry=localhost", "image.tag=test", "image.pullPolicy=Never", f"redis.url={redis}"]
    values += ["fullnameOverride=exectest", "keys.existingSecret=exectest-keys", "gateway.replicas=1", "worker.replicas=1"]
    values += ["worker.runner.resources.requests.cpu=2", "worker.runner.resources.limits.memory=3Gi"]
    values += ["worker.config.profiles.sympy=null", "worker.config.profiles.math=null", "worker.config.profiles.data=null"]
    values += ["worker.config.profiles.verify=null"]
    objects = harness.chart_objects({"Deployment", "ConfigMap"}, *values)
    for found in objects:
        harness.adapt_to_podman(found)
    with harness.pod_secret("exectest-keys", STATE / "keys.json"):
        harness.play(objects)
        door = Door(containers.address("exectest-gateway-pod-0-gateway"), key)
        wait_until(lambda: answers(f"{door.url}/healthz"), "the gateway listens", every_s=0.3)
        wait_until(lambda: door.info()["workers"] == 1, "a worker is there", every_s=0.3)
        info = door.info()
        assert (info["tier"] in ("A", "B"), info["slots"]) == (True, 6)  # three for each core that the runner requests
        assert door.run("print(6 * 7)")["stdout"] == "42\n"
        worker = harness.status_of("exectest-worker-default-pod-0-worker")
        assert (worker["Uid"], worker["CapEff"], worker["NoNewPrivs"]) == ("2147493648", "0000000000000000", "1")
