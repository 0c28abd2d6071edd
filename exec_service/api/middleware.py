"""Authentication, Host and Origin checks, request ids, and one log line per request.

A web site in the user's browser can send requests to loopback ports. It must not be able to run code: Host must name this
machine (else DNS rebinding would make the service same-origin with the site), and a foreign Origin is refused. There are no
CORS headers. Required keys replace these checks: no web site knows them, and no browser adds them by itself. This is pure ASGI
middleware, since BaseHTTPMiddleware costs a task per request and breaks streaming.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Collection
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exec_service.api.errors import answer
from exec_service.api.listening import is_loopback
from exec_service.api.streaming import ClientGone
from exec_service.api.web_page import PAGE_ROUTES
from exec_service.dispatch.requests import Origin
from exec_service.jobs.store import TOKEN_PREFIX, JobStore
from exec_service.refusals import Refusal
from exec_service.telemetry.logs import log_request
from exec_service.telemetry.metrics import Metrics, route_of
from exec_service.tenants.accounts import Account
from exec_service.tenants.keys import Keys, secret_of

log = logging.getLogger("exec_service.requests")

OPEN_ROUTES = PAGE_ROUTES | {"/healthz", "/readyz", "/docs", "/openapi.json"}  # these reveal nothing worth a key
QUIET_ROUTES = frozenset({"/healthz", "/readyz", "/metrics", "/v1/stats"})  # polled; logged at info level only when they fail
OPERATOR_ROUTES = frozenset({"/metrics", "/v1/stats"})  # these can show figures of all tenants
TOKEN_ROUTES = frozenset({"/v1/batch", "/v1/judge", "/v1/verify"})  # the routes that jobs workers use
CLIENT_GONE = 499  # never sent; logged if the caller disconnected before the answer
_LOOKED_AT = frozenset(
    b"host origin sec-fetch-site sec-fetch-mode sec-fetch-dest x-request-id traceparent authorization".split()
)
_SLASHES = re.compile("/{2,}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class RequestFacts(Struct):
    """The facts of a request, filled in as it proceeds; `scope["exec"]` holds them."""

    origin: Origin
    status: int = 0
    calls: int = 0
    body_bytes: int = 0
    code: str = ""  # the problem code, if it was refused
    client_gone: bool = False
    operator: bool = False  # its key may see all tenants; set on `OPERATOR_ROUTES` only

    @property
    def sees_all(self) -> bool:
        """Whether it may see figures of all tenants: with an operator's key, or where no keys are required."""
        return self.origin.account is None or self.operator


