"""The HTTP endpoints of sessions: decode, forward, encode.

A disconnect does not stop a running cell, because it has effects; a retry with the same idempotency key gets its result.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from msgspec import Struct
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from exec_service.api.calls import Endpoint, check_content_type
from exec_service.api.encoding import encode
from exec_service.api.middleware import RequestFacts
from exec_service.api.streaming import ClientGone, cancel_on_disconnect
from exec_service.api.validation import CELL, FORK, TENANT, Validator, read, read_selection
from exec_service.config import GatewayConfig
from exec_service.dispatch.dispatch import Dispatch
from exec_service.dispatch.requests import Origin
from exec_service.sessions import SessionRouter, with_warnings
from exec_wire.messages.sessions import Tenant


class Request(NamedTuple):
    """The parts of a request that a route needs."""

    id: str
    body: bytes
    query: bytes
    origin: Origin

    @property
    def tenant(self) -> Tenant:
        return Tenant(read_selection(self.query, any_tag=True).tenant)


Answerer = Callable[[SessionRouter, Validator, Request], Awaitable[Struct]]

ANSWERERS: dict[tuple[str, str], Answerer] = {
    ("POST", "/v1/sessions"): lambda router, check, asked: router.create(
        check.read_session(asked.body, asked.origin.warnings), asked.origin
    ),
    ("GET", "/v1/sessions"): lambda router, _, asked: router.list(read_selection(asked.query, any_tag=True), asked.origin),
    ("GET", "/v1/sessions/{id}"): lambda router, _, asked: router.look(asked.id, asked.tenant, asked.origin),
    ("DELETE", "/v1/sessions/{id}"): lambda router, _, asked: router.end(asked.id, asked.tenant, asked.origin),
    ("POST", "/v1/sessions/{id}/run"): lambda router, _, asked: router.run(
        asked.id, read(CELL, asked.body, asked.origin.warnings), asked.origin
    ),
    ("POST", "/v1/sessions/{id}/fork"): lambda router, _, asked: router.fork(
        asked.id, read(FORK, asked.body or b"{}", asked.origin.warnings), asked.origin
    ),
    ("POST", "/v1/sessions/{id}/rollback"): lambda router, _, asked: router.roll_back(
        asked.id, read(TENANT, asked.body or b"{}", asked.origin.warnings), asked.origin
    ),
    ("POST", "/v1/sessions/{id}/interrupt"): lambda router, _, asked: router.interrupt(
        asked.id, read(TENANT, asked.body or b"{}", asked.origin.warnings), asked.origin
    ),
    ("PUT", "/v1/sessions/{id}/files"): lambda router, check, asked: router.put(
        asked.id, check.read_files(asked.body, asked.origin.warnings), asked.origin
    ),
    ("GET", "/v1/sessions/{id}/files"): lambda router, check, asked: router.fetch(
        asked.id, check.read_fetch(asked.query), asked.origin
    ),
}


class SessionEndpoint(Endpoint):
    """One route of sessions."""

    def __init__(
        self, config: GatewayConfig, dispatch: Dispatch, validator: Validator, router: SessionRouter, answerer: Answerer
    ) -> None:
        super().__init__(config, dispatch, validator)
        self._router, self._answerer = router, answerer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        facts: RequestFacts = scope["exec"]
        try:
            body = b""
            if scope["method"] in ("POST", "PUT"):
                check_content_type(scope)
                body = await self._read(scope, facts, receive)
            asked = Request(scope["path_params"].get("id", ""), body, scope["query_string"], facts.origin)
            with self._dispatch.reserve(1, len(body), facts.origin):
                facts.calls = 1
                answer = await cancel_on_disconnect(self._ask(asked), scope)
                await self._send_json(await encode(with_warnings(answer, asked.origin.warnings)), send)
        except ClientGone:
            facts.client_gone = True

    async def _ask(self, asked: Request) -> Struct:
        return await self._answerer(self._router, self._validator, asked)


def session_routes(config: GatewayConfig, dispatch: Dispatch, validator: Validator, router: SessionRouter) -> list[Route]:
    return [
        Route(path, SessionEndpoint(config, dispatch, validator, router, answerer), methods=[verb])
        for (verb, path), answerer in ANSWERERS.items()
    ]
