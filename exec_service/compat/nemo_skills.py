"""NeMo-Skills' sandbox: `/execute /health /sessions`. `language: ipython` keeps its state by `X-Session-ID`."""

import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from exec_service.api.errors import answer
from exec_service.api.middleware import RequestFacts
from exec_service.compat.adapter import Adapter, AdapterEndpoint, GatewayParts, deadline, get, limits, post, raise_if_infra
from exec_service.compat.notebooks import Notebooks, created_at
from exec_service.judging.judge import describe_end
from exec_service.refusals import Refusal
from exec_wire.messages.calls import Call, Result, Seconds
from exec_wire.messages.sessions import Cell, SessionSpec

MEMORY_MB = 1024
WAIT_S = 60.0  # for a slot, in addition to the program's own time
CELL_WAIT_S = 4.0  # its clients give up 5 s after the cell's own time; a cell must not start later
CUT = "<output cut>"
LANGUAGES = {"python": "python", "python3": "python", "shell": "bash", "bash": "bash"}
NAME_CHARS = 256
LOST = "The session was lost with its worker; its variables are gone.\n"

ProcessStatus = Literal["completed", "error", "timeout"]


class Execute(Struct, frozen=True):
    generated_code: str
    timeout: Seconds = 10.0
    language: str = "ipython"
    std_input: str = ""
    max_output_characters: Annotated[int, Meta(ge=0)] = 1000
    traceback_verbosity: str = "Plain"


class Executed(Struct, omit_defaults=True):
    process_status: ProcessStatus
    stdout: str
    stderr: str
    new_session_created: bool | None = None  # in a session: the state of earlier cells is gone


class ExecuteEndpoint(AdapterEndpoint):
    request = Execute
    statuses: ClassVar[dict[str, int]] = dict.fromkeys(("bad_json", "bad_field", "unknown_language"), 400)
    message_field = "error"

    def __init__(self, parts: GatewayParts, adapter: Adapter, notebooks: Notebooks) -> None:
        super().__init__(parts, adapter)
        self._notebooks = notebooks

    async def _serve(self, request: Execute, scope: Scope, facts: RequestFacts) -> Struct:
        if request.language == "ipython":
            return await self._run_cell(request, session_name(scope), facts)
        call = Call(
            code=request.generated_code,
            language=LANGUAGES.get(request.language, request.language),
            stdin=request.std_input,
            limits=limits(request.timeout, MEMORY_MB),
            deadline_s=deadline(request.timeout + WAIT_S),
            tenant=self._adapter.tenant,
        )
        self._validator.check(call, "$")
        return executed(raise_if_infra(await self._adapter.run(call, facts)), request)

    async def _run_cell(self, request: Execute, name: str, facts: RequestFacts) -> Executed:
        cell = Cell(
            code=request.generated_code,
            stdin=request.std_input,
            wall_s=request.timeout,
            deadline_s=deadline(request.timeout + CELL_WAIT_S),
            tenant=self._adapter.tenant,
        )
        spec = SessionSpec(self._adapter.profile, tenant=self._adapter.tenant)
        with self._adapter.admitted(facts, 1, facts.body_bytes):
            ran = await self._notebooks.run(name, cell, spec, self._adapter.origin(facts))
        made = executed_cell(raise_if_infra(ran.result), request)
        made.new_session_created = ran.new
        return made


def session_name(scope: Scope) -> str:
    name = Headers(scope=scope).get("x-session-id", "")
    if not name:
        raise Refusal("bad_field", "X-Session-ID header required for ipython sessions")
    if len(name) > NAME_CHARS:
        raise Refusal("bad_field", f"X-Session-ID has {len(name)} characters; at most {NAME_CHARS} are allowed")
    return name


def executed(result: Result, request: Execute) -> Executed:
    stderr = result.stderr
    match result.status:
        case "timeout" | "cpu_limit":
            status: ProcessStatus = "timeout"
            stderr += f"Execution timed out after {request.timeout} seconds\n"
        case "ok":
            status = "completed"
        case "error":  # for NeMo-Skills an uncaught exception of a Python program is a completed run
            status = "error" if LANGUAGES.get(request.language) == "bash" else "completed"
        case _:
            status = "error"
            stderr = stderr or describe_end(result) + "\n"
    return Executed(status, cut(result.stdout, request.max_output_characters), cut(stderr, request.max_output_characters))


def executed_cell(result: Result, request: Execute) -> Executed:
    """As NeMo-Skills does: the value follows the output, an exception is an error, texts end with one newline."""
    stdout, stderr = result.stdout, result.stderr
    if result.value is not None:
        stdout += f"{chr(10) if stdout and not stdout.endswith(chr(10)) else ''}{result.value}\n"
    match result.status:
        case "ok":
            status: ProcessStatus = "completed"
        case "timeout":
            status = "timeout"
            stderr += f"Execution timed out after {request.timeout} seconds\n"
        case "error":
            status = "error"
        case "session_lost":
            status, stderr = "error", LOST
        case _:
            status = "error"
            stderr += describe_end(result) + "\n"
    most = request.max_output_characters
    return Executed(status, cut(trimmed(stdout), most), cut(trimmed(stderr), most))


def trimmed(text: str) -> str:
    text = text.lstrip("\n").rstrip()
    return f"{text}\n" if text else ""


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + CUT


Answerer = Callable[[Request, RequestFacts], Awaitable[Any]]


def routes(parts: GatewayParts) -> list[Route]:
    adapter, notebooks = Adapter("nemo-skills", parts), Notebooks("nemo-skills", parts.sessions)

    def json_route(answer_of: Answerer) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                body = await answer_of(request, request.scope["exec"])
            except Refusal as refusal:
                return answer(refusal, request.scope, parts.metrics, message_field=ExecuteEndpoint.message_field)
            return Response(msgspec.json.encode(body), media_type="application/json")

        return endpoint

    async def list_sessions(_: Request, facts: RequestFacts) -> Any:
        found = await notebooks.all(adapter.tenant, adapter.origin(facts))
        now = time.time()
        about = {
            session.tags.rollout: {
                "backend": "ipython",
                "created": created_at(session),
                "last_used": now - session.idle_s,
                "alive": session.state != "ended",
            }
            for session in found
        }
        return {"sessions": about, "backend": "ipython"}

    async def end_session(request: Request, facts: RequestFacts) -> Any:
        name = request.path_params["id"]
        if not await notebooks.end(name, adapter.tenant, adapter.origin(facts)):
            raise Refusal("no_such_session", f"IPython session {name[:80]} not found")
        return {"message": f"IPython session {name} deleted successfully"}

    return [
        post("/execute", ExecuteEndpoint(parts, adapter, notebooks)),
        get("/health", lambda: {"status": "healthy", "worker": "exec-service"}),
        Route("/sessions", json_route(list_sessions), methods=["GET"]),
        Route("/sessions/{id}", json_route(end_session), methods=["DELETE"]),
    ]
