"""Maps refusals to HTTP answers."""

import math
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from exec_service.refusals import Refusal
from exec_service.telemetry.metrics import Metrics
from exec_wire.problems import CONTENT_TYPE, problem


def answer(
    refusal: Refusal,
    scope: Scope,
    metrics: Metrics,
    headers: dict[str, str] | None = None,
    *,
    status: int | None = None,
    message_field: str = "",
) -> Response:
    """`status` and `message_field` (the member that holds the message) are for clients of other services."""
    facts = scope["exec"]
    facts.code = refusal.code
    metrics.rejected(refusal.code)
    body = problem(
        refusal.code,
        refusal.detail,
        field=refusal.field,
        request_id=facts.origin.request_id,
        retry_after_s=refusal.retry_after_s,
    )
    if status is not None:
        body = msgspec.structs.replace(body, status=status)
    headers = dict(headers or {})
    if body.status == 401:
        headers["www-authenticate"] = "Bearer"  # RFC 9110 requires it
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(refusal.retry_after_s)))  # whole seconds, RFC 9110
    content = msgspec.to_builtins(body) | ({message_field: body.detail or body.title} if message_field else {})
    return Response(msgspec.json.encode(content), status_code=body.status, headers=headers, media_type=CONTENT_TYPE)


def refusal_of(error: Exception) -> Refusal:
    """The refusal for an exception of a framework."""
    match error:
        case Refusal():
            return error
        case HTTPException(status_code=404):
            return Refusal("not_found")
        case HTTPException(status_code=405):
            return Refusal("method_not_allowed")
        case RequestValidationError():
            first = error.errors()[0]
            where, *names = (str(part) for part in first["loc"])
            code = "bad_query" if where == "query" else "bad_field"
            return Refusal(code, str(first["msg"]), field=".".join(names))
        case _:
            raise error  # `Guard` logs it and answers `internal`


def error_answerer(metrics: Metrics) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def on_error(request: Request, error: Exception) -> Response:
        headers = error.headers if isinstance(error, HTTPException) else None
        return answer(refusal_of(error), request.scope, metrics, dict(headers or {}))

    return on_error
