"""Piston: `/api/v2/execute` and `/api/v2/runtimes`. Times are milliseconds, memory is bytes, errors are `{"message": …}`."""

import base64
import binascii
import signal
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct
from starlette.routing import Route
from starlette.types import Scope

from exec_service.api.middleware import RequestFacts
from exec_service.compat.adapter import Adapter, AdapterEndpoint, GatewayParts, deadline, get, limits, post, raise_if_infra
from exec_service.judging.judge import INTERPRETED, describe_end
from exec_service.refusals import Refusal
from exec_wire.messages.calls import Call, Result

Milliseconds = Annotated[float, Meta(gt=0, le=3_600_000)]

WAIT_S = 15.0  # for a slot; open-r1 gives up after 30 s of silence
MEMORY_MB = 1024  # if the request sets no limit
VERSION = "*"  # any version; clients send it back unchanged
ALIASES = {"python": ["py", "python3"], "javascript": ["js", "node", "nodejs"], "c++": ["cpp", "g++"], "bash": ["sh"]}
_OURS = {alias: "cpp" if name == "c++" else name for name, aliases in ALIASES.items() for alias in (name, *aliases)}
_THEIRS = {"cpp": "c++"}
_STATUSES = {"error": "RE", "signal": "SG", "timeout": "TO", "cpu_limit": "TO", "memory_limit": "SG", "output_limit": "OL"}


class File(Struct, frozen=True):
    content: str
    name: str | None = None
    encoding: Literal["utf8", "base64", "hex"] = "utf8"


class Execute(Struct, frozen=True):
    language: str
    version: str
    files: Annotated[list[File], Meta(min_length=1)]
    stdin: str = ""
    args: list[str] = []
    compile_timeout: Milliseconds = 10_000
    run_timeout: Milliseconds = 3_000
    compile_memory_limit: int = -1
    run_memory_limit: int = -1


class Stage(Struct):
    stdout: str
    stderr: str
    output: str
    code: int | None
    signal: str | None
    message: str | None
    status: str | None
    cpu_time: int
    wall_time: int
    memory: int


class Executed(Struct, omit_defaults=True):
    language: str
    version: str
    run: Stage
    compile: Stage | None = None


class ExecuteEndpoint(AdapterEndpoint):
    request = Execute
    statuses: ClassVar[dict[str, int]] = dict.fromkeys(("bad_json", "bad_field", "unknown_language"), 400)
    message_field = "message"

    async def _serve(self, request: Execute, scope: Scope, facts: RequestFacts) -> Struct:
        main, *others = [_bytes_of(file, f"$.files[{index}]") for index, file in enumerate(request.files)]
        memory_mb = request.run_memory_limit >> 20 if request.run_memory_limit > 0 else MEMORY_MB
        wall_s = request.run_timeout / 1000
        language = _OURS.get(request.language, request.language)
        call = Call(
            code=main.decode("utf-8", "replace"),
            language=language,
            stdin=request.stdin,
            argv=request.args,
            files={
                file.name or f"file{index}": base64.b64encode(content).decode()
                for index, (file, content) in enumerate(zip(request.files[1:], others, strict=True), 1)
            },
            limits=limits(wall_s, memory_mb, file_bytes=sum(map(len, others))),
            deadline_s=deadline(wall_s + request.compile_timeout / 1000 + WAIT_S),
            tenant=self._adapter.tenant,
        )
        try:
            self._validator.check(call, "$")
        except Refusal as refusal:
            if refusal.code == "unknown_language":
                refusal.detail = f"{request.language}-{request.version} runtime is unknown: {refusal.detail}"
            raise
        return executed(raise_if_infra(await self._adapter.run(call, facts)), language)


def _bytes_of(file: File, at: str) -> bytes:
    try:
        match file.encoding:
            case "base64":
                return binascii.a2b_base64(file.content)
            case "hex":
                return bytes.fromhex(file.content)
            case _:
                return file.content.encode("utf-8", "surrogatepass")
    except ValueError as error:
        raise Refusal("bad_field", f"is not {file.encoding}: {error}", field=f"{at}.content") from None


def executed(result: Result, language: str) -> Executed:
    made = Executed(_THEIRS.get(language, language), VERSION, stage(result))
    if result.status == "compile_error":
        made.run.code = made.run.code or 1
        made.compile = made.run  # the program did not run, but clients read `run` anyway
    elif language not in INTERPRETED:
        made.compile = Stage("", "", "", 0, None, None, None, 0, 0, 0)
    return made


def stage(result: Result) -> Stage:
    killed = result.signal or (signal.SIGKILL if result.status in ("timeout", "memory_limit", "output_limit") else 0)
    usual = result.status in ("ok", "error", "compile_error")
    return Stage(
        stdout=result.stdout,
        stderr=result.stderr,
        output=result.stdout + result.stderr,
        code=result.exit_code,
        signal=_signal_name(killed) if killed else None,
        message=None if usual else describe_end(result),
        status=None if result.status == "ok" else _STATUSES.get(result.status, "RE" if usual else "XX"),
        cpu_time=round(result.usage.cpu_s * 1000),
        wall_time=round(result.usage.wall_s * 1000),
        memory=result.usage.memory_peak_bytes,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def routes(parts: GatewayParts) -> list[Route]:
    def runtimes() -> list[dict[str, Any]]:
        names = [_THEIRS.get(language, language) for language in parts.worker_registry.languages]
        return [{"language": name, "version": VERSION, "aliases": ALIASES.get(name, [])} for name in names]

    return [post("/api/v2/execute", ExecuteEndpoint(parts, Adapter("piston", parts))), get("/api/v2/runtimes", runtimes)]
