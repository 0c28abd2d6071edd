"""`cancel`: what is selected, what is not sent again, and that whoever waits gets a result."""

import asyncio
import logging
import threading
from collections.abc import Callable

import msgspec
import pytest
from common import wait_until

from exec_client import AsyncClient, BadRequest, Client, ClientClosed, Policy, ServiceFailed, Tags

from .conftest import QUICK, until
from .scripted_server import Cut, Exchange, Gate, ScriptedServer, Unknown, answer, refuse

LOST = {"status": "worker_lost", "blame": "infra", "retryable": True}
MINE, OTHER = Tags(run="r", step=1), Tags(run="r", step=2)


def in_turn(*answers: int | Exception) -> Callable[[], int]:
    """A service that answers a cancel with one after the other."""
    left = iter(answers)

    def on_cancel() -> int:
        if isinstance(told := next(left), Exception):
            raise told
        return told

    return on_cancel


async def test_cancel_sends_what_was_given_and_returns_the_count(client: AsyncClient, server: ScriptedServer) -> None:
    server.on_cancel = lambda: 3
    assert await client.cancel(run="a b&c", step=0, group="g", rollout="ü", tenant="t") == 3
    assert await client.cancel(group="g") == 3
    assert server.cancels == [{"run": "a b&c", "step": "0", "group": "g", "rollout": "ü", "tenant": "t"}, {"group": "g"}]


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
    server.play(refuse("overloaded", retry_after_s=30))  # with its jitter still well before the deadline
    async with AsyncClient(server.url) as client:
        mine = [asyncio.create_task(client.run("a", id=str(n), tags=MINE)) for n in range(2)]
        other = asyncio.create_task(client.run("b", tags=OTHER))
        await until(lambda: len(server.requests) == 1 and len(client._outbox._waiting) == 3)  # the refusal has arrived
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
        await until(lambda: client._outbox is not None and any(ticket.attempts for ticket in client._outbox._tickets))
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
        await exchange.problem("overloaded", retry_after_s=30)

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
    server.on_cancel = in_turn(Cut(), Cut(), 5)
    assert await client.cancel(run="r") == 5
    assert len(server.cancels) == 3


async def test_cancel_that_always_fails_raises(server: ScriptedServer) -> None:
    server.on_cancel = in_turn(Cut(), Cut())
    async with AsyncClient(server.url, policy=msgspec.structs.replace(QUICK, max_attempts=2)) as client:
        with pytest.raises(ServiceFailed):
            await client.cancel(run="r")
    assert len(server.cancels) == 2


# -- single calls of a request --------------------------------------------------------------------------------------------


async def test_runs_that_are_cancelled_are_named_by_request_and_index_while_another_waits_for_the_request(
    client: AsyncClient, server: ScriptedServer
) -> None:
    gate = Gate()
    server.play(gate)
    runs = [asyncio.create_task(client.run(f"c{number}")) for number in range(6)]
    await until(lambda: len(server.requests) == 1)
    for run in runs[:5]:
        run.cancel()
    await until(lambda: len(server.cancelled_calls) == 5)
    request = server.requests[0].headers["x-request-id"]
    assert sorted(server.cancelled_calls) == [(request, index) for index in range(5)]
    assert len(server.cancels) == 1  # those of one turn together
    gate.open()
    assert (await runs[5]).stdout == "c5"


