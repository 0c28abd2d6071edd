"""SandboxFusion: `/v1/ping /run_code /run_jupyter /submit`.

Every outcome of a program is HTTP 200. An infrastructure failure is 504, the only status that verl retries.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct, field
from starlette.routing import Route
from starlette.types import Scope

from exec_service.api.middleware import RequestFacts
from exec_service.api.validation import decode
from exec_service.compat import cells, completions
from exec_service.compat.adapter import (
    Adapter,
    AdapterEndpoint,
    GatewayParts,
    bytes_of,
    deadline,
    get,
    limits,
    post,
    raise_if_infra,
)
from exec_service.dispatch.call_group import CallGroup
from exec_service.judging.judge import INTERPRETED, describe_end
from exec_service.refusals import Refusal
from exec_wire.messages.calls import Call, Limits, Result, Seconds
from exec_wire.supervisor import stop

Outcome = Literal["Success", "Failed", "SandboxError"]
_Timeout = Annotated[float, Meta(ge=0, le=3600)]

ALIASES = {
    **dict.fromkeys(("js", "javascript", "nodejs", "node"), "javascript"),
    **dict.fromkeys(("c++", "cpp"), "cpp"),
    **dict.fromkeys(("python3", "py"), "python"),
    **dict.fromkeys(("sh", "shell"), "bash"),
    "ts": "typescript",
}


class RunCode(Struct, frozen=True):
    code: str
    language: str = "python"
    compile_timeout: _Timeout = 10.0
    run_timeout: Seconds = 10.0
    memory_limit_MB: int = -1
    stdin: str | None = None
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []


class RunJupyter(Struct, frozen=True):
    cells: list[str]
    cell_timeout: _Timeout = 0.0
    total_timeout: Seconds = 45.0
    memory_limit_MB: int = -1
    kernel: Literal["python3"] = "python3"
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []


class Case(Struct, frozen=True):
    input: dict[str, str]  # `stdin`; other names are files
    output: dict[str, str]  # `stdout`; other names are files


class Data(Struct, frozen=True):
    test: list[Case] | str  # or the same as JSON text


class Extra(Struct, frozen=True):
    run_all_cases: bool = False


class Config(Struct, frozen=True):
    provided_data: Data
    language: str | None = None
    dataset_type: str | None = None
    compile_timeout: _Timeout | None = None
    run_timeout: Seconds | None = None
    extra: Extra = Extra()


class Submit(Struct, frozen=True):
    id: int | str
    completion: str
    config: Config
    dataset: str = ""
    dataset_type: str | None = None


class Command(Struct):
    """The outcome of one command."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeAnswer(Struct):
    status: Outcome
    message: str = ""
    compile_result: Command | None = None
    run_result: Command | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = field(default_factory=dict)


class RunJupyterAnswer(Struct):
    status: Outcome
    message: str = ""
    driver: Command | None = None
    cells: list[cells.Cell] = field(default_factory=list)
    executor_pod_name: str | None = None
    files: dict[str, str] = field(default_factory=dict)


class TestAnswer(Struct):
    passed: bool
    exec_info: RunCodeAnswer
    test_info: dict[str, Any] | None = None


class SubmitAnswer(Struct):
    id: int | str
    accepted: bool
    extracted_code: str
    tests: list[TestAnswer]
    full_code: str | None = None
    test_code: str | None = None
    extracted_type: Literal["fenced", "incomplete_fenced", "heuristic", "empty"] | None = None
    extra: dict[str, Any] | None = None


_decode_cases = msgspec.json.Decoder(list[Case]).decode


