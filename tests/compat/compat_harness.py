"""A caller that speaks plain HTTP to one of the adapters."""

from dataclasses import dataclass
from typing import Any

import httpx

from exec_service.app import Gateway


@dataclass
class Visitor:
    http: httpx.AsyncClient
    gateway: Gateway

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The JSON of an answer that must be a 200."""
        answer = await self.http.post(str(self.http.base_url).rstrip("/") + path, json=body)  # httpx drops a second slash
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def adapter_calls(self, door: str, status: str, blame: str) -> float:
        labels = {"adapter": door, "status": status, "blame": blame}
        return self.gateway.metrics.registry.get_sample_value("exec_adapter_calls_total", labels) or 0.0
