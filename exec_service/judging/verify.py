"""Verifies answers: compares them in the gateway, or runs Math-Verify in a sandboxed call.

Math-Verify gets the answer as data of a program of ours. An expression that it cannot finish costs only the time of its call.
"""

import time

import msgspec

from exec_service.dispatch.call_group import CallGroup
from exec_service.judging.answers import Extracted, NotComparable, as_latex, equal, extract
from exec_wire.messages.calls import Call, Limits, Result, Timings, cut_middle
from exec_wire.messages.judging import Verification, Verify

MATH_CHARS = 32_768  # at the end of a text, in which Math-Verify searches the answer
SHOWN_CHARS = 1000
MEMORY_MB = 1024
# Its own timeouts are signals, which do not interrupt C code; the sandbox's limit always holds. The lines that it prints tell
# how far it came.
PROGRAM = r"""
import json, logging, sys
from math_verify import parse, verify

logging.disable()
item = json.load(sys.stdin)
print("begun", flush=True)
truth = parse(item["truth"], parsing_timeout=None)
print("truth", flush=True)
equal = verify(truth, parse(item["answer"], parsing_timeout=None), timeout_seconds=None)
print(json.dumps({"equal": bool(equal), "found_truth": bool(truth)}))
"""


class Said(msgspec.Struct):
    """The last line of the program."""

    equal: bool
    found_truth: bool


_decode_said = msgspec.json.Decoder(Said).decode


def bytes_of(item: Verify) -> int:
    return len(PROGRAM) + min(len(item.answer), MATH_CHARS) + len(item.truth)


async def verify(item: Verify, index: int, group: CallGroup) -> Verification:
    began = time.monotonic()
    found = extract(item.answer, item.extract)
    if found is None:
        verification = Verification(False, error=f"the text has no {item.extract} answer")
    elif item.kind == "math":
        verification = from_result(await group.run(_call(item, found)))
    else:
        try:
            verification = Verification(equal(item, found.text))
        except NotComparable as error:
            verification = Verification(None, "rejected", "client", error=str(error))
    verification.id, verification.index = item.id, index
    verification.extracted = None if found is None else cut_middle(found.text, SHOWN_CHARS)
    verification.timings.total_ms = round((time.monotonic() - began) * 1000, 3)
    verification.request_id = group.origin.request_id
    return verification


def _call(item: Verify, found: Extracted) -> Call:
    answer, truth = found.text[-MATH_CHARS:], item.truth
    if item.extract != "none":  # else Math-Verify extracts both
        answer, truth = f"\\boxed{{{answer}}}" if found.boxed else as_latex(answer), as_latex(truth)
    return Call(
        code=PROGRAM,
        stdin=msgspec.json.encode({"answer": answer, "truth": truth}).decode(),
        limits=Limits(wall_s=item.wall_s, memory_mb=MEMORY_MB, output_kb=64, processes=16, file_mb=1),
        deadline_s=item.deadline_s,
        tags=item.tags,
        tenant=item.tenant,
        priority=item.priority,
    )


def from_result(result: Result) -> Verification:
    """Without a verdict, the blame depends on how far it came: the service, the caller's truth, or the model's answer."""
    timings = Timings(result.timings.queue_ms, result.timings.start_ms, result.timings.run_ms)
    made = Verification(None, result.status, result.blame, result.retryable, error=result.error, timings=timings)
    printed = result.stdout.splitlines()
    if result.blame in ("infra", "client"):
        return made
    if "begun" not in printed:
        made.status, made.blame = "internal_error", "infra"
        made.error = f"Math-Verify did not start: {result.stderr.strip()[-SHOWN_CHARS:] or result.status}"
    elif "truth" not in printed:
        made.blame, made.error = "client", f"the truth cannot be read: {result.status}"
    elif result.status != "ok":
        made.equal, made.blame = False, "model"
    else:
        said = _decode_said(printed[-1])
        made.equal = said.equal if said.found_truth else None
        if not said.found_truth:
            made.status, made.blame, made.error = "rejected", "client", "Math-Verify finds nothing in the truth"
    return made