class FusionEndpoint(AdapterEndpoint):
    statuses: ClassVar[dict[str, int]] = {"bad_json": 422} | dict.fromkeys(
        ("overloaded", "draining", "not_ready", "not_run"), 504
    )

    def _deadline_s(self, *parts_s: float) -> float:
        return deadline(sum(parts_s) + self._config.fusion_wait_s)

    def _limits(self, wall_s: float, memory_mb: int, files: dict[str, str]) -> Limits:
        memory_mb = memory_mb if memory_mb > 0 else self._config.fusion_memory_mb
        return limits(wall_s, memory_mb, file_bytes=sum(map(len, files.values())))

    def _call(self, request: RunCode) -> Call:
        files = given(request.files)
        return Call(
            code=request.code,
            language=ALIASES.get(request.language.lower(), request.language),
            stdin=request.stdin or "",
            files=files,
            fetch_files=request.fetch_files,
            limits=self._limits(request.run_timeout, request.memory_limit_MB, files),
            deadline_s=self._deadline_s(request.compile_timeout, request.run_timeout),
            tenant=self._adapter.tenant,
        )

    def _missing(self, call: Call, asked: str) -> str:
        """A message if the call's language is not installed; raises a `Refusal` for any other error."""
        try:
            self._validator.check(call, "$")
        except Refusal as refusal:
            if refusal.code != "unknown_language":
                raise
            return f"the language {asked!r} is not installed: {refusal.detail}"
        return ""


class RunCodeEndpoint(FusionEndpoint):
    request = RunCode

    async def _serve(self, request: RunCode, scope: Scope, facts: RequestFacts) -> Struct:
        call = self._call(request)
        if missing := self._missing(call, request.language):
            return RunCodeAnswer("SandboxError", missing)
        return run_code_answer(raise_if_infra(await self._adapter.run(call, facts)), call.language)


class RunJupyterEndpoint(FusionEndpoint):
    request = RunJupyter

    async def _serve(self, request: RunJupyter, scope: Scope, facts: RequestFacts) -> Struct:
        call = self._notebook(request)
        self._validator.check(call, "$")
        result = raise_if_infra(await self._adapter.run(call, facts))
        driver = command(result)
        if request.cell_timeout and result.signal == signal.SIGALRM:
            driver = Command("TimeLimitExceeded", result.usage.wall_s)
        done = cells.finished_cells(result.files, len(request.cells))
        if len(done) < len(request.cells):
            printed, complained = cells.left_over(result.files)
            driver.stdout, driver.stderr = printed, complained + (driver.stderr or "")
        status, message = status_of(driver)
        if status == "Success" and len(done) < len(request.cells):  # the driver ended before its cells
            status = "Failed"
        files = {path: content for path, content in result.files.items() if path not in cells.FILES}
        return RunJupyterAnswer(status, message, driver, done, result.worker or None, files)

    def _notebook(self, request: RunJupyter) -> Call:
        files = given(request.files)
        return Call(
            code=cells.program(request.cells, request.cell_timeout),
            files=files,
            fetch_files=cells.FILES + request.fetch_files,
            limits=self._limits(request.total_timeout, request.memory_limit_MB, files),
            deadline_s=self._deadline_s(request.total_timeout),
            tenant=self._adapter.tenant,
        )


class SubmitEndpoint(FusionEndpoint):
    """The generic judge of SandboxFusion's data sets: a completion, and test cases of input and output."""

    request = Submit

    async def _serve(self, request: Submit, scope: Scope, facts: RequestFacts) -> Struct:
        config = request.config
        kind = config.dataset_type or request.dataset_type or "none"
        if kind != "CommonOJDataset":
            raise Refusal("bad_field", f"only CommonOJDataset is judged here, not {kind!r}", field="$.config.dataset_type")
        test = config.provided_data.test
        cases = test if isinstance(test, list) else decode(_decode_cases, test.encode())
        self._validator.check_number(len(cases), "config.provided_data.test")
        language = config.language or "python"
        code, found = completions.extract(request.completion, ALIASES.get(language.lower(), language))
        calls = [self._case_call(config, language, code, case) for case in cases]
        for call in calls:
            if missing := self._missing(call, language):
                raise Refusal("unknown_language", missing, field="$.config.language")
        with self._adapter.group(facts, len(calls), sum(map(bytes_of, calls))) as group:
            tests = await run_cases(calls, cases, group, run_all=config.extra.run_all_cases)
        accepted = bool(tests) and all(test.passed for test in tests)
        return SubmitAnswer(request.id, accepted, code, tests, full_code=code, extracted_type=found)

    def _case_call(self, config: Config, language: str, code: str, case: Case) -> Call:
        given = {"compile_timeout": config.compile_timeout, "run_timeout": config.run_timeout}
        timeouts: dict[str, Any] = {name: timeout for name, timeout in given.items() if timeout is not None}
        request = RunCode(
            code,
            language,
            **timeouts,
            stdin=case.input.get("stdin"),
            files={path: completions.base64_of(text) for path, text in case.input.items() if path != "stdin"},
            fetch_files=[path for path in case.output if path != "stdout"],
        )
        return self._call(request)


