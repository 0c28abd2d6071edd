"""Judgements and verifications: from what a user hands in to what comes back.

Each is a request of its own, or a part of one, and has no effect but its answer; so whatever fails on the way is sent again
within the deadline.
"""

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from exec_client._calls import CommonFields, ProgramFields, checked, known
from exec_client._retry import Policy, send_until_answered
from exec_client._transport import Transport
from exec_client.errors import ConnectionFailed, DeadlineExceeded, ProtocolError
from exec_wire import Checker, Judge, Judgement, Test, Verification, Verify
from exec_wire.messages.unknown_fields import Reader

_JUDGE, _VERIFY = Reader(Judge), Reader(Verify)


class JudgeFields(ProgramFields, total=False):
    """The fields of `exec_wire.Judge` as keywords of `judge`; a test compares the two."""

    function: str
    checker: Checker
    stop_on_fail: bool
    output_chars: int


class VerifyFields(CommonFields, total=False):
    """The fields of `exec_wire.Verify` as keywords of `verify` and `verify_many`; a test compares the two."""

    kind: str
    extract: str
    wall_s: float
    abs_tol: float | None
    rel_tol: float | None


def make_judge(judge: Judge | str, tests: Iterable[Test] | None, fields: JudgeFields) -> Judge:
    changes: dict[str, object] = dict(known(fields, Judge))
    if tests is not None:
        changes["tests"] = list(tests)
    if isinstance(judge, str):
        changes.setdefault("tests", [])
        judge = Judge(judge, **changes)  # type: ignore[arg-type]
    else:
        judge = msgspec.structs.replace(judge, **changes)
    return checked(judge, _JUDGE)[0]


def make_verify(item: Verify | tuple[str, str], fields: VerifyFields) -> tuple[Verify, int]:
    """The item with `fields` put over it, and its size in bytes."""
    known(fields, Verify)
    made = Verify(*item, **fields) if isinstance(item, tuple) else msgspec.structs.replace(item, **fields)  # type: ignore[arg-type]
    return checked(made, _VERIFY)


async def judge(transport: Transport, policy: Policy, asked: Judge) -> Judgement:
    async def send(left_s: float) -> Judgement:
        return await transport.judge(msgspec.structs.replace(asked, deadline_s=left_s), left_s + policy.grace_s)

    return await send_until_answered(send, policy, asked.deadline_s)


async def verify_all(transport: Transport, policy: Policy, items: Sequence[tuple[Verify, int]]) -> list[Verification]:
    """In the order of `items`. Several requests, some at a time; what a broken one left unanswered is sent again.

    An item whose time is over before it could be sent is `expired`, so that the others are not lost with it.
    """
    answers: dict[int, Verification] = {}
    clock = asyncio.get_running_loop().time
    began = clock()
    free = asyncio.Semaphore(policy.connections)

    async def ask(indexes: list[int]) -> None:
        async def send(left_s: float) -> None:
            open_ = [index for index in indexes if index not in answers]
            asked = [_with_time_left(items[index][0], left_s) for index in open_]
            async for answer in transport.verify(asked, left_s + policy.grace_s):
                if not 0 <= answer.index < len(open_):
                    raise ProtocolError(f"a verification of item {answer.index} of {len(open_)}", retryable=True)
                place = open_[answer.index]
                answer.index = place
                answers.setdefault(place, answer)
            if missing := sum(index not in answers for index in open_):
                raise ConnectionFailed(f"the answer ended {missing} verifications short of {len(open_)}")

        async with free:
            deadline_s = max(items[index][0].deadline_s for index in indexes)
            try:
                await send_until_answered(send, policy, deadline_s - (clock() - began))
            except DeadlineExceeded as error:
                for index in indexes:
                    answers.setdefault(index, _expired(items[index][0], index, str(error)))

    tasks = [asyncio.create_task(ask(part)) for part in _requests(items, policy)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [answers[index] for index in range(len(items))]


def _expired(item: Verify, index: int, why: str) -> Verification:
    return Verification(None, "expired", "infra", retryable=True, id=item.id, index=index, error=why)


def _with_time_left(item: Verify, left_s: float) -> Verify:
    return msgspec.structs.replace(item, deadline_s=left_s) if left_s < item.deadline_s else item


def _requests(items: Sequence[tuple[Verify, int]], policy: Policy) -> list[list[int]]:
    parts: list[list[int]] = []
    bytes_ = 0
    for index, (_, size) in enumerate(items):
        full = parts and (len(parts[-1]) >= policy.calls_per_request or bytes_ + size > policy.max_request_bytes)
        if not parts or full:
            parts.append([])
            bytes_ = 0
        parts[-1].append(index)
        bytes_ += size
    return parts
