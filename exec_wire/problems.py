"""Errors as they travel over HTTP: RFC 9457 problem+json with a stable `code` and the path of the bad field."""

from msgspec import Struct

CONTENT_TYPE = "application/problem+json"

# code -> (HTTP status, title). A code never changes its meaning; clients switch on it.
PROBLEMS: dict[str, tuple[int, str]] = {
    "bad_json": (400, "The body is not valid JSON"),
    "bad_http": (400, "The connection does not carry HTTP"),
    "bad_message": (400, "The bytes are not a message of exec.proto"),
    "bad_field": (422, "A field is missing or has a wrong value"),
    "bad_query": (422, "A query parameter is missing or has a wrong value"),
    "idempotency_conflict": (422, "The idempotency key was used with another payload"),
    "unknown_language": (422, "This language is not installed"),
    "tier_unavailable": (422, "No worker offers the required isolation tier"),
    "unauthenticated": (401, "A valid key is needed"),
    "foreign_tenant": (403, "The key belongs to another tenant"),
    "beyond_limits": (403, "The key does not allow limits this high"),
    "operators_only": (403, "Only a key of an operator may see this"),
    "foreign_origin": (403, "The request comes from a foreign web site"),
    "foreign_host": (403, "The Host header does not name this machine"),
    "not_found": (404, "No such route"),
    "no_such_session": (404, "No such session"),
    "no_such_job": (404, "There is no such job"),
    "method_not_allowed": (405, "The route does not have this method"),
    "too_slow": (408, "The request did not come to an end in time"),
    "not_forkable": (409, "The session cannot be forked now"),
    "no_checkpoint": (409, "The session has no checkpoint to return to"),
    "session_busy": (409, "The session is running a cell"),
    "session_ended": (409, "The session's process has ended"),
    "job_ended": (409, "The job has ended"),
    "job_running": (409, "The job has not ended"),
    "session_lost": (410, "The session was lost with its worker"),
    "too_many_calls": (413, "Too many calls in one request"),
    "jobs_full": (413, "The tenant's bulk jobs have as many items as they may have"),
    "body_too_large": (413, "The body is too large"),
    "wrong_content_type": (415, "The content type is not the one of this route"),
    "headers_too_large": (431, "The headers are too large"),
    "overloaded": (429, "The service is at its admission limit"),
    "tenant_busy": (429, "The key's tenant has as many calls in flight as it may have"),
    "rate_limited": (429, "The key's tenant has made as many calls in this minute as it may make"),
    "too_many_sessions": (429, "There is no room for another session"),
    "session_queue_full": (429, "The session has as many requests waiting as it may have"),
    "too_many_jobs": (429, "The tenant has as many bulk jobs as it may have"),
    "internal": (500, "The service failed"),
    "jobs_off": (501, "This service has no folder for bulk jobs"),
    "not_run": (503, "The program could not be run, for no fault of its own"),
    "connections_full": (503, "The service has as many connections as it may have"),
    "draining": (503, "The service is shutting down"),
    "not_ready": (503, "The service cannot run programs now"),
}


class Problem(Struct, frozen=True, omit_defaults=True):
    """The body of every error answer."""

    code: str
    title: str
    status: int
    detail: str = ""
    field: str = ""  # such as `$.calls[3].limits.wall_s`
    type: str = "about:blank"
    request_id: str = ""
    retry_after_s: float | None = None


def problem(
    code: str, detail: str = "", *, field: str = "", request_id: str = "", retry_after_s: float | None = None
) -> Problem:
    status, title = PROBLEMS[code]
    return Problem(code, title, status, detail, field, request_id=request_id, retry_after_s=retry_after_s)