async def test_each_tenants_calls_are_cancelled_as_that_tenants(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(server.hold)
    runs = [asyncio.create_task(client.run("c", tenant=tenant)) for tenant in ("a", "b", "a", "b")]
    await until(lambda: len(server.requests) == 1)
    for run in runs[:3]:
        run.cancel()
    await until(lambda: len(server.cancelled_calls) == 3)
    assert sorted((query["tenant"], query["index"]) for query in server.cancels) == [("a", "2"), ("b", "1")]


async def test_many_cancelled_calls_are_named_in_queries_that_proxies_let_pass(server: ScriptedServer) -> None:
    server.play(server.hold)
    async with AsyncClient(server.url, policy=msgspec.structs.replace(QUICK, calls_per_request=1000)) as client:
        runs = [asyncio.create_task(client.run("c")) for _ in range(600)]
        await until(lambda: len(server.requests) == 1)
        for run in runs[1:]:
            run.cancel()
        await until(lambda: len(server.cancelled_calls) == 599)
        assert len(server.cancels) == 3


async def test_nothing_is_asked_when_all_users_of_a_request_left(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(server.hold)
    runs = [asyncio.create_task(client.run("c")) for _ in range(3)]
    await until(lambda: len(server.requests) == 1)
    for run in runs:
        run.cancel()
    assert await asyncio.to_thread(server.given_up.acquire, timeout=5)
    assert server.cancels == []


async def test_a_service_that_knows_no_such_cancel_is_told_by_the_end_of_the_request(
    client: AsyncClient, server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It refuses the query. When nobody waits for the rest of the request any more, the connection is closed."""

    answered = threading.Event()

    async def answer_the_last(exchange: Exchange) -> None:
        await exchange.start()
        await until(answered.is_set)
        await exchange.result(2)
        await exchange.disconnected()
        server.given_up.release()

    server.play(answer_the_last)
    server.on_cancel = in_turn(Unknown(), Unknown())
    with caplog.at_level(logging.WARNING, "exec_client"):
        runs = [asyncio.create_task(client.run(f"c{number}")) for number in range(3)]
        await until(lambda: len(server.requests) == 1)
        for count, run in enumerate(runs[:2], 1):
            run.cancel()
            await until(lambda count=count: len(server.cancels) == count)  # type: ignore[misc]
        await until(lambda: bool(caplog.records))
    answered.set()
    assert (await runs[2]).stdout == "c2"
    assert await asyncio.to_thread(server.given_up.acquire, timeout=5)
    assert len([record for record in caplog.records if record.name == "exec_client"]) == 1
    assert (await client.run("next")).stdout == "next"


async def test_a_cancel_that_fails_is_sent_again_while_the_request_is_open(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(server.hold)
    server.on_cancel = in_turn(Cut(), Cut(), 1)
    leaving, staying = (asyncio.create_task(client.run(code)) for code in ("a", "b"))
    await until(lambda: len(server.requests) == 1)
    leaving.cancel()
    await until(lambda: len(server.cancels) == 3)
    assert not staying.done()


async def test_a_call_that_was_on_its_way_when_it_was_cancelled_by_tags_is_named_by_request_and_index(
    client: AsyncClient, server: ScriptedServer
) -> None:
    """The service may not have had it when it looked at the tags; it remembers a request and an index."""
    server.play(server.hold)
    run = asyncio.create_task(client.run("a", tags=MINE))
    await until(lambda: len(server.requests) == 1)
    assert await client.cancel(run="r") == 0
    await until(lambda: server.cancelled_calls == [(server.requests[0].headers["x-request-id"], 0)])
    run.cancel()


async def test_a_cancel_by_tags_outlives_the_task_that_asked_for_it(server: ScriptedServer) -> None:
    server.on_cancel = in_turn(Cut(), 1)
    async with AsyncClient(server.url, policy=Policy(backoff_s=0.5)) as client:
        cancelling = asyncio.create_task(client.cancel(run="r"))
        await until(lambda: len(server.cancels) == 1)
        cancelling.cancel()
        await asyncio.wait({cancelling})
        assert cancelling.cancelled()
        await until(lambda: len(server.cancels) == 2)


async def test_closing_the_client_waits_for_a_cancel_on_its_way(server: ScriptedServer) -> None:
    server.on_cancel = in_turn(Cut(), 1)
    async with AsyncClient(server.url, policy=Policy(backoff_s=0.3)) as client:
        cancelling = asyncio.create_task(client.cancel(run="r"))
        await until(lambda: len(server.cancels) == 1)
        cancelling.cancel()
    assert len(server.cancels) == 2


async def test_requests_of_a_client_with_a_request_id_of_its_own_can_be_told_apart(server: ScriptedServer) -> None:
    async with AsyncClient(server.url, headers={"X-Request-Id": "job-7"}) as client:
        for _ in range(2):
            await client.run("a")
    ids = [request.headers["x-request-id"] for request in server.requests]
    assert len(set(ids)) == 2 and all(id.startswith("job-7/") and len(id) <= 128 for id in ids)


def test_leaving_the_sync_iteration_cancels_at_the_service_what_shares_a_request_with_others(server: ScriptedServer) -> None:
    first, rest = Gate(), threading.Event()

    async def quick_then_rest(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.result(exchange.codes.index("quick"))
        await until(rest.is_set)
        await exchange.result(exchange.codes.index("other"))
        await exchange.disconnected()

    server.play(first, quick_then_rest)
    with Client(server.url, policy=msgspec.structs.replace(QUICK, connections=1, max_connections=1)) as client:
        printed: list[str] = []
        threads = [
            threading.Thread(target=lambda code=code: printed.append(client.run(code).stdout)) for code in ("1", "other")
        ]  # type: ignore[misc]
        threads[0].start()
        wait_until(lambda: len(server.requests) == 1)
        threads[1].start()  # waits until the first request has ended, as do the two below
        opening = threading.Thread(target=lambda: (wait_until(lambda: waiting_in(client) == 3), first.open()))
        opening.start()
        arrivals = client.as_completed(["quick", "slow"])
        assert next(arrivals).stdout == "quick"
        arrivals.close()
        request = server.requests[1]
        wait_until(lambda: server.cancelled_calls == [(request.headers["x-request-id"], request.codes.index("slow"))])
        rest.set()
        for thread in (*threads, opening):
            thread.join()
    assert sorted(printed) == ["1", "other"]


def waiting_in(client: Client) -> int:
    assert client._thread is not None and client._thread._client._outbox is not None
    return len(client._thread._client._outbox._waiting)
