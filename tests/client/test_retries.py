"""Retries, errors, and calls that share a request but not its errors."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from exec_client import (
    AsyncClient,
    BadRequest,
    CallerError,
    Conflict,
    ConnectionFailed,
    DeadlineExceeded,
    ExecError,
    Forbidden,
    InfraFailure,
    Limits,
    NotReady,
    Overloaded,
    Policy,
    ProtocolError,
    Result,
    ServiceFailed,
    TooLarge,
    Unavailable,
)
from exec_wire import Call, Test
from loadtest.support.processes import free_port

from .conftest import QUICK, until
from .scripted_server import LOST, Act, Cut, Exchange, ScriptedServer, answer, answer_all, refuse


async def cut_before_answer(exchange: Exchange) -> None:
    raise Cut


async def cut_after_headers(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.write(b"\n")
    raise Cut


async def cut_after_two(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.result(0)
    await exchange.result(2)
    await exchange.write(b'{"status": "ok", "ind')
    raise Cut


async def test_infra_failure_says_status_reason_attempts_worker_and_request(
    client: AsyncClient, server: ScriptedServer
) -> None:
    lost = {**LOST, "worker": "w7", "request_id": "a1b2"}
    server.play(ever_after=answer(**lost))
    with pytest.raises(InfraFailure, match=r"worker_lost: the worker died \(\d+ attempts, worker w7, request a1b2\)") as raised:
        await client.run("x")
    assert raised.value.attempts == len(server.requests) > 1


# -- connections that break -------------------------------------------------------------------------------------------------


async def test_broken_stream_resends_only_the_unanswered_with_their_keys(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(cut_after_two)
    results = await client.run_many(["a", "b", "c", "d"])
    assert [result.stdout for result in results] == ["a", "b", "c", "d"]
    first, second = server.requests
    assert second.codes == ["b", "d"]
    assert second.keys == [first.keys[1], first.keys[3]]
    assert all(key for key in first.keys) and len(set(first.keys)) == 4


async def test_broken_before_the_answer_is_resent(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(cut_before_answer, cut_after_headers)
    assert (await client.run("a", idempotency_key="mine")).ok
    assert [request.keys for request in server.requests[-1:]] == [["mine"]]


async def test_always_breaking_connection_raises_after_max_attempts(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(ever_after=cut_after_headers)
    with pytest.raises(ConnectionFailed) as raised:
        await client.run("a")
    assert len(server.requests) == QUICK.max_attempts
    assert raised.value.__cause__ is not None


async def test_stream_that_ends_short_is_treated_as_broken(client: AsyncClient, server: ScriptedServer) -> None:
    async def one_missing(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.result(1)
        await exchange.end()

    server.play(one_missing)
    assert [result.stdout for result in await client.run_many(["a", "b"])] == ["a", "b"]
    assert [request.codes for request in server.requests] == [["a", "b"], ["a"]]


async def test_address_where_nobody_ever_answered_fails_after_max_attempts() -> None:
    async with AsyncClient(f"http://127.0.0.1:{free_port()}", policy=QUICK) as client:
        with pytest.raises(ConnectionFailed) as raised:
            await client.run("a", deadline_s=600)
        assert not raised.value.sent
        with pytest.raises(ConnectionFailed):
            await client.info()


async def test_known_service_that_restarts_is_waited_for_beyond_max_attempts() -> None:
    policy = msgspec.structs.replace(QUICK, max_attempts=2)
    with ScriptedServer() as server:
        port = server.port
        client = AsyncClient(server.url, policy=policy)
        assert (await client.run("before")).ok
    run = asyncio.create_task(client.run("during"))
    await asyncio.sleep(0.3)
    assert not run.done()
    with ScriptedServer(port):
        assert (await run).stdout == "during"
        await client.aclose()


async def test_known_service_that_stays_away_is_given_up_at_the_deadline() -> None:
    with ScriptedServer() as server:
        client = AsyncClient(server.url, policy=QUICK)
        assert (await client.run("before")).ok
    with pytest.raises(Unavailable):
        await client.run("after", deadline_s=0.3)
    await client.aclose()


# -- refused at the door ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["overloaded", "draining", "not_ready"])
async def test_refused_calls_are_sent_again_until_accepted(client: AsyncClient, server: ScriptedServer, code: str) -> None:
    server.play(*[refuse(code)] * (QUICK.max_attempts + 3))  # more than max_attempts: nothing was accepted, nothing counts
    assert (await client.run("a")).ok
    assert len(server.requests) == QUICK.max_attempts + 4
    assert len({key for request in server.requests for key in request.keys}) == 1


@pytest.mark.parametrize("told", [{"retry_after": "2"}, {"retry_after_s": 2}], ids=["header", "body"])
async def test_retry_after_is_honoured_by_every_call(
    client: AsyncClient, server: ScriptedServer, told: dict[str, object]
) -> None:
    server.play(refuse("overloaded", **told))
    refused = asyncio.create_task(client.run("refused"))
    await until(lambda: len(server.requests) == 1 and client._outbox._paused_until > 0)
    other = asyncio.create_task(client.run("other"))
    await asyncio.sleep(0.3)
    assert len(server.requests) == 1
    assert (await refused).ok and (await other).ok
    assert [request.codes for request in server.requests][1:] in ([["refused", "other"]], [["refused"], ["other"]])


@pytest.mark.parametrize(("code", "kind"), [("overloaded", Overloaded), ("not_ready", NotReady)])
async def test_refused_until_the_deadline_raises_the_reason(
    client: AsyncClient, server: ScriptedServer, code: str, kind: type[ExecError]
) -> None:
    server.play(ever_after=refuse(code))
    with pytest.raises(kind):
        await client.run("a", deadline_s=2)
    assert len(server.requests) > QUICK.max_attempts


async def test_retry_after_beyond_the_deadline_raises_at_once(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(refuse("overloaded", retry_after="3600"))
    async with asyncio.timeout(30):
        with pytest.raises(Overloaded) as raised:
            await client.run("a", deadline_s=60)
        assert raised.value.retry_after_s == 3600
        with pytest.raises(Overloaded):  # also without asking again
            await client.run("b", deadline_s=60)
    assert len(server.requests) == 1


async def test_request_larger_than_the_free_room_shrinks_until_it_fits(client: AsyncClient, server: ScriptedServer) -> None:
    async def room_for_ten(exchange: Exchange) -> None:
        await (answer_all(exchange) if len(exchange.calls) <= 10 else exchange.problem("overloaded"))

    server.play(ever_after=room_for_ten)
    results = await client.run_many([f"c{i}" for i in range(100)])
    assert [result.stdout for result in results] == [f"c{i}" for i in range(100)]


async def test_failing_service_is_tried_max_attempts_times(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(refuse("internal"))
    assert (await client.run("a")).ok
    server.play(ever_after=refuse("internal"))
    with pytest.raises(ServiceFailed, match="500 internal"):
        await client.run("a")
    assert len(server.requests) == QUICK.max_attempts


async def test_proxy_page_with_502_is_retried(client: AsyncClient, server: ScriptedServer) -> None:
    async def bad_gateway(exchange: Exchange) -> None:
        await exchange.start(502, "text/html")
        await exchange.write(b"<html>\xff Bad Gateway")
        await exchange.end()

    server.play(bad_gateway)
    assert (await client.run("a")).ok


# -- infra results ----------------------------------------------------------------------------------------------------------


async def test_infra_result_is_sent_again_with_the_same_key(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(answer(**LOST))
    assert (await client.run("a")).status == "ok"
    assert server.requests[0].keys == server.requests[1].keys


async def test_infra_for_ever_raises_with_the_last_result(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(ever_after=answer(**LOST))
    with pytest.raises(InfraFailure, match="worker_lost: the worker died") as raised:
        await client.run("a")
    assert raised.value.result is not None and raised.value.result.status == "worker_lost"
    assert len(server.requests) == QUICK.max_attempts


async def test_infra_that_is_not_retryable_raises_at_once(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(answer(**LOST | {"retryable": False}))
    with pytest.raises(InfraFailure):
        await client.run("a")
    assert len(server.requests) == 1


async def test_infra_result_does_not_delay_its_neighbours(client: AsyncClient, server: ScriptedServer) -> None:
    async def first_lost_rest_later(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.result(0, **LOST)
        await exchange.result(1)
        await exchange.disconnected()

    server.play(first_lost_rest_later)
    lost, fine, slow = (asyncio.create_task(client.run(code)) for code in ("lost", "fine", "slow"))
    assert (await fine).ok and (await lost).ok
    assert not slow.done()
    slow.cancel()


@pytest.mark.parametrize(
    ("status", "blame"),
    [("error", "model"), ("timeout", "model"), ("compile_error", "model"), ("cancelled", "client"), ("rejected", "client")],
)
async def test_what_model_or_caller_did_is_returned(
    client: AsyncClient, server: ScriptedServer, status: str, blame: str
) -> None:
    server.play(answer(status=status, blame=blame))
    result = await client.run("a")
    assert (result.status, result.blame) == (status, blame)
    assert len(server.requests) == 1


async def test_timeout_that_the_machine_caused_is_never_returned(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(ever_after=answer(status="timeout", blame="infra", retryable=True))
    with pytest.raises(InfraFailure):
        await client.run("a")


# -- deadlines --------------------------------------------------------------------------------------------------------------


async def test_silent_service_raises_at_the_deadline_and_the_request_is_given_up(
    client: AsyncClient, server: ScriptedServer
) -> None:
    server.play(server.hold)
    with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
        await client.run("a", deadline_s=0.2)
    assert await asyncio.to_thread(server.given_up.acquire, timeout=30)


async def test_deadline_of_one_call_leaves_its_neighbours_alone(client: AsyncClient, server: ScriptedServer) -> None:
    async def late(exchange: Exchange) -> None:
        await exchange.start()
        while not hasty.done():  # noqa: ASYNC110 - a task of the client
            await asyncio.sleep(0.01)
        await exchange.result(0)
        await exchange.result(1)
        await exchange.end()

    server.play(late)
    hasty, patient = (asyncio.create_task(client.run("a", deadline_s=deadline_s)) for deadline_s in (0.1, 30))
    with pytest.raises(DeadlineExceeded):
        await hasty
    assert (await patient).ok


async def test_what_is_sent_is_the_time_that_is_left(client: AsyncClient, server: ScriptedServer) -> None:
    async def lost_after_a_while(exchange: Exchange) -> None:
        await asyncio.sleep(0.3)
        await answer(**LOST)(exchange)

    server.play(lost_after_a_while)
    await client.run("a", deadline_s=20)
    first, second = (request.calls[0].deadline_s for request in server.requests)
    assert 19 < first <= 20
    assert second <= first - 0.3


@pytest.mark.parametrize("status", ["expired", "timeout", "worker_lost"])
async def test_infra_result_at_the_deadline_raises_deadline_exceeded(server: ScriptedServer, status: str) -> None:
    async def expire(exchange: Exchange) -> None:
        await asyncio.sleep(exchange.calls[0].deadline_s)
        await answer(status=status, blame="infra", retryable=True)(exchange)

    server.play(ever_after=expire)
    async with AsyncClient(server.url, policy=Policy(grace_s=60)) as client:
        with pytest.raises(DeadlineExceeded) as raised:
            await client.run("a", deadline_s=1)
    assert raised.value.result is not None and raised.value.result.status == status


async def test_deadline_after_a_failed_attempt_carries_what_happened(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(answer(**LOST), server.hold)
    with pytest.raises(DeadlineExceeded) as raised:
        await client.run("a", deadline_s=2)
    assert raised.value.result is not None and raised.value.result.status == "worker_lost"
    assert isinstance(raised.value.__cause__, InfraFailure)


# -- callers' mistakes ------------------------------------------------------------------------------------------------------


def refuses(bad: set[str], code: str = "unknown_language", *, name_it: bool = True) -> Act:
    """A service that refuses a request which holds one of the `bad` programs, and says which if `name_it`."""

    async def act(exchange: Exchange) -> None:
        found = [index for index, call in enumerate(exchange.calls) if call.code in bad]
        if not found:
            return await answer_all(exchange)
        await exchange.problem(code, field=f"$.calls[{found[0]}].language" if name_it else "")

    return act


@pytest.mark.parametrize("name_it", [True, False], ids=["named", "unnamed"])
async def test_bad_call_fails_alone_and_strangers_succeed(client: AsyncClient, server: ScriptedServer, name_it: bool) -> None:
    bad = {"c3", "c7", "c8", "c29"}
    server.play(ever_after=refuses(bad, name_it=name_it))
    outcomes = await asyncio.gather(*(client.run(f"c{i}") for i in range(30)), return_exceptions=True)
    for i, outcome in enumerate(outcomes):
        if f"c{i}" in bad:
            assert isinstance(outcome, BadRequest)
            assert (outcome.code, outcome.status) == ("unknown_language", 422)
            assert outcome.field == ("$.language" if name_it else "")
        else:
            assert isinstance(outcome, Result) and outcome.stdout == f"c{i}"


async def test_bad_call_is_not_sent_again(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(ever_after=refuses({"bad"}))
    with pytest.raises(BadRequest):
        await client.run("bad")
    assert len(server.requests) == 1


async def test_key_used_with_another_payload_is_a_conflict(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(refuse("idempotency_conflict", field="$.calls[0].idempotency_key"))
    with pytest.raises(Conflict) as raised:
        await client.run("a", idempotency_key="used")
    assert raised.value.field == "$.idempotency_key"


@pytest.mark.parametrize(("code", "kind"), [("foreign_origin", Forbidden), ("not_found", CallerError)])
async def test_refusal_of_the_caller_fails_all_at_once(
    client: AsyncClient, server: ScriptedServer, code: str, kind: type[ExecError]
) -> None:
    server.play(ever_after=refuse(code))
    outcomes = await client.run_many(["a", "b", "c"], return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [kind] * 3
    assert [outcome.index for outcome in outcomes] == [0, 1, 2]
    assert len(server.requests) == 1


@pytest.mark.parametrize("code", ["body_too_large", "too_many_calls"])
async def test_too_large_request_is_split(client: AsyncClient, server: ScriptedServer, code: str) -> None:
    async def at_most_three(exchange: Exchange) -> None:
        await (answer_all(exchange) if len(exchange.calls) <= 3 else exchange.problem(code))

    server.play(ever_after=at_most_three)
    results = await client.run_many([f"c{i}" for i in range(20)])
    assert [result.stdout for result in results] == [f"c{i}" for i in range(20)]


async def test_call_too_large_by_itself_is_raised(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(ever_after=refuses({"huge"}, "body_too_large", name_it=False))
    outcomes = await client.run_many(["a", "huge", "b"], return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Result, TooLarge, Result]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"limits": Limits(wall_s=-1)}, "$.limits.wall_s"),
        ({"deadline_s": 1e9}, "$.deadline_s"),
        ({"stdin": "lone \ud800 surrogate"}, "$.stdin"),
        ({"env": {"A": object()}}, "$.env"),
        ({"priority": "urgent"}, "$.priority"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_wrong_field_is_found_before_anything_is_sent(
    client: AsyncClient, server: ScriptedServer, fields: dict[str, object], field: str
) -> None:
    with pytest.raises(BadRequest) as raised:
        await client.run("a", **fields)  # type: ignore[arg-type]
    assert (raised.value.field, raised.value.code, raised.value.status) == (field, "bad_field", 422)
    assert server.requests == []


async def test_wrong_call_among_many_raises_before_or_stands_in_its_place(client: AsyncClient, server: ScriptedServer) -> None:
    with pytest.raises(BadRequest) as raised:
        await client.run_many(["a", "\ud800", "b"])
    assert raised.value.index == 1 and server.requests == []
    outcomes = await client.run_many(["a", "\ud800", "b"], return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Result, BadRequest, Result]


async def test_something_that_is_no_call_is_a_type_error(client: AsyncClient) -> None:
    with pytest.raises(TypeError, match="not int"):
        await client.run(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a list of programs"):
        await client.run_many("print(1)")
    with pytest.raises(TypeError, match="unknown_field"):
        await client.run("a", unknown_field=1)  # type: ignore[call-arg]


async def test_an_unknown_argument_is_a_type_error_with_a_suggestion(client: AsyncClient, server: ScriptedServer) -> None:
    wrong: list[tuple[str, Callable[[], Awaitable[object]]]] = [
        ("stdn: .* did you mean stdin", lambda: client.run("a", stdn="x")),  # type: ignore[call-arg]
        (r"wall_s: .* did you mean limits=Limits\(wall_s", lambda: client.run("a", wall_s=1)),  # type: ignore[call-arg]
        ("limits.wall: .* did you mean wall_s", lambda: client.run("a", limits={"wall": 1})),  # type: ignore[typeddict-item]
        ("tag: .* did you mean tags", lambda: client.run_many([Call("a")], tag=1)),  # type: ignore[call-overload]
        ("checkr: .* did you mean checker", lambda: client.judge("a", [Test()], checkr=1)),  # type: ignore[call-arg]
        ("knd: .* did you mean kind", lambda: client.verify("a", "b", knd=1)),  # type: ignore[call-arg]
        ("ttl: .* did you mean ttl_s", lambda: client.session(ttl=1).start()),  # type: ignore[call-arg]
    ]
    for words, ask in wrong:
        with pytest.raises(TypeError, match=words) as raised:
            await ask()
        assert isinstance(raised.value, BadRequest) and raised.value.code == "bad_field"
    assert server.requests == []


# -- services that speak another language -----------------------------------------------------------------------------------


async def test_garbage_line_resends_the_unanswered(client: AsyncClient, server: ScriptedServer) -> None:
    async def garbage(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.result(0)
        await exchange.write(b"<garbage>\n")
        await exchange.result(1)
        await exchange.end()

    server.play(garbage)
    assert [result.stdout for result in await client.run_many(["a", "b"])] == ["a", "b"]
    assert [request.codes for request in server.requests] == [["a", "b"], ["b"]]


@pytest.mark.parametrize("text", [b"<garbage>\n", b'{"status": "ok", "index": 1}\n', b'{"status": "\xff"}\n'], ids=repr)
async def test_garbage_for_ever_raises_protocol_error(client: AsyncClient, server: ScriptedServer, text: bytes) -> None:
    async def garbage(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.write(text)
        await exchange.end()

    server.play(ever_after=garbage)
    with pytest.raises(ProtocolError):
        await client.run("a")
    assert len(server.requests) == QUICK.max_attempts


@pytest.mark.parametrize(("status", "content_type"), [(200, "text/html"), (302, "text/html")])
async def test_other_kind_of_service_raises_at_once(
    client: AsyncClient, server: ScriptedServer, status: int, content_type: str
) -> None:
    async def web_page(exchange: Exchange) -> None:
        await exchange.start(status, content_type, location="/elsewhere")
        await exchange.write(b"<html>")
        await exchange.end()

    server.play(ever_after=web_page)
    with pytest.raises(ProtocolError, match="is this the address"):
        await client.run("a")
    assert len(server.requests) == 1
