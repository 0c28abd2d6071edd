"""The OpenAPI document: FastAPI's own routes, and the plain ASGI routes with the schemas of their messages."""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec import Struct

from exec_service.api.calls import NDJSON, Health, Ready, Results
from exec_service.api.responses import REF, answers, schema_of
from exec_service.api.tools import Tools
from exec_wire.messages.calls import Batch, Call, Cancelled, Result
from exec_wire.messages.info import Info
from exec_wire.messages.jobs import JobItem, JobList, JobRemoved, JobResult, JobStatus
from exec_wire.messages.judging import Judge, Judgement
from exec_wire.messages.sessions import Cell, Ended, Files, Fork, Interrupted, SessionInfo, SessionList, SessionSpec, Tenant
from exec_wire.messages.stats import RunStats, Stats
from exec_wire.messages.verifying import Verification, Verify, VerifyBatch
from exec_wire.problems import Problem

_HOT_PROBLEMS = (
    "bad_json unauthenticated foreign_tenant beyond_limits foreign_origin body_too_large too_many_calls wrong_content_type "
    "bad_field overloaded tenant_busy rate_limited internal draining not_ready"
).split()
_MESSAGES = (
    *(SessionSpec, SessionInfo, SessionList, Cell, Fork, Files, Tenant, Interrupted, Ended),
    *(Call, Batch, Result, Results, Judge, Judgement, Verify, VerifyBatch, Verification),
    *(JobItem, JobResult, JobStatus, JobList, JobRemoved),
    *(Cancelled, Info, Health, Ready, Problem, Tools, Stats, RunStats),
)


def openapi_of(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    document["paths"] = _hot_paths() | document["paths"]
    _, schemas = msgspec.json.schema_components(_MESSAGES, ref_template=REF)
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    return document


def _hot_paths() -> dict[str, Any]:
    run = _operation("run", "Run one program and wait for its result", Call, answers(Result, *_HOT_PROBLEMS))
    described = f"{NDJSON}: a Result per line; with stream=false a Results document"
    responses = _stream_answers(Results, Result, described)
    batch = _operation("batch", "Run many programs; each result is sent when it is ready", Batch, responses)
    described = "true: one result per line, each when it is ready. false: one document, in the order of the calls."
    flag = {"type": "boolean", "default": True}
    batch["parameters"] = [{"name": "stream", "in": "query", "description": described, "schema": flag}]
    judge = _operation("judge", "Run one program on many tests", Judge, answers(Judgement, *_HOT_PROBLEMS))
    described = f"a Verification; of a VerifyBatch {NDJSON}: a Verification per line, each when it is ready"
    responses = _stream_answers(Verification, Verification, described)
    verify = _operation("verify", "Compare a model's answer, or many, with the truth", Verify, responses)
    verify["requestBody"]["content"]["application/json"]["schema"] = {"anyOf": [schema_of(Verify), schema_of(VerifyBatch)]}
    return _session_paths() | {
        "/v1/run": {"post": run},
        "/v1/batch": {"post": batch},
        "/v1/judge": {"post": judge},
        "/v1/verify": {"post": verify},
    }


def _session_paths() -> dict[str, Any]:
    """Path, verb, summary, body and answers of each route of sessions."""
    one = ("no_such_session", "session_lost", *_HOT_PROBLEMS)
    used = ("session_queue_full", *one)
    alive = ("session_ended", *used)
    routes: list[tuple[str, str, str, type[Struct] | None, dict[int | str, dict[str, Any]]]] = [
        ("", "post", "Start a session", SessionSpec, answers(SessionInfo, *_HOT_PROBLEMS, "too_many_sessions")),
        ("", "get", "Sessions by their tags", None, answers(SessionList, "bad_query")),
        ("/{id}", "get", "The state of a session", None, answers(SessionInfo, *one)),
        ("/{id}", "delete", "End a session", None, answers(Ended, *one)),
        ("/{id}/run", "post", "Run a cell", Cell, answers(Result, *alive, "idempotency_conflict")),
        ("/{id}/fork", "post", "Copy a session", Fork, answers(SessionList, *alive, "not_forkable", "too_many_sessions")),
        ("/{id}/rollback", "post", "Undo the last cell", Tenant, answers(SessionInfo, *used, "no_checkpoint")),
        ("/{id}/interrupt", "post", "Stop the running cell", Tenant, answers(Interrupted, *one)),
        ("/{id}/files", "put", "Put files into a session's folder", Files, answers(Files, *alive)),
        ("/{id}/files", "get", "Read files: ?path=…&path=…", None, answers(Files, *alive, "bad_query")),
    ]
    paths: dict[str, Any] = {}
    for path, verb, summary, body, responses in routes:
        name = f"{verb}_session{path.replace('/{id}', '').replace('/', '_')}" if path else f"{verb}_sessions"
        operation = _operation(name, summary, body, responses)
        if path:
            operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(f"/v1/sessions{path}", {})[verb] = operation
    return paths


def _stream_answers(message: type[Struct], line: type[Struct], description: str) -> dict[int | str, dict[str, Any]]:
    responses = answers(message, *_HOT_PROBLEMS)
    responses[200]["description"] = description
    responses[200]["content"][NDJSON] = {"schema": schema_of(line)}
    return responses


def _operation(name: str, summary: str, body: type[Struct] | None, responses: Mapping[int | str, Any]) -> dict[str, Any]:
    made = {"operationId": name, "summary": summary, "responses": {str(status): one for status, one in responses.items()}}
    if body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema_of(body)}}}
    return made
