"""The service on a Ray cluster: `start` puts Redis and a gateway on Ray's head node and a worker on every node.

    service = exec_service.ray.start()
    client = exec_client.AsyncClient(service.url, api_key=service.key)

New nodes get a worker within seconds; lost ones are forgotten, and others run their calls. The service ends with the driver.
With a name it lives on, and `start` with the same name returns it, from any driver or actor of the cluster.

Each actor here holds one child process (`exec-service head` or `node`) by the pipe of its standard input: the child stops when
the pipe ends, whatever became of the actor.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from exec_client import Client, Unavailable

NAMESPACE = "exec-service"
HEAD_RESOURCE = "node:__internal_head__"
LOOK_S, START_S, STOP_S = 1.0, 300.0, 60.0
DRAIN = {"EXEC_DRAIN_S": "5"}  # where the driver ends, nobody waits for calls
_unnamed: list[Any] = []  # handles: Ray ends an actor without a name when nobody has its handle


class Options(NamedTuple):
    cores: int | None
    min_tier: str
    environment: dict[str, str]


class Service(NamedTuple):
    """A service that runs: for `Client(service.url, api_key=service.key)`."""

    url: str
    key: str
    head: Any  # the actor

    @property
    def environment(self) -> dict[str, str]:
        """EXEC_URL and EXEC_API_KEY, which the trainer adapters read: for `runtime_env` or `os.environ`."""
        return {"EXEC_URL": self.url, "EXEC_API_KEY": self.key}

    def stop(self) -> None:
        """End the service on all nodes: accepted calls are finished first."""
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(self.head.stop.remote())
            ray.kill(self.head)
        if self.head in _unnamed:
            _unnamed.remove(self.head)


def start(
    *,
    name: str = "",
    cores: int | None = None,
    min_tier: str = "D",
    environment: Mapping[str, str] | None = None,
    wait_s: float = START_S,
) -> Service:
    """Start the service on the Ray cluster, and return when a worker takes calls.

    Args:
        name: Let the service live on without this driver; if one with this name runs, return it as it is.
        cores: Cores of each node that programs use. Ray reserves them, and nodes without as many get no worker. If not given,
            nothing is reserved and programs use all cores.
        min_tier: The weakest sandbox in which programs run.
        environment: Settings for gateway and workers, as EXEC_* variables.
        wait_s: How long to wait.

    Raises:
        RuntimeError: no worker can run here; the message says why.
        TimeoutError: no worker within `wait_s`.
    """
    if not ray.is_initialized():
        ray.init()
    options = Options(cores, min_tier, dict(environment or {}))
    known = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True} if name else {}
    head = _Head.options(  # type: ignore[attr-defined]
        num_cpus=0, max_concurrency=4, scheduling_strategy=_on(_head_node()), **known
    ).remote(options)
    if not name:
        _unnamed.append(head)
    give_up = time.monotonic() + wait_s
    while True:
        url, key, ready, failures = ray.get(head.state.remote())
        if ready:
            return Service(url, key, head)
        if failures or time.monotonic() > give_up:
            Service(url, key, head).stop()
            if failures:
                raise RuntimeError("exec-service has no worker: " + "; ".join(failures))
            raise TimeoutError(f"exec-service has no worker after {wait_s:.0f} s; the logs of Ray's workers say more")
        time.sleep(LOOK_S)


def _head_node() -> str:
    """Without it there is no cluster, so the service depends on no other node."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and HEAD_RESOURCE in node["Resources"]]
    return str(nodes[0]) if nodes else str(ray.get_runtime_context().get_node_id())


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


class _Child:
    """A process of the service; it stops when its standard input ends."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "exec_service", *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**DRAIN, **os.environ, **environment})

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()


@ray.remote
class _Node:
    """The worker of one node."""

    def __init__(self, redis: str, options: Options) -> None:
        arguments = [] if options.cores is None else ["--slots", str(3 * options.cores)]
        environment = {"EXEC_MIN_TIER": options.min_tier, **options.environment, "EXEC_REDIS": redis}
        self._child = _Child(["node", "--end-with-stdin", "--", *arguments], environment)

    def failure(self) -> str:
        """Why the worker cannot run on this node; empty if it runs."""
        code = self._child.process.poll()
        return "" if code is None else f"the worker of {socket.gethostname()} ended with code {code}, see `exec-service doctor`"

    def stop(self) -> None:
        self._child.stop()


@ray.remote
class _Head:
    """Redis and the gateway, and the workers of all nodes."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="exec-ray-")
        file = Path(self._folder.name) / "service.env"
        arguments = ["head", "--file", str(file), "--address", ray.util.get_node_ip_address(), "--end-with-stdin"]
        self._child = _Child(arguments, options.environment)
        while not file.exists():
            if (code := self._child.process.poll()) is not None:
                raise RuntimeError(f"the gateway cannot start here: exit code {code}, see the log of this actor")
            time.sleep(0.1)
        self._named = dict(line.split("=", 1) for line in file.read_text().splitlines())
        self._nodes: dict[str, Any] = {}
        self._failures: dict[str, str] = {}
        self._stop = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def state(self) -> tuple[str, str, bool, list[str]]:
        """URL, key, whether a worker takes calls, and the failures if no node has a worker that may still start."""
        url, key, ready = self._named["EXEC_URL"], self._named["EXEC_API_KEY"], False
        with Client(url, api_key=key) as client, contextlib.suppress(Unavailable):
            ready = client.info().workers > 0
        failures = dict(self._failures)
        return url, key, ready, [*failures.values()] if len(failures) == len(self._nodes) else []

    def stop(self) -> None:
        self._stop.set()
        self._watching.join()
        self._child.stop()  # first: the gateway finishes its calls
        self._folder.cleanup()
        stopping = [node.stop.remote() for node in self._nodes.values()]
        ray.wait(stopping, num_returns=len(stopping), timeout=STOP_S) if stopping else None
        for node in self._nodes.values():
            ray.kill(node)

    def _watch(self) -> None:
        while not self._stop.is_set():
            there = self._wanted()
            for id in self._nodes.keys() - there:
                self._forget(id)
            for id in there - self._nodes.keys():
                self._nodes[id] = _Node.options(  # type: ignore[attr-defined]
                    num_cpus=self._options.cores or 0, scheduling_strategy=_on(id)
                ).remote(self._named["EXEC_REDIS"], self._options)
            self._ask()
            self._stop.wait(LOOK_S)

    def _wanted(self) -> set[str]:
        """The nodes that live and have the cores."""
        cores = self._options.cores or 0
        return {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= cores}

    def _ask(self) -> None:
        """Learn which workers failed; forget those whose actor ended, so that their node gets a new one."""
        asked = {node.failure.remote(): id for id, node in self._nodes.items()}
        answered, _ = ray.wait([*asked], num_returns=len(asked), timeout=LOOK_S) if asked else ([], [])
        for answer in answered:
            try:
                failure = ray.get(answer)
            except ray.exceptions.RayError:
                self._forget(asked[answer])
            else:
                if failure:
                    self._failures[asked[answer]] = failure

    def _forget(self, id: str) -> None:
        self._nodes.pop(id)
        self._failures.pop(id, None)
