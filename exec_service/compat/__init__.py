"""Adapters for clients of other services: each file translates one service's requests into calls, and results into its answers.

Adapters share admission, queue, sandbox and metrics with the service's own endpoints. They only translate: a rule that one of
them has is a rule of the foreign service, and its file says so. `EXEC_ADAPTERS` lists the enabled ones.
"""

import re
from collections.abc import Callable

from starlette.routing import Route

from exec_service.compat import code_judge, mcp, nemo_skills, piston, sandbox_fusion
from exec_service.compat.adapter import GatewayParts
from exec_service.config import AdapterName, GatewayConfig

ROUTES_OF: dict[AdapterName, Callable[[GatewayParts], list[Route]]] = {
    "code-judge": code_judge.routes,
    "sandbox-fusion": sandbox_fusion.routes,
    "nemo-skills": nemo_skills.routes,
    "piston": piston.routes,
    "mcp": mcp.routes,
}


def adapter_routes(parts: GatewayParts) -> dict[AdapterName, list[Route]]:
    return {name: ROUTES_OF[name](parts) for name in parts.config.adapters}


def keyless_paths(config: GatewayConfig, routes: dict[AdapterName, list[Route]]) -> list[re.Pattern[str]]:
    """The paths of adapters that accept clients without a key where keys are required."""
    return [route.path_regex for name in routes if name in config.keyless_adapters for route in routes[name]]
