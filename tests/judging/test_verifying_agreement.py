"""Mixed answers through the whole service: the verdicts are those of Math-Verify run directly."""

import asyncio
from collections import Counter

import pytest
from judging_harness import Court
from math_verify_directly import Direct, directly
from mixed_answers import KINDS, Pair, mixed

from exec_wire import Verification

EVERY = len(KINDS)


async def check_agreement(here: Court, pairs: list[Pair]) -> None:
    texts = [(pair.answer, pair.truth) for pair in pairs]
    direct, untouched = await asyncio.gather(
        asyncio.to_thread(directly, texts), here.client.verify_many(texts, extract="none", wall_s=30, deadline_s=600)
    )
    same = [index for index, pair in enumerate(pairs) if pair.same_text]
    extracted = await here.client.verify_many([texts[index] for index in same], wall_s=30, deadline_s=600)
    differ = [
        f"none: {pairs[index]} {direct[index]} {got}" for index, got in enumerate(untouched) if not agrees(got, direct[index])
    ]
    differ += [
        f"auto: {pairs[index]} {direct[index]} {got}"
        for index, got in zip(same, extracted, strict=True)
        if not agrees(got, direct[index])
    ]
    print(f"{len(untouched) + len(extracted)} verifications of {len(pairs)} pairs, {len(differ)} differ")
    print(f"equal {sum(one.equal for one in direct)}; statuses {Counter(one.status for one in (*untouched, *extracted))}")
    assert differ == []
    assert 0.25 < sum(one.equal for one in direct) / len(direct) < 0.75


def agrees(got: Verification, direct: Direct) -> bool:
    """Where nothing is found in the truth, Math-Verify says "not equal"; the service says that the truth is no truth."""
    if not direct.found_truth:
        return (got.equal, got.status, got.blame) == (None, "rejected", "client")
    return (got.equal, got.status) == (direct.equal, "ok")


async def test_answers_of_every_kind_get_the_verdict_of_math_verify(here: Court) -> None:
    pairs = mixed(2 * EVERY)
    assert {pair.kind for pair in pairs} == set(KINDS)
    await check_agreement(here, pairs)


@pytest.mark.slow
async def test_a_thousand_mixed_answers_get_the_verdict_of_math_verify(here: Court) -> None:
    await check_agreement(here, mixed(1000))
