"""A router plugin for verl 0.9: by free KV cache, sticky for all turns of a request.

router.yaml:
    router_class: grpo_roc.integrations.verl_router.KvRouter
    capacity: 720000            # tokens of KV cache of one server, or a table by server id
    max_response: 8192
"""

from collections import OrderedDict
from typing import Any

STICKY = 100_000  # requests whose server is remembered, as long as their turns last


class KvRouter:
    """verl's `RequestLoadBalancer`. It cannot make a request wait: if all are full, the one with the most room gets it.

    A turn holds its prompt and the longest response until `release_server`. verl does not tell when a rollout ends, so nothing
    is held between turns; the cached tokens of a waiting rollout can be evicted.
    """

    def __init__(self, servers: dict[str, Any], config: dict[str, Any] | None = None) -> None:
        config = config or {}
        self._capacity = config.get("capacity", 720_000)
        self._max_response = int(config.get("max_response", 8192))
        self._servers: dict[str, Any] = {}
        self._held: dict[str, dict[str, list[int]]] = {}  # server -> request -> tokens of its turns in flight
        self._used: dict[str, int] = {}  # their sums by server
        self._inflight: dict[str, int] = {}
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self.add_servers(servers)

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]

    def acquire_server(self, request_id: str, prompt_ids: list[int] | None = None, **extra: Any) -> tuple[str, Any]:
        if not self._servers:
            raise RuntimeError("no rollout servers")
        server = self._sticky.pop(request_id, "")
        if server not in self._servers:
            server = max(self._servers, key=self._room)
        self._sticky[request_id] = server
        if len(self._sticky) > STICKY:
            self._sticky.popitem(last=False)
        needed = len(prompt_ids or []) + self._max_response
        self._held[server].setdefault(request_id, []).append(needed)
        self._used[server] += needed
        self._inflight[server] += 1
        return server, self._servers[server]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Called after every turn."""
        turns = self._held.get(server_id, {}).get(request_id or "")
        if not turns:
            return
        self._used[server_id] -= turns.pop()
        self._inflight[server_id] -= 1
        if not turns:
            del self._held[server_id][request_id or ""]

    def add_servers(self, servers: dict[str, Any]) -> None:
        for name, handle in servers.items():
            self._servers[name] = handle
            self._held.setdefault(name, {})
            self._used.setdefault(name, 0)
            self._inflight.setdefault(name, 0)

    def remove_servers(self, server_ids: list[str]) -> None:
        for name in server_ids:
            for table in (self._servers, self._held, self._used, self._inflight):
                table.pop(name, None)

    def get_all_servers(self) -> list[str]:
        return list(self._servers)

    def get_status(self) -> dict[str, Any]:
        return {
            "servers": {name: {"inflight": self._inflight[name], "room": self._room(name)} for name in self._servers},
            "total_inflight": self.get_total_inflight(),
            "active_servers": len(self._servers),
        }

    def clear_sticky_cache(self) -> dict[str, Any]:
        cleared = len(self._sticky)
        self._sticky.clear()
        return {"cleared_entries": cleared, "server_loads": dict(self._inflight)}

    def get_total_inflight(self) -> int:
        return sum(self._inflight.values())

    def _room(self, name: str) -> int:
        capacity = self._capacity.get(name, 0) if isinstance(self._capacity, dict) else self._capacity
        return int(capacity) - self._used[name]
