"""NeMo-Skills' sandbox: `/execute /health /sessions`. Its stateful part, `language: ipython`, waits for sessions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from exec_service.doors.foreign_door import DEADLINE_MOST_S, Desk, ForeignDoor, House, get, limits, not_ours, post
from exec_service.guard import RequestFacts
from exec_service.http_api import header
from exec_service.judging import words
from exec_service.problem_answers import answer
from exec_service.refusals import Refusal
from exec_service.validate import decode
from exec_wire.messages import Call, Result, Seconds

MEMORY_MB = 1024
WAIT_S = 60.0  # for a slot, beyond the program's own time
CUT = "<output cut>"
LANGUAGES = {"python": "python", "python3": "python", "shell": "bash", "bash": "bash"}
NO_SESSIONS = "programs that keep their state are not there yet; send language=python, which starts anew each time"


class Execute(Struct, frozen=True):
    generated_code: str
    timeout: Seconds = 10.0
    language: str = "ipython"
    std_input: str = ""
    max_output_characters: Annotated[int, Meta(ge=0)] = 1000
    traceback_verbosity: str = "Plain"


class Executed(Struct):
    process_status: Literal["completed", "error", "timeout"]
    stdout: str
    stderr: str


_decode_execute = msgspec.json.Decoder(Execute).decode


class ExecuteDoor(ForeignDoor):
    name = "nemo-skills"
    statuses: ClassVar[dict[str, int]] = dict.fromkeys(("bad_json", "bad_field", "unknown_language"), 400)
    words_in = "error"

    async def _serve(self, body: bytes, scope: Scope, facts: RequestFacts) -> Struct:
        request = decode(_decode_execute, body)
        if request.language == "ipython":
            if not header(scope, b"x-session-id"):
                raise Refusal("bad_field", "X-Session-ID header required for ipython sessions")
            raise Refusal("no_sessions", NO_SESSIONS)
        call = Call(
            code=request.generated_code,
            language=LANGUAGES.get(request.language, request.language),
            stdin=request.std_input,
            limits=limits(request.timeout, MEMORY_MB),
            deadline_s=min(request.timeout + WAIT_S, DEADLINE_MOST_S),
            tenant=self._desk.tenant,
        )
        self._validator.check(call, "$")
        return executed(not_ours(await self._desk.run(call, facts)), request)


def executed(result: Result, request: Execute) -> Executed:
    stderr = result.stderr
    match result.status:
        case "timeout" | "cpu_limit":
            status: Literal["completed", "error", "timeout"] = "timeout"
            stderr += f"Execution timed out after {request.timeout} seconds\n"
        case "ok":
            status = "completed"
        case "error":  # an uncaught exception of a Python program is a completed run there
            status = "error" if LANGUAGES.get(request.language) == "bash" else "completed"
        case _:
            status = "error"
            stderr = stderr or words(result) + "\n"
    return Executed(status, cut(result.stdout, request.max_output_characters), cut(stderr, request.max_output_characters))


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + CUT


def routes(house: House) -> list[Route]:
    async def forget_session(request: Request) -> Response:
        refusal = Refusal("not_found", f"IPython session {request.path_params['id'][:80]} not found")
        return answer(refusal, request.scope, house.metrics, words_in=ExecuteDoor.words_in)

    return [
        post("/execute", ExecuteDoor(house, Desk("nemo-skills", house))),
        get("/health", lambda: {"status": "healthy", "worker": "exec-service"}),
        get("/sessions", lambda: {"sessions": {}, "backend": "ipython"}),
        Route("/sessions/{id}", forget_session, methods=["DELETE"]),
    ]
