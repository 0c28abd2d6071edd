"""`cancel`: what is selected, what is not sent again, and that whoever waits gets a result."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from exec_client import AsyncClient, BadRequest, ClientClosed, Policy, ServiceFailed, Tags

from .conftest import QUICK, until
from .scripted_server import Cut, Exchange, Gate, ScriptedServer, answer, refuse

LOST = {"status": "worker_lost", "blame": "infra", "retryable": True}
MINE, OTHER = Tags(run="r", step=1), Tags(run="r", step=2)


async def test_cancel_sends_what_was_given_and_returns_the_count(client: AsyncClient, server: ScriptedServer) -> None:
    server.on_cancel = lambda: 3
    assert await client.cancel(run="a b&c", step=0, group="g", rollout="ü", tenant="t") == 3
    assert await client.cancel(group="g") == 3
    assert server.cancels == [
        {"run": "a b&c", "step": "0", "group": "g", "rollout": "ü", "tenant": "t"},
        {"group": "g"},
    ]


@pytest.mark.parametrize("given", [{}, {"tenant": "t"}, {"run": ""}, {"group": ""}, {"step": "7"}, {"run": "x" * 257}])
async def test_senseless_selection_is_bad_request_and_cancels_nothing(
    client: AsyncClient, server: ScriptedServer, given: dict[str, str]
) -> None:
    with pytest.raises(BadRequest) as raised:
        await client.cancel(**given)  # type: ignore[arg-type]
    assert (raised.value.code, raised.value.status) == ("bad_query", 422)
    assert server.cancels == []


async def test_cancelled_result_is_data_and_not_sent_again(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(answer(status="cancelled", blame="client"))
    result = await client.run("a")
    assert (result.status, result.blame, result.retryable) == ("cancelled", "client", False)
    assert len(server.requests) == 1


async def test_what_waits_for_a_pause_is_cancelled_here_and_now(server: ScriptedServer) -> None:
    server.play(refuse("overloaded", retry_after_s=50))
    async with AsyncClient(server.url) as client:
        mine = [asyncio.create_task(client.run("a", id=str(n), tags=MINE)) for n in range(2)]
        other = asyncio.create_task(client.run("b", tags=OTHER))
        await until(lambda: len(server.requests) == 1)
        await asyncio.sleep(1)  # the refusal has arrived
        assert await client.cancel(run="r", step=1) == 2
        results = await asyncio.wait_for(asyncio.gather(*mine), 30)
        assert [(result.status, result.blame, result.id) for result in results] == [
            ("cancelled", "client", "0"),
            ("cancelled", "client", "1"),
        ]
        assert not other.done()
    with pytest.raises(ClientClosed):
        await other


async def test_what_waits_for_its_next_attempt_is_cancelled_here_and_now(server: ScriptedServer) -> None:
    server.play(answer(**LOST))
    async with AsyncClient(server.url, policy=Policy(backoff_s=50, max_backoff_s=50)) as client:
        run = asyncio.create_task(client.run("a", tags=MINE))
        await until(lambda: len(server.requests) == 1)
        await asyncio.sleep(1)  # the answer has arrived
        assert await client.cancel(run="r") == 1
        assert (await asyncio.wait_for(run, 30)).status == "cancelled"


async def test_what_the_service_has_is_answered_by_the_service(client: AsyncClient, server: ScriptedServer) -> None:
    gate = Gate()
    server.play(gate)
    run = asyncio.create_task(client.run("a", tags=MINE))
    await until(lambda: len(server.requests) == 1)
    server.on_cancel = lambda: 1
    assert await client.cancel(run="r") == 1
    await asyncio.sleep(0.02)
    assert not run.done()
    gate.open()
    assert (await run).status == "ok"  # it had finished: the service's word counts


@pytest.mark.parametrize("way", ["lost", "broken", "overloaded", "not_ready", "bad_json"])
async def test_cancelled_call_is_not_sent_again_whatever_becomes_of_its_request(server: ScriptedServer, way: str) -> None:
    released = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def end(exchange: Exchange) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(released.wait(), loop))
        if way == "lost":
            await answer(**LOST)(exchange)
        elif way == "broken":
            await exchange.start()
            await exchange.write(b"\n")
            raise Cut
        else:
            await exchange.problem(way)

    server.play(end)
    async with AsyncClient(server.url, policy=QUICK) as client:
        mine = asyncio.create_task(client.run("mine", tags=MINE))
        other = asyncio.create_task(client.run("other", tags=OTHER))
        await until(lambda: len(server.requests) == 1)
        await client.cancel(step=1)
        released.set()
        assert (await mine).status == "cancelled"
        assert (await other).ok
    assert [request.codes for request in server.requests] == [["mine", "other"], ["other"]]


async def test_cancelled_call_that_was_refused_at_the_door_ends_without_the_pause(server: ScriptedServer) -> None:
    loop, released = asyncio.get_running_loop(), asyncio.Event()

    async def refuse_later(exchange: Exchange) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(released.wait(), loop))
        await exchange.problem("overloaded", retry_after_s=50)

    server.play(refuse_later)
    async with AsyncClient(server.url, policy=QUICK) as client:
        run = asyncio.create_task(client.run("a", tags=MINE))
        await until(lambda: len(server.requests) == 1)
        await client.cancel(run="r")
        released.set()
        assert (await asyncio.wait_for(run, 30)).status == "cancelled"


async def test_cancelled_call_that_is_never_answered_ends_cancelled_at_its_deadline(server: ScriptedServer) -> None:
    server.play(server.hold)
    async with AsyncClient(server.url, policy=QUICK) as client:
        run = asyncio.create_task(client.run("a", tags=MINE, deadline_s=0.3))
        await until(lambda: len(server.requests) == 1)
        await client.cancel(run="r")
        assert (await run).status == "cancelled"


async def test_cancel_is_asked_again_when_the_service_fails(client: AsyncClient, server: ScriptedServer) -> None:
    answers = iter([Cut(), Cut(), 5])

    def on_cancel() -> int:
        told = next(answers)
        if isinstance(told, Cut):
            raise told
        return told

    server.on_cancel = on_cancel
    assert await client.cancel(run="r") == 5
    assert len(server.cancels) == 3


async def test_cancel_that_always_fails_raises(server: ScriptedServer) -> None:
    def cut() -> int:
        raise Cut

    server.on_cancel = cut
    async with AsyncClient(server.url, policy=msgspec.structs.replace(QUICK, max_attempts=2)) as client:
        with pytest.raises(ServiceFailed):
            await client.cancel(run="r")
    assert len(server.cancels) == 2