class Guard:
    """`keyless`: paths that need no key where keys are required. `jobs`: the bulk jobs whose tickets are accepted."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        keys: Keys | None = None,
        keyless: Collection[re.Pattern[str]] = (),
        jobs: JobStore | None = None,
    ) -> None:
        self._app, self._metrics, self._keys, self._keyless, self._jobs = app, metrics, keys, keyless, jobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            if name in _LOOKED_AT:
                headers.setdefault(name.decode(), []).append(value.decode("latin-1"))
        facts = scope["exec"] = RequestFacts(
            origin_of(headers.get("x-request-id", [""])[0], headers.get("traceparent", [""])[0])
        )
        request_id = facts.origin.request_id.encode()

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            if self._keys is not None:
                await self._check_key(self._keys, scope, headers)
            else:
                if not is_own_host(*headers.get("host", ())):
                    raise Refusal("foreign_host", "on a loopback address the Host must be localhost, 127.0.0.1 or [::1]")
                if "origin" in headers or "sec-fetch-site" in headers:
                    check_origin(headers, scope["method"])
            if "//" in scope["path"]:  # some clients append a path to a URL that ends in a slash
                scope["path"] = _SLASHES.sub("/", scope["path"])
            await self._app(scope, receive, send_marked)
        except ClientGone:
            facts.client_gone = True
        except Refusal as refusal:
            await answer(refusal, scope, self._metrics)(scope, receive, send_marked)
        except Exception:
            # The details go to the log, not to the caller.
            log.exception("unhandled error", extra={"request_id": facts.origin.request_id})
            if facts.status:
                raise  # an answer has begun: the server breaks the connection, so that it is not taken as complete
            internal = Refusal("internal", "see the service's log for this request id")
            await answer(internal, scope, self._metrics)(scope, receive, send_marked)
        finally:
            status = CLIENT_GONE if facts.client_gone or not facts.status else facts.status
            route = route_of(scope["path"])
            self._metrics.requests.counts[route, str(status)] += 1
            usual = logging.DEBUG if scope["path"] in QUIET_ROUTES else logging.INFO
            level = logging.WARNING if facts.code or status >= 500 else usual
            if log.isEnabledFor(level):
                log_request(level, facts, time.monotonic() - began, method=scope["method"], route=route, status=status)

    async def _check_key(self, keys: Keys, scope: Scope, headers: dict[str, list[str]]) -> None:
        authorization = headers.get("authorization", [""])[0]
        path = _SLASHES.sub("/", scope["path"])  # some clients of adapters send //run, see `exec_service.compat`
        if not authorization and any(pattern.match(path) for pattern in self._keyless):
            check_origin(headers, scope["method"])
        elif scope["path"] not in OPEN_ROUTES:
            facts: RequestFacts = scope["exec"]
            account = await self._account(keys, authorization, scope["path"])
            facts.origin = msgspec.structs.replace(facts.origin, account=account)
            facts.operator = scope["path"] in OPERATOR_ROUTES and keys.is_operator(authorization)

    async def _account(self, keys: Keys, authorization: str, path: str) -> Account:
        """The account of a key or, on `TOKEN_ROUTES`, of the tenant whose bulk job the ticket belongs to."""
        if self._jobs is not None and path in TOKEN_ROUTES and TOKEN_PREFIX in authorization:
            tenant = await asyncio.to_thread(self._jobs.tenant_of, secret_of(authorization))  # may be a network file system
            if tenant is None:
                raise Refusal("unauthenticated", "no running bulk job has this ticket")
            return keys.account_of(tenant)
        return keys.account(authorization)


@lru_cache(256)
def is_own_host(*hosts: str) -> bool:
    """Whether there is one Host and it names this machine."""
    return len(hosts) == 1 and (split := split_host(hosts[0])) is not None and is_loopback(split[0])


def check_origin(headers: dict[str, list[str]], method: str) -> None:
    for site in headers.get("sec-fetch-site", []):
        # Following a link to the service's pages from anywhere reads nothing and changes nothing.
        if site == "cross-site" and not _is_page_visit(headers, method):
            raise Refusal("foreign_origin", "the request was made by another site's page")
    for origin in headers.get("origin", []):
        if not _is_own_origin(origin, headers.get("host", [""])[0]):
            raise Refusal("foreign_origin", "the Origin is another site's")


def _is_page_visit(headers: dict[str, list[str]], method: str) -> bool:
    return (
        method in ("GET", "HEAD")
        and headers.get("sec-fetch-mode") == ["navigate"]
        and headers.get("sec-fetch-dest") == ["document"]
    )


def _is_own_origin(origin: str, host: str) -> bool:
    """Whether the origin is a page of this service: any loopback name with the same port."""
    scheme, _, rest = origin.partition("://")
    theirs, ours = split_host(rest), split_host(host)
    return scheme == "http" and theirs is not None and ours is not None and is_loopback(theirs[0]) and theirs[1] == ours[1]


def split_host(text: str) -> tuple[str, int] | None:
    """Name and port of `name`, `name:port` or `[v6]:port`; None for anything else."""
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        return None
    if parts.netloc != text or parts.hostname is None or "@" in text:
        return None
    return parts.hostname, 80 if port is None else port


def origin_of(request_id: str, traceparent: str) -> Origin:
    """Of what the caller sent."""
    return Origin(
        request_id if _REQUEST_ID.fullmatch(request_id) else secrets.token_hex(8),
        traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
    )