async def run_cases(calls: list[Call], cases: list[Case], group: CallGroup, *, run_all: bool) -> list[TestAnswer]:
    """Run the cases in order, up to the first failure. The first one runs alone, so that it compiles for all."""
    tests: list[TestAnswer] = []
    alone = 0 if calls and calls[0].language in INTERPRETED else 1
    for batch in (range(alone), range(alone, len(calls))):
        tasks = [asyncio.create_task(group.run(calls[index])) for index in batch if index < len(calls)]
        try:
            for task in tasks:
                result, case = raise_if_infra(await task), cases[len(tests)]
                made = run_code_answer(result, calls[0].language)
                tests.append(TestAnswer(await _passed(made, case), made, {"input": case.input, "output": case.output}))
                if not (tests[-1].passed or run_all):
                    return tests
        finally:
            await stop(tasks)
    return tests


async def _passed(made: RunCodeAnswer, case: Case) -> bool:
    if made.status != "Success" or made.run_result is None:
        return False
    for name, expected in case.output.items():
        output = made.run_result.stdout or "" if name == "stdout" else completions.text_of(made.files.get(name, ""))
        if not await completions.same_output(output, expected):
            return False
    return True


def given(files: dict[str, str | None]) -> dict[str, str]:
    return {path: content for path, content in files.items() if content is not None}


def run_code_answer(result: Result, language: str) -> RunCodeAnswer:
    ended = command(result)
    compiled = None if language in INTERPRETED else Command("Finished", 0.0, 0, "", "")
    status, message = status_of(ended)
    if result.status == "compile_error":
        ended.return_code = ended.return_code or 1
        return RunCodeAnswer("Failed", "", ended, None, result.worker or None)
    return RunCodeAnswer(status, message, compiled, ended, result.worker or None, result.files)


def command(result: Result) -> Command:
    spent_s = result.usage.wall_s
    match result.status:
        case "timeout" | "cpu_limit":
            return Command("TimeLimitExceeded", spent_s, None, result.stdout, result.stderr)
        case "ok" | "error" | "compile_error":
            return Command("Finished", spent_s, result.exit_code, result.stdout, result.stderr)
        case "signal" | "memory_limit" | "output_limit":
            code = -(result.signal or signal.SIGKILL)
            return Command("Finished", spent_s, code, result.stdout, result.stderr or describe_end(result))
        case _:
            return Command("Error", None, None, "", describe_end(result))


def status_of(ended: Command) -> tuple[Outcome, str]:
    if ended.status == "Error":
        return "SandboxError", ended.stderr or ""
    return ("Failed" if ended.status == "TimeLimitExceeded" or ended.return_code != 0 else "Success"), ""


def routes(parts: GatewayParts) -> list[Route]:
    adapter = Adapter("sandbox-fusion", parts)
    return [
        get("/v1/ping", lambda: "pong"),
        post("/run_code", RunCodeEndpoint(parts, adapter)),
        post("/run_jupyter", RunJupyterEndpoint(parts, adapter)),
        post("/submit", SubmitEndpoint(parts, adapter)),
    ]
