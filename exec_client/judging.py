"""Judgements and verifications: from what a user hands in to what comes back.

Each is a request of its own, or a part of one, and has no effect but its answer; so whatever fails on the way is sent again
within the deadline.
"""

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from exec_client._calls import CommonFields, ProgramFields, make
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
    if isinstance(judge, str):
        return make(_JUDGE, (judge,), {**fields, "tests": list(tests or ())})[0]
    return make(_JUDGE, judge, fields if tests is None else {**fields, "tests": list(tests)})[0]


async def judge(transport: Transport, policy: Policy, asked: Judge) -> Judgement:
    async def send(left_s: float) -> Judgement:
        return await transport.judge(msgspec.structs.replace(asked, deadline_s=left_s), left_s + policy.grace_s)

    return await send_until_answered(send, policy, asked.deadline_s)


async def verify_all(
    transport: Transport, policy: Policy, given: Iterable[Verify | tuple[str, str]], fields: VerifyFields
) -> list[Verification]:
    """In the order of `given`. Several requests, some at a time; what a broken one left unanswered is sent again.

    An item whose time is over before it could be sent is `expired`, so that the others are not lost with it.
    """
    items = [make(_VERIFY, item, fields) for item in given]
    answers: dict[int, Verification] = {}
    clock = asyncio.get_running_loop().time
    began = clock()
    free = asyncio.Semaphore(policy.connections)

    async def ask(indexes: list[int]) -> None:
        async def send(left_s: float) -> None:
            open_ = [index for index in indexes if index not in answers]
            given = [items[index][0] for index in open_]
            asked = [msgspec.structs.replace(item, deadline_s=min(item.deadline_s, left_s)) for item in given]
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
                late = Verification(None, "expired", "infra", retryable=True, error=str(error))
                for index in indexes:
                    answers.setdefault(index, msgspec.structs.replace(late, id=items[index][0].id, index=index))

    tasks = [asyncio.create_task(ask(part)) for part in _requests(items, policy)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [answers[index] for index in range(len(items))]


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
