"""Judgements and verifications are sent again when that may help, and never answered twice."""

import asyncio

import pytest

from exec_client import AsyncClient, BadRequest, Judge, NotReady, Overloaded, Policy, ServiceFailed, Verify
from exec_client import Test as T
from exec_wire import Judgement, Verdict, Verification, encode_json

from .scripted_server import Exchange, ScriptedServer, decode_judge, decode_verify_batch, refuse

QUICK = Policy(backoff_s=0.01, max_backoff_s=0.02, calls_per_request=4)


async def accept_all(exchange: Exchange) -> None:
    if exchange.path == "/v1/judge":
        judge = decode_judge(exchange.body)
        count = len(judge.tests)
        return await exchange.json(Judgement("AC", 1.0, count, count, [Verdict(i, "AC") for i in range(count)], id=judge.id))
    await exchange.start()
    items = decode_verify_batch(exchange.body).items
    for index in reversed(range(len(items))):
        found = Verification(items[index].answer == items[index].truth, index=index, id=items[index].id)
        await exchange.write(encode_json(found) + b"\n")
    await exchange.end()


async def half(exchange: Exchange) -> None:
    """The first half of the answers; then the stream ends as if that were all."""
    await exchange.start()
    items = decode_verify_batch(exchange.body).items
    for index in range(len(items) // 2):
        await exchange.write(encode_json(Verification(True, index=index)) + b"\n")
    await exchange.end()


async def test_judge_is_sent_again_after_refusals_and_failures(server: ScriptedServer) -> None:
    server.play(refuse("overloaded", retry_after_s=0.01), refuse("draining"), refuse("internal"), ever_after=accept_all)
    async with AsyncClient(server.url, policy=QUICK) as client:
        judgement = await client.judge("code", [T("1", "1")], id="mine", deadline_s=20)
    assert (judgement.verdict, judgement.id, len(server.requests)) == ("AC", "mine", 4)
    left = [decode_judge(exchange.body).deadline_s for exchange in server.requests]
    assert left == sorted(left, reverse=True) and left[-1] < 20


async def test_judge_without_a_score_is_an_answer_and_not_sent_again(server: ScriptedServer) -> None:
    async def infra(exchange: Exchange) -> None:
        await exchange.json(Judgement("INFRA", None, 0, 1, [Verdict(0, "INFRA", retryable=True)], retryable=True))

    server.play(infra)
    async with AsyncClient(server.url, policy=QUICK) as client:
        judgement = await client.judge(Judge("code", [T()]))
    assert (judgement.score, judgement.retryable, len(server.requests)) == (None, True, 1)


@pytest.mark.parametrize(
    ("code", "kind"),
    [("overloaded", Overloaded), ("not_ready", NotReady), ("internal", ServiceFailed), ("bad_field", BadRequest)],
)
async def test_last_reason_is_raised(server: ScriptedServer, code: str, kind: type[Exception]) -> None:
    server.play(ever_after=refuse(code))
    async with AsyncClient(server.url, policy=QUICK) as client:
        with pytest.raises(kind):
            await client.judge("code", [T()], deadline_s=0.3)
        with pytest.raises(kind):
            await client.verify("1", "1", deadline_s=0.3)
    if code == "bad_field":
        assert len(server.requests) == 2


async def test_wrong_fields_are_found_before_anything_is_sent(server: ScriptedServer) -> None:
    async with AsyncClient(server.url, policy=QUICK) as client:
        for wrong in (
            client.judge("code", []),
            client.judge("code", [T()], deadline_s=-1),
            client.judge("code", [T(stdin=5)]),  # type: ignore[arg-type]
            client.verify("1", "1", kind="vibes"),
            client.verify("\ud800", "1"),
            client.verify_many([("1", "1"), ("1", 2)]),  # type: ignore[list-item]
        ):
            with pytest.raises(BadRequest):
                await wrong
    assert server.requests == []


async def test_verifications_come_in_the_order_of_the_items(server: ScriptedServer) -> None:
    server.play(ever_after=accept_all)
    items = [Verify(str(n), "7", id=f"n{n}") for n in range(11)]
    async with AsyncClient(server.url, policy=QUICK) as client:
        found = await client.verify_many(items, kind="exact")
        assert await client.verify_many([]) == []
    assert [(one.id, one.index, one.equal) for one in found] == [(f"n{n}", n, n == 7) for n in range(11)]
    assert sorted(len(decode_verify_batch(exchange.body).items) for exchange in server.requests) == [3, 4, 4]
    assert all(item.kind == "exact" for exchange in server.requests for item in decode_verify_batch(exchange.body).items)


async def test_items_that_could_not_be_sent_in_time_are_expired_and_the_others_kept(server: ScriptedServer) -> None:
    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(2)
        await accept_all(exchange)

    server.play(ever_after=slow)
    policy = Policy(connections=1, calls_per_request=1)
    async with AsyncClient(server.url, policy=policy) as client:
        found = await client.verify_many([("1", "1")] * 4, deadline_s=3)
    assert [one.equal for one in found] == [True, True, None, None]
    assert (found[3].status, found[3].blame, found[3].retryable, found[3].index) == ("expired", "infra", True, 3)


async def test_only_what_is_unanswered_is_verified_again(server: ScriptedServer) -> None:
    server.play(half, half, ever_after=accept_all)
    async with AsyncClient(server.url, policy=QUICK) as client:
        found = await client.verify_many([("1", "1")] * 4)
    assert [one.equal for one in found] == [True] * 4 and [one.index for one in found] == [0, 1, 2, 3]
    assert [len(decode_verify_batch(exchange.body).items) for exchange in server.requests] == [4, 2, 1]
