"""The OpenAPI document: FastAPI's own routes, the plain ASGI routes with the schemas of their messages, and those of adapters.

`exec_service/api/reference.py` has the order, the names and the examples.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec import Struct
from starlette.routing import Route

from exec_service.api.calls import NDJSON, Health, Ready, Results
from exec_service.api.reference import ENTRIES, SERVICE, Entry
from exec_service.api.responses import REF, answers, query_parameters, schema_of
from exec_service.api.tools import Tools
from exec_wire.messages.calls import Batch, Call, Cancelled, Result, Selection
from exec_wire.messages.jobs import JobItem, JobList, JobRemoved, JobResult, JobStatus
from exec_wire.messages.judging import Judge, Judgement, Verification, Verify, VerifyBatch
from exec_wire.messages.sessions import Cell, Ended, Files, Fork, Interrupted, SessionInfo, SessionList, SessionSpec, Tenant
from exec_wire.messages.stats import Info, RunStats, Stats
from exec_wire.problems import CONTENT_TYPE, Problem

_HOT_PROBLEMS = (
    "bad_json unauthenticated foreign_tenant beyond_limits foreign_origin body_too_large too_many_calls wrong_content_type "
    "bad_field overloaded tenant_busy rate_limited internal draining not_ready"
).split()
_MESSAGES = (
    *(Call, Batch, Result, Results, Judge, Judgement, Verify, VerifyBatch, Verification),
    *(SessionSpec, SessionInfo, SessionList, Cell, Fork, Files, Tenant, Interrupted, Ended),
    *(JobItem, JobResult, JobStatus, JobList, JobRemoved),
    *(Cancelled, Info, Health, Ready, Problem, Tools, Stats, RunStats),
)


def openapi_of(app: FastAPI, adapters: Iterable[Route]) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components: dict[str, Any] = {}
    paths = _hot_paths() | document["paths"] | _adapter_paths(adapters, components)
    found = {f"{verb.upper()} {path}": operation for path, verbs in paths.items() for verb, operation in verbs.items()}
    document["paths"] = {}
    order = {route: number for number, route in enumerate(ENTRIES)}
    for route in sorted(found, key=lambda route: order.get(route, len(order))):
        verb, path = route.split()
        document["paths"].setdefault(path, {})[verb.lower()] = _described(found[route], ENTRIES.get(route))
    sections = [operation["tags"][0] for verbs in document["paths"].values() for operation in verbs.values()]
    document["tags"] = [{"name": name} for name in dict.fromkeys(sections)]
    _, schemas = msgspec.json.schema_components(_MESSAGES, ref_template=REF)
    document["components"] = {
        "schemas": schemas | components,
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "needed where the service has keys"}},
    }
    document["security"] = [{}, {"key": []}]
    return document


def _described(operation: dict[str, Any], entry: Entry | None) -> dict[str, Any]:
    entry = entry or Entry(SERVICE, operation["operationId"])  # a test asks for its own
    for parameter in operation.get("parameters", []):
        if parameter["name"] in entry.values:
            parameter["example"] = entry.values[parameter["name"]]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        content["example"] = entry.example
    if operation["responses"].get("422", {}).get("content", {}).get("application/json"):
        del operation["responses"]["422"]  # FastAPI's own, which is never sent
    return operation | {"operationId": entry.name, "tags": [entry.section]}


def _adapter_paths(routes: Iterable[Route], components: dict[str, Any]) -> dict[str, Any]:
    """The routes of adapters; the schemas of their requests are added to `components`."""
    paths: dict[str, Any] = {}
    for route in routes:
        [verb] = (route.methods or set()) - {"HEAD"}
        entry = ENTRIES.get(f"{verb} {route.path}") or Entry(SERVICE, f"{verb.lower()}{route.path.replace('/', '_')}")
        problem = {"description": "A refusal", "content": {CONTENT_TYPE: {"schema": schema_of(Problem)}}}
        answer = {"description": "As that service answers", "content": {"application/json": {"schema": {}}}}
        operation = _operation(entry.name, entry.summary, None, {200: answer, "default": problem})
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.param_convertors
        ] + [
            {"name": name, "in": "header", "schema": {"type": "string", "default": value}}
            for name, value in entry.headers.items()
        ]
        if verb == "POST":
            schema: dict[str, Any] = {"type": "object"}
            if (message := getattr(route.endpoint, "request", None)) is not None:
                prefix = entry.section.removeprefix("Clients of ").title().replace("-", "")
                [schema], own = msgspec.json.schema_components([message], ref_template=REF.replace("{", prefix + "{"))
                components |= {prefix + name: one | {"title": prefix + name} for name, one in own.items()}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(route.path, {})[verb.lower()] = operation
    return paths


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
        ("/{id}/files", "get", "Read files of a session's folder", None, answers(Files, *alive, "bad_query")),
    ]
    tags = [one for one in query_parameters(Selection) if one["name"] not in ("request", "index")]
    files = {"name": "path", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}}
    queries = {("", "get"): tags, ("/{id}/files", "get"): [files]}
    paths: dict[str, Any] = {}
    for path, verb, summary, body, responses in routes:
        operation = _operation("", summary, body, responses)
        ids = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}] if path else []
        operation["parameters"] = ids + queries.get((path, verb), [])
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
