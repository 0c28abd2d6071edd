"""The HTTP endpoints of sessions: decode, forward, encode.

A disconnect does not stop a running cell, because it has effects; a retry with the same idempotency key gets its result.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple, TypeVar

from msgspec import Struct
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from exec_service.api.calls import Endpoint
from exec_service.api.encoding import encode
from exec_service.api.middleware import RequestFacts
from exec_service.api.streaming import cancel_on_disconnect
from exec_service.api.validation import CELL, FORK, TENANT, Validator, read, read_selection
from exec_service.config import GatewayConfig
from exec_service.dispatch.dispatch import Dispatch
from exec_service.dispatch.requests import Origin
from exec_service.sessions import SessionRouter, with_warnings
from exec_wire.messages.sessions import Tenant
from exec_wire.messages.unknown_fields import Reader as BodyReader

M = TypeVar("M", bound=Struct)


class Request(NamedTuple):
    """The parts of a request that a route needs."""

    id: str
    body: bytes
    query: bytes
    origin: Origin

    @property
    def tenant(self) -> Tenant:
        return Tenant(read_selection(self.query, any_tag=True).tenant)

    def read(self, reader: BodyReader[M]) -> M:
        """The body, which may be empty."""
        return read(reader, self.body or b"{}", self.origin.warnings)


Act = Callable[..., Awaitable[Struct]]  # of the router
Reader = Callable[[Validator, Request], Struct]

ROUTES: list[tuple[str, str, Act, Reader]] = [
    ("POST", "", SessionRouter.create, lambda check, asked: check.read_session(asked.body, asked.origin.warnings)),
    ("GET", "", SessionRouter.list, lambda _, asked: read_selection(asked.query, any_tag=True)),
    ("GET", "/{id}", SessionRouter.look, lambda _, asked: asked.tenant),
    ("DELETE", "/{id}", SessionRouter.end, lambda _, asked: asked.tenant),
    ("POST", "/{id}/run", SessionRouter.run, lambda _, asked: read(CELL, asked.body, asked.origin.warnings)),
    ("POST", "/{id}/fork", SessionRouter.fork, lambda _, asked: asked.read(FORK)),
    ("POST", "/{id}/rollback", SessionRouter.roll_back, lambda _, asked: asked.read(TENANT)),
    ("POST", "/{id}/interrupt", SessionRouter.interrupt, lambda _, asked: asked.read(TENANT)),
    ("PUT", "/{id}/files", SessionRouter.put, lambda check, asked: check.read_files(asked.body, asked.origin.warnings)),
    ("GET", "/{id}/files", SessionRouter.fetch, lambda check, asked: check.read_fetch(asked.query)),
]


class SessionEndpoint(Endpoint):
    """One route of sessions."""

    def __init__(self, config: GatewayConfig, dispatch: Dispatch, validator: Validator, act: Act, reader: Reader) -> None:
        super().__init__(config, dispatch, validator)
        self._act, self._reader = act, reader

    async def _answer(self, scope: Scope, facts: RequestFacts, receive: Receive, send: Send) -> None:
        body = await self._read(scope, facts, receive) if scope["method"] in ("POST", "PUT") else b""
        asked = Request(scope["path_params"].get("id", ""), body, scope["query_string"], facts.origin)
        with self._dispatch.reserve(1, len(body), facts.origin):
            facts.calls = 1
            answer = await cancel_on_disconnect(self._ask(asked), scope)
            await self._send_json(await encode(with_warnings(answer, asked.origin.warnings)), send)

    async def _ask(self, asked: Request) -> Struct:
        ids = (asked.id,) if asked.id else ()
        return await self._act(*ids, self._reader(self._validator, asked), asked.origin)


def session_routes(config: GatewayConfig, dispatch: Dispatch, validator: Validator, router: SessionRouter) -> list[Route]:
    made = []
    for verb, path, act, reader in ROUTES:
        endpoint = SessionEndpoint(config, dispatch, validator, partial(act, router), reader)
        made.append(Route(f"/v1/sessions{path}", endpoint, methods=[verb]))
    return made
