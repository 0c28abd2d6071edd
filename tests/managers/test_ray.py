"""`exec_service.ray.start` on a real Ray cluster with three nodes on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from calls_harness import CALLS, run_while
from common import wait_until
from service_harness import tree_of

from exec_client import Client
from loadtest.support.processes import ROOT

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-cluster-managers installs it")
from ray.cluster_utils import Cluster  # noqa: E402

import exec_service.ray  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.alone]
for name, value in {"USAGE_STATS_ENABLED": 0, "health_check_timeout_ms": 60_000, "agent_register_timeout_ms": 120_000}.items():
    os.environ.setdefault(f"RAY_{name}", str(value))  # a busy machine is no lost node
SETTINGS = {"EXEC_PROFILES": '{"bare": []}', "EXEC_SLOTS": "2"}
NODE = {"num_cpus": 2}
DRIVER = """
import sys
import ray
import exec_service.ray
ray.init(address={address!r}, logging_level="error", log_to_driver=False)
service = exec_service.ray.start(name={name!r}, environment={settings!r})
print(service.url, service.key)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    for _ in range(2):
        cluster.add_node(**NODE)
    ray.init(address=cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def lose(cluster: Any, node: Any) -> None:
    """Kill every process of the node at once."""
    raylet = node.all_processes["raylet"][0].process.pid
    for pid in tree_of(raylet):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


def processes() -> list[str]:
    """Of any service on this machine that Ray started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(entry.read_text().replace("\0", " "))
    return [command for command in found if "exec_service" in command and "end-with-stdin" in command]


def drive(cluster: Any, name: str) -> list[str]:
    """The URL and the key that a driver of its own starts, when this driver has ended."""
    words = DRIVER.format(address=cluster.address, name=name, settings=SETTINGS)
    ended = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_ten_thousand_calls_survive_the_loss_of_a_node_and_a_new_node_gets_a_worker(cluster: Any) -> None:
    extra = cluster.add_node(**NODE)
    service = exec_service.ray.start(environment=SETTINGS)
    with Client(service.url, api_key=service.key) as client:
        wait_until(lambda: client.info().workers == 4, "four workers", 300)
        assert run_while(client, CALLS, lambda: lose(cluster, extra)) == []
        assert client.info().workers == 3
        replacement = cluster.add_node(**NODE)
        wait_until(lambda: client.info().workers == 4, "a worker on the new node", 300)
    service.stop()
    cluster.remove_node(replacement)
    wait_until(lambda: not processes(), lambda: "\n".join(processes()))


def test_a_service_without_a_name_ends_with_its_driver(cluster: Any) -> None:
    url, _ = drive(cluster, "")
    wait_until(lambda: not processes(), lambda: "\n".join(processes()))
    with pytest.raises(httpx.TransportError):
        httpx.get(url)


def test_a_service_with_a_name_outlives_its_driver_and_is_found_again(cluster: Any) -> None:
    url, key = drive(cluster, "sandbox")
    service = exec_service.ray.start(name="sandbox")
    assert (service.url, service.key) == (url, key)
    with Client(url, api_key=key) as client:
        assert client.run("print(6 * 7)", deadline_s=200).stdout == "42\n"
    assert ray.get(run_on_another_node.remote()) == "42"
    service.stop()
    wait_until(lambda: not processes(), lambda: "\n".join(processes()))


@ray.remote
def run_on_another_node() -> str:
    """As the page for trainers says."""
    os.environ |= exec_service.ray.start(name="sandbox").environment
    from grpo_roc.integrations import service

    return str(service.run_blocking("print(6 * 7)").text)


def test_programs_get_the_cores_that_ray_reserves_and_nodes_without_them_get_no_worker(cluster: Any) -> None:
    big = cluster.add_node(**NODE | {"num_cpus": 3})
    service = exec_service.ray.start(cores=3, environment={"EXEC_PROFILES": '{"bare": []}'})
    with Client(service.url, api_key=service.key) as client:
        info = client.info()
    assert (info.workers, info.slots) == (1, 9)
    service.stop()
    cluster.remove_node(big)


def test_a_start_says_why_no_worker_can_run(cluster: Any) -> None:
    masked = {**SETTINGS, "EXEC_MASK_LAYERS": '["pidns"]'}
    with pytest.raises(RuntimeError, match="ended with code 69"):
        exec_service.ray.start(min_tier="A", environment=masked)
    wait_until(lambda: not processes(), lambda: "\n".join(processes()))
