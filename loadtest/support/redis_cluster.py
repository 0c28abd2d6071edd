"""A real Redis Cluster or Valkey Cluster on loopback: primaries, each with a replica.

with RedisCluster() as cluster:
    print(cluster.url)
"""

import contextlib
import time
from collections.abc import Callable
from typing import Self

from exec_wire.queue.urls import SLOTS
from loadtest.support.processes import free_port
from loadtest.support.redis_server import RedisServer

FORM_S = 60.0
NODE_TIMEOUT_MS = 2000  # until a replica takes over


class RedisCluster:
    def __init__(self, primaries: int = 3, replicas: int = 1, node_timeout_ms: int = NODE_TIMEOUT_MS, **options: str) -> None:
        settings = {
            "cluster_enabled": "yes",
            "cluster_node_timeout": str(node_timeout_ms),
            "cluster_require_full_coverage": "no",
            "cluster_replica_validity_factor": "0",  # a replica takes over, however long it has not heard of its primary
            **options,
        }
        # A bus port of its own: by default it is in the range of outgoing connections, one of which may have it.
        self._bus = [str(free_port()) for _ in range(primaries * (1 + replicas))]
        self.servers = [RedisServer(0, None, cluster_port=bus, **settings) for bus in self._bus]
        self.primaries = self.servers[:primaries]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server)
            self._form()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return f"redis+cluster://{hosts}/?shards={len(self.primaries)}"

    def _form(self) -> None:
        count = len(self.primaries)
        for number, server in enumerate(self.primaries):
            first, last = (SLOTS * (number + part) // count for part in (0, 1))
            self._say(server, "CLUSTER", "ADDSLOTSRANGE", str(first), str(last - 1))
            self._say(server, "CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
        for server in self.servers[1:]:
            self._say(server, "CLUSTER", "MEET", "127.0.0.1", str(self.servers[0].port), self._bus[0])
        everybody = f"cluster_known_nodes:{len(self.servers)}"
        self._wait(lambda server: everybody in server.say("CLUSTER", "INFO"))
        for number, server in enumerate(self.servers[count:]):
            self._say(server, "CLUSTER", "REPLICATE", self.id_of(self.primaries[number % count]))
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        """Until every server knows a primary for every slot, and every replica has its primary's data."""
        replicas = len(self.servers) - len(self.primaries)
        self._wait(lambda server: all(word in server.say("CLUSTER", "INFO") for word in ("state:ok", f"slots_ok:{SLOTS}")))
        self._wait(lambda server: "slave" not in server.say("ROLE") or "connected" in server.say("INFO", "replication"))
        self._wait(lambda server: server.say("CLUSTER", "NODES").count("slave") == replicas)

    def id_of(self, server: RedisServer) -> str:
        return server.say("CLUSTER", "MYID")

    def _say(self, server: RedisServer, *words: str) -> None:
        if not (said := server.say(*words)).startswith("+OK"):
            raise RuntimeError(f"{' '.join(words)}: {said}")

    def _wait(self, true: Callable[[RedisServer], bool]) -> None:
        give_up = time.monotonic() + FORM_S
        while not all(true(server) for server in self.servers):
            if time.monotonic() > give_up:
                raise RuntimeError(f"the cluster was not formed:\n{self.servers[0].say('CLUSTER', 'NODES')}")
            time.sleep(0.1)
