"""One judgement: runs a program on each test and compares the output in the gateway, outside of the program's sandbox.

Three kinds of failure: a program's failure is a verdict; a failure of the service is retried, then the judgement has no score
(INFRA, retryable); a failure of the caller's checker has no score either (INFRA, not retryable). A checker that fails on an
output is to blame only if it also fails on the expected output.
"""

import asyncio
import base64
import time
from typing import Any

from exec_service.dispatch.call_group import LEAST_PLACES, CallGroup, raise_first
from exec_service.judging.checkers import difference, same_value
from exec_service.judging.harnesses import RETURNED, far_longer, harness, load, python_checker, returned_text
from exec_wire.messages.calls import Call, Limits, Result, Sandbox, Status, cut_middle
from exec_wire.messages.judging import Judge, Judgement, Test, Verdict, VerdictName
from exec_wire.supervisor import stop

# Programs in other languages are compiled by the first test alone: otherwise every test would hold a slot during the same
# compilation.
INTERPRETED = frozenset({"python", "bash", "javascript"})
CHECKER_FILES = ["input.txt", "output.txt", "expected.txt"]
CALL_OVERHEAD_BYTES = 512
MESSAGE_CHARS, COMPILER_CHARS = 300, 10_000

_ENDS: dict[Status, VerdictName] = {
    "error": "RE",
    "signal": "RE",
    "timeout": "TLE",
    "cpu_limit": "TLE",
    "memory_limit": "MLE",
    "output_limit": "OLE",
    "compile_error": "CE",
    "cancelled": "SKIPPED",
}


def bytes_of(judge: Judge, most_at_once: int = LEAST_PLACES) -> int:
    """Memory of its calls when as many as possible wait in the queue."""
    copies = min(most_at_once, len(judge.tests))
    tests = sum(len(test.stdin) + len(test.expected) for test in judge.tests)
    return copies * (len(judge.code) + len(judge.checker.code)) + tests + len(judge.tests) * CALL_OVERHEAD_BYTES


class Judging:
    def __init__(self, judge: Judge, group: CallGroup) -> None:
        self._judge, self._group = judge, group
        self._program = harness(judge.code, judge.function) if judge.function else judge.code
        self._tasks: dict[int, asyncio.Task[Verdict]] = {}
        self._checker_compiled = judge.checker.language in INTERPRETED
        self._compiling_checker = asyncio.Lock()
        self._compile_error = ""
        # The fields of its calls that are the judgement's own.
        names = ("deadline_s", "tags", "tenant", "priority", "require_tier")
        self._fields: dict[str, Any] = {name: getattr(judge, name) for name in names}

    async def judge(self) -> Judgement:
        began = time.monotonic()
        judgement = judgement_of(self._judge, await self._verdicts())
        judgement.compile_error = cut_middle(self._compile_error, COMPILER_CHARS)
        judgement.total_ms = round((time.monotonic() - began) * 1000, 3)
        judgement.request_id = self._group.origin.request_id
        return judgement

    async def _verdicts(self) -> list[Verdict]:
        alone: list[Verdict] = []
        if self._judge.language not in INTERPRETED:
            alone = [await self._test(0)]
            if alone[0].verdict == "CE":
                return alone + self._all_from(1, "CE")
            if self._ends_all(alone[0]):
                return alone + self._all_from(1, "SKIPPED")
        verdicts = alone + await self._in_parallel(len(alone))
        # Tests that ran beside the first failure and happened to end before it count as skipped too.
        failed = next((index for index, verdict in enumerate(verdicts) if self._ends_all(verdict)), len(verdicts))
        return verdicts[: failed + 1] + self._all_from(failed + 1, "SKIPPED")

    async def _in_parallel(self, start: int) -> list[Verdict]:
        self._tasks = {index: asyncio.create_task(self._test(index)) for index in range(start, len(self._judge.tests))}
        tasks = self._tasks.values()
        try:
            if tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                raise_first(done)
            skipped = self._all_from(start, "SKIPPED")
            return [skip if task.cancelled() else task.result() for skip, task in zip(skipped, tasks, strict=True)]
        finally:
            await stop(tasks)

    def _ends_all(self, verdict: Verdict) -> bool:
        return self._judge.stop_on_fail and verdict.verdict != "AC"

    def _all_from(self, start: int, name: VerdictName) -> list[Verdict]:
        return [Verdict(index, name, test.id) for index, test in enumerate(self._judge.tests[start:], start)]

    async def _test(self, index: int) -> Verdict:
        judge, test = self._judge, self._judge.tests[index]
        result = await self._group.run(self._call(test))
        verdict = await self._verdict(result, test)
        verdict.index, verdict.id = index, test.id
        verdict.result = slim(result, index, test.id, judge.output_chars)
        if self._ends_all(verdict):
            for later, task in self._tasks.items():
                if later > index:
                    task.cancel()
        return verdict

    def _call(self, test: Test) -> Call:
        judge = self._judge
        return Call(
            code=self._program,
            language=judge.language,
            stdin=test.stdin,
            argv=test.argv,
            limits=test.limits or judge.limits,
            compile_args=judge.compile_args,
            fetch_files=[RETURNED] if judge.function else [],
            **self._fields,
        )

    async def _verdict(self, result: Result, test: Test) -> Verdict:
        if result.status != "ok":
            name = "INFRA" if result.blame == "infra" else _ENDS.get(result.status, "INFRA")
            self._compile_error = result.stderr if name == "CE" else self._compile_error
            return Verdict(0, name, message=describe_end(result), retryable=name == "INFRA" and result.retryable)
        output = result.stdout
        if self._judge.function:
            returned = returned_text(result.files)
            if returned is None:
                return Verdict(0, "RE", message=f"the program ended before {self._judge.function} had returned a value")
            output = returned
        limits = test.limits or self._judge.limits
        if (result.truncated or self._judge.function) and len(output.encode()) > limits.output_kb << 10:
            return Verdict(0, "OLE", message="too much output to compare")
        if self._judge.checker.kind == "program":
            return await self._run_checker(output, test)
        different = await self._difference(output, test)
        return Verdict(0, "WA" if different else "AC", message=different)

    async def _difference(self, output: str, test: Test) -> str:
        checker = self._judge.checker
        if not self._judge.function:
            return await difference(checker, output, test.expected)
        if output == test.expected:
            return ""
        # The time to parse a value grows with its length: this bounds it by the caller's value, not the program's.
        if far_longer(output, test.expected):
            return "the returned value is far longer than the expected one"
        try:
            value = load(output)
        except ValueError:
            return "the returned value is not JSON"
        return "" if await same_value(checker, value, load(test.expected)) else "the returned value differs"

    async def _run_checker(self, output: str, test: Test) -> Verdict:
        result = await self._checker_result(output, test)
        if (verdict := _verdict_of_checker(result)) is not None:
            return verdict
        failed = f"the checker failed on this output: {describe_end(result)}"
        if result.status == "compile_error":
            return Verdict(0, "INFRA", message=failed)
        expected = await self._checker_result(test.expected, test)
        on_expected = _verdict_of_checker(expected)
        if on_expected is None:
            return Verdict(0, "INFRA", message=f"{failed}; on the expected output it fails too: {describe_end(expected)}")
        match on_expected.verdict:
            case "AC":
                return Verdict(0, "WA", message=failed)
            case "WA":
                return Verdict(0, "INFRA", message=f"{failed}; it does not accept the expected output either")
            case _:
                return on_expected

    async def _checker_result(self, output: str, test: Test) -> Result:
        call = self._checker_call(output, test)
        if self._checker_compiled:
            return await self._group.run(call)
        async with self._compiling_checker:  # the first one compiles alone, as with the program
            result = await self._group.run(call)
            self._checker_compiled = True
            return result

    def _checker_call(self, output: str, test: Test) -> Call:
        checker = self._judge.checker
        contents = [text.encode("utf-8", "surrogatepass") for text in (test.stdin, output, test.expected)]
        room_mb = Limits().file_mb + (sum(map(len, contents)) >> 20)
        return Call(
            code=python_checker(checker.code) if checker.language == "python" else checker.code,
            language=checker.language,
            files={name: base64.b64encode(content).decode() for name, content in zip(CHECKER_FILES, contents, strict=True)},
            argv=CHECKER_FILES,
            limits=Limits(file_mb=room_mb),
            **self._fields,
        )


