"""code-judge: `/ping /status`, and `/run` and `/judge`, each alone, as `/batch` and as `/long-batch`.

Every outcome is HTTP 200. Its clients retry `queue_timeout`, so every retryable failure is reported as that; they give up after
60 s, so the adapter answers before.
"""

import time
import uuid
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.routing import Route
from starlette.types import Scope

from exec_service.api.middleware import RequestFacts
from exec_service.compat.adapter import Adapter, AdapterEndpoint, GatewayParts, bytes_of, get, in_order, limits, post
from exec_service.dispatch.call_group import CallGroup
from exec_service.judging.judge import describe_end
from exec_service.judging.verify import bytes_of as bytes_of_verify
from exec_service.judging.verify import verify
from exec_service.refusals import Refusal
from exec_wire.messages.calls import Call, Result, Status
from exec_wire.messages.judging import Verification, Verify

Reason = Literal["", "internal_error", "worker_timeout", "queue_timeout", "invalid_input"]

SHOWN_CHARS = 1000
TIMED_OUT = "Suicide from timeout."
_REASONS: dict[Status, Reason] = {"timeout": "worker_timeout", "cpu_limit": "worker_timeout"}


class Submission(Struct, frozen=True):
    type: Literal["python", "cpp", "math"]
    solution: str
    sub_id: str | None = None
    options: dict[str, str] | None = None
    input: str | None = None
    expected_output: str | None = None


class BatchSubmission(Struct, frozen=True):
    submissions: Annotated[list[Submission], Meta(min_length=1)]
    sub_id: str | None = None
    type: Literal["batch"] = "batch"


class SubmissionResult(Struct):
    sub_id: str
    success: bool = False
    run_success: bool = False
    cost: float = 0.0
    stdout: str | UnsetType | None = ""
    stderr: str | UnsetType | None = ""
    reason: Reason = ""


class BatchResult(Struct):
    sub_id: str
    results: list[SubmissionResult]


class Judge(AdapterEndpoint):
    """`/run` returns the output, `/judge` does not."""

    request: ClassVar[type[Struct]] = Submission

    def __init__(self, parts: GatewayParts, adapter: Adapter, *, shows: bool) -> None:
        super().__init__(parts, adapter)
        self._shows = shows

    async def _serve(self, request: Any, scope: Scope, facts: RequestFacts) -> Struct:
        return (await self._judge_all([request], facts))[0]

    async def _judge_all(self, submissions: list[Submission], facts: RequestFacts) -> list[SubmissionResult]:
        self._validator.check_number(len(submissions), "submissions")
        work: list[Call | Verify | str] = [self._work_of(submission) for submission in submissions]
        with self._adapter.group(facts, len(work), sum(map(_bytes_of, work))) as group:
            began = time.monotonic()
            results = await in_order([_judge(*pair, group, began) for pair in zip(submissions, work, strict=True)])
        for result in results if not self._shows else []:
            result.stdout = result.stderr = UNSET
        return results

    def _work_of(self, submission: Submission) -> Call | Verify | str:
        """The call or verification; or a text that says why there is none."""
        config, tenant = self._config, self._adapter.tenant
        if submission.type == "math":
            if submission.expected_output is None:
                return "a submission of the type math needs its expected_output"
            times: dict[str, Any] = {"wall_s": min(config.codejudge_wall_s, 60.0), "deadline_s": config.codejudge_deadline_s}
            return Verify(submission.solution, submission.expected_output, tenant=tenant, **times)
        expected = (submission.expected_output or "").encode("utf-8", "surrogatepass")
        output = {"output_bytes": len(expected), "max_output_kb": config.max_output_kb}
        call = Call(
            code=submission.solution,
            language=submission.type,
            stdin=submission.input or "",
            limits=limits(config.codejudge_wall_s, config.codejudge_memory_mb, **output),
            deadline_s=config.codejudge_deadline_s,
            tenant=tenant,
        )
        try:
            self._validator.check(call, "$")
        except Refusal as refusal:
            return refusal.detail
        return call


