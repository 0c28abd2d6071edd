"""A router plugin for verl 0.9: by free KV cache, sticky for all turns of a request.

router.yaml:
    router_class: grpo_roc.integrations.verl_router.KvRouter
    capacity: 720000            # tokens of KV cache of one server, or a table by server id
    max_response: 8192
"""

from typing import Any


class KvRouter:
    """verl's `RequestLoadBalancer`. It cannot make a request wait: if all are full, the one with the most room gets it."""

    def __init__(self, servers: dict[str, Any], config: dict[str, Any] | None = None) -> None:
        config = config or {}
        self._capacity = config.get("capacity", 720_000)
        self._max_response = int(config.get("max_response", 8192))
        self._servers: dict[str, Any] = {}
        self._reserved: dict[str, int] = {}
        self._inflight: dict[str, int] = {}
        self._sticky: dict[str, tuple[str, int]] = {}
        self.add_servers(servers)

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]

    def acquire_server(self, request_id: str, prompt_ids: list[int] | None = None, **extra: Any) -> tuple[str, Any]:
        if not self._servers:
            raise RuntimeError("no rollout servers")
        needed = len(prompt_ids or []) + self._max_response
        server, reserved = self._sticky.get(request_id, ("", 0))
        if server not in self._servers:
            server, reserved = max(self._servers, key=self._room), 0
        self._reserved[server] += needed - reserved  # a later turn's prompt contains the earlier turns
        self._inflight[server] += 1
        self._sticky[request_id] = (server, needed)
        return server, self._servers[server]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Called after every turn. The reservation stays until `clear_sticky_cache`, like the cached tokens."""
        if server_id in self._inflight:
            self._inflight[server_id] = max(0, self._inflight[server_id] - 1)

    def add_servers(self, servers: dict[str, Any]) -> None:
        for name, handle in servers.items():
            self._servers[name] = handle
            self._reserved.setdefault(name, 0)
            self._inflight.setdefault(name, 0)

    def remove_servers(self, server_ids: list[str]) -> None:
        for name in server_ids:
            for table in (self._servers, self._reserved, self._inflight):
                table.pop(name, None)
        self._sticky = {request: found for request, found in self._sticky.items() if found[0] in self._servers}

    def get_all_servers(self) -> list[str]:
        return list(self._servers)

    def get_status(self) -> dict[str, Any]:
        return {
            "servers": {name: {"inflight": self._inflight[name], "room": self._room(name)} for name in self._servers},
            "total_inflight": self.get_total_inflight(),
            "active_servers": len(self._servers),
        }

    def clear_sticky_cache(self) -> dict[str, Any]:
        cleared, self._sticky = len(self._sticky), {}
        self._reserved = dict.fromkeys(self._servers, 0)
        return {"cleared_entries": cleared, "server_loads": dict(self._inflight)}

    def get_total_inflight(self) -> int:
        return sum(self._inflight.values())

    def _room(self, name: str) -> int:
        capacity = self._capacity.get(name, 0) if isinstance(self._capacity, dict) else self._capacity
        return int(capacity) - self._reserved[name]