def _verdict_of_checker(result: Result) -> Verdict | None:
    """None if the checker neither accepted nor rejected the output."""
    if result.blame == "infra":
        return Verdict(0, "INFRA", message=f"the checker could not be run: {describe_end(result)}", retryable=result.retryable)
    if result.status == "cancelled":
        return Verdict(0, "SKIPPED", message="cancelled")
    if result.status in ("ok", "error") and result.exit_code in (0, 1):
        said = cut_middle((result.stdout or result.stderr).strip(), MESSAGE_CHARS)
        return Verdict(0, "WA" if result.exit_code else "AC", message=said)
    return None


def judgement_of(judge: Judge, verdicts: list[Verdict]) -> Judgement:
    failed = [verdict for verdict in verdicts if verdict.verdict != "AC"]
    unjudged = [verdict for verdict in verdicts if verdict.verdict == "INFRA"]
    # A test skipped after a failure is by design; any other skipped test was cancelled.
    cancelled = any(verdict.verdict == "SKIPPED" for verdict in (failed[:1] if judge.stop_on_fail else failed))
    passed = len(verdicts) - len(failed)
    return Judgement(
        verdict="INFRA" if unjudged else "SKIPPED" if cancelled else failed[0].verdict if failed else "AC",
        score=None if unjudged or cancelled else passed / len(verdicts),
        passed=passed,
        total=len(verdicts),
        tests=verdicts,
        id=judge.id,
        retryable=bool(unjudged) and all(verdict.retryable for verdict in unjudged),
    )


def slim(result: Result, index: int, id: str, output_chars: int) -> Result:
    """As one of many in an answer: output is cut; fetched files and fields that are the same in all results are left out."""
    result.index, result.id = index, id
    result.truncated = result.truncated or max(len(result.stdout), len(result.stderr)) > output_chars
    result.stdout = cut_middle(result.stdout, output_chars)
    result.stderr = cut_middle(result.stderr, output_chars)
    result.files = {}
    result.sandbox = Sandbox(result.sandbox.tier)
    result.request_id = result.traceparent = ""
    return result


def describe_end(result: Result) -> str:
    """One line on how a run ended."""
    match result.status:
        case "error":
            said = result.stderr.strip().rpartition("\n")[2]
            return cut_middle(said, MESSAGE_CHARS) or f"exit code {result.exit_code}"
        case "signal":
            return f"killed by signal {result.signal}"
        case "timeout":
            return f"timed out after {result.usage.wall_s:.1f} s"
        case "cpu_limit":
            return f"used {result.usage.cpu_s:.1f} s of CPU time"
        case "compile_error":
            return "does not compile"
        case _:
            return f"{result.status}: {result.error}" if result.error else result.status.replace("_", " ")