class BatchJudge(Judge):
    request = BatchSubmission

    async def _serve(self, request: Any, scope: Scope, facts: RequestFacts) -> Struct:
        return BatchResult(request.sub_id or str(uuid.uuid4()), await self._judge_all(request.submissions, facts))


def _bytes_of(work: Call | Verify | str) -> int:
    if isinstance(work, Verify):
        return bytes_of_verify(work)
    return bytes_of(work) if isinstance(work, Call) else 0


async def _judge(submission: Submission, work: Call | Verify | str, group: CallGroup, began: float) -> SubmissionResult:
    if isinstance(work, str):
        made = SubmissionResult("", stderr=work, reason="invalid_input")
    elif isinstance(work, Verify):
        made = _of_verification(await verify(work, 0, group))
    else:
        made = _of_result(await group.run(work), submission.expected_output)
    made.sub_id = submission.sub_id or str(uuid.uuid4())
    if made.reason == "queue_timeout":
        made.cost = round(time.monotonic() - began, 6)
    return made


def _of_result(result: Result, expected: str | None) -> SubmissionResult:
    if reason := _not_run(result):
        return SubmissionResult("", stderr=result.error[:SHOWN_CHARS], reason=reason)
    if result.status == "compile_error":
        return SubmissionResult("", stdout=result.stdout[:SHOWN_CHARS], stderr=result.stderr[:SHOWN_CHARS])
    ran = result.status == "ok"
    right = expected is None or (not result.truncated and result.stdout.strip() == expected.strip())
    return SubmissionResult(
        "",
        success=ran and right,
        run_success=ran,
        cost=result.usage.wall_s,
        stdout=_shown(result),
        stderr=_told(result)[:SHOWN_CHARS],
        reason=_REASONS.get(result.status, ""),
    )


def _not_run(made: Result | Verification) -> Reason:
    """Why the program has no outcome; empty if it has one."""
    if made.blame == "infra":
        return "queue_timeout" if made.retryable else "internal_error"
    if made.blame == "client":
        return "internal_error" if made.status == "cancelled" else "invalid_input"
    return ""


def _shown(result: Result) -> str:
    if _REASONS.get(result.status) != "worker_timeout":
        return result.stdout[:SHOWN_CHARS]
    printed = result.stdout if not result.stdout or result.stdout.endswith("\n") else result.stdout + "\n"
    return f"{printed}{TIMED_OUT}\n"[:SHOWN_CHARS]


def _told(result: Result) -> str:
    """The program's stderr or, if that is empty, why it was stopped."""
    return result.stderr or ("" if result.status in ("ok", "error", "timeout") else describe_end(result))


def _of_verification(made: Verification) -> SubmissionResult:
    reason = _not_run(made)
    return SubmissionResult(
        "",
        success=made.equal is True,
        run_success=made.status == "ok" and made.equal is not None,
        cost=0.0 if reason else round(made.timings.run_ms / 1000, 6),
        stdout=(made.extracted or "")[:SHOWN_CHARS],
        stderr=made.error[:SHOWN_CHARS],
        reason=reason or _REASONS.get(made.status, ""),
    )


def routes(parts: GatewayParts) -> list[Route]:
    adapter = Adapter("code-judge", parts)

    def status() -> dict[str, Any]:
        waiting = parts.dispatch.admission.calls - len(parts.dispatch.released)
        return {"queue": max(0, waiting), "num_workers": parts.worker_registry.slots}

    made = [get("/ping", lambda: "pong"), get("/status", status)]
    for path, shows in (("/run", True), ("/judge", False)):
        made.append(post(path, Judge(parts, adapter, shows=shows)))
        made += [post(f"{path}/{kind}", BatchJudge(parts, adapter, shows=shows)) for kind in ("batch", "long-batch")]
    return made
