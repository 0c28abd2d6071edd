"""Doors for clients of other services: each file translates one service's requests into calls, and results into its answers.

Behind every door is what is behind our own routes: the same admission, queue, sandbox and metrics. What a door must not do is
decide: a rule that only one of them has is a rule of the service that it stands for, and says so. `EXEC_DOORS` shuts them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from exec_service.compat import code_judge, mcp, nemo_skills, piston, sandbox_fusion
from exec_service.compat.adapter import House
from exec_service.config import DoorName, GatewayConfig

_SLASHES = re.compile("/{2,}")
ROUTES_OF: dict[DoorName, Callable[[House], list[Route]]] = {
    "code-judge": code_judge.routes,
    "sandbox-fusion": sandbox_fusion.routes,
    "nemo-skills": nemo_skills.routes,
    "piston": piston.routes,
    "mcp": mcp.routes,
}


def door_routes(house: House) -> dict[DoorName, list[Route]]:
    return {name: ROUTES_OF[name](house) for name in house.config.doors}


def keyless_paths(config: GatewayConfig, routes: dict[DoorName, list[Route]]) -> list[re.Pattern[str]]:
    """Of the doors that stay open to clients without a key, where keys are asked for."""
    return [route.path_regex for name in routes if name in config.open_doors for route in routes[name]]


class OneSlash:
    """`//run` means `/run`: some clients join a path to an address that ends in a slash."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and "//" in scope["path"]:
            scope["path"] = _SLASHES.sub("/", scope["path"])  # in place: the guard, which is outside, logs it so
        await self._app(scope, receive, send)
