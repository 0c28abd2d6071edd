"""How concurrent runs become requests."""

import asyncio

import msgspec
import pytest

from exec_client import AsyncClient, Call, InfraFailure, Result

from .conftest import QUICK, until
from .scripted_server import LOST, Act, Exchange, Gate, ScriptedServer, answer, line


async def test_single_run_leaves_at_once_as_batch_of_one(client: AsyncClient, server: ScriptedServer) -> None:
    result = await client.run("a", id="label")
    assert (result.status, result.stdout, result.id, result.index) == ("ok", "a", "label", 0)
    assert [request.codes for request in server.requests] == [["a"]]
    assert server.requests[0].headers["content-type"] == "application/json"


async def test_runs_of_one_turn_share_one_request(client: AsyncClient, server: ScriptedServer) -> None:
    results = await asyncio.gather(*(client.run(f"c{i}") for i in range(100)))
    assert [result.stdout for result in results] == [f"c{i}" for i in range(100)]
    assert [len(request.calls) for request in server.requests] == [100]


async def test_out_of_order_results_reach_their_callers(client: AsyncClient, server: ScriptedServer) -> None:
    async def backwards(exchange: Exchange) -> None:
        await exchange.start()
        for index in reversed(range(len(exchange.calls))):
            await exchange.result(index)
        await exchange.end()

    server.play(backwards)
    results = await asyncio.gather(*(client.run(f"c{i}", id=str(i)) for i in range(20)))
    assert [(result.stdout, result.id, result.index) for result in results] == [(f"c{i}", str(i), 0) for i in range(20)]


async def test_result_resolves_while_its_request_is_still_open(client: AsyncClient, server: ScriptedServer) -> None:
    async def one_then_silence(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.result(1)
        await exchange.disconnected()

    server.play(one_then_silence)
    slow, quick = (asyncio.create_task(client.run(code)) for code in ("slow", "quick"))
    assert (await quick).stdout == "quick"
    assert not slow.done()
    slow.cancel()


async def test_long_request_does_not_hold_later_runs(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(server.hold)
    slow = asyncio.create_task(client.run("slow"))
    await until(lambda: len(server.requests) == 1)
    assert (await client.run("later")).stdout == "later"
    assert not slow.done()
    assert len(server.connections) == 2
    slow.cancel()


async def test_connections_grow_to_the_limit_and_the_rest_leaves_when_one_ends(server: ScriptedServer) -> None:
    policy = msgspec.structs.replace(QUICK, connections=2, max_connections=5, grow_after_s=0.001)
    gates = [Gate() for _ in range(5)]
    server.play(*gates)
    async with AsyncClient(server.url, policy=policy) as client:
        runs = []
        for i in range(5):
            runs.append(asyncio.create_task(client.run(f"long{i}")))
            await until(lambda i=i: len(server.requests) == i + 1)
        late = [asyncio.create_task(client.run(f"late{i}")) for i in range(30)]
        await asyncio.sleep(0.05)
        assert len(server.requests) == 5
        gates[3].open()
        assert [result.stdout for result in await asyncio.gather(*late)] == [f"late{i}" for i in range(30)]
        assert [len(request.calls) for request in server.requests] == [1, 1, 1, 1, 1, 30]
        for gate in gates:
            gate.open()
        await asyncio.gather(*runs)
    assert server.most_open_requests == 5


async def test_thousands_of_runs_need_few_connections(client: AsyncClient, server: ScriptedServer) -> None:
    results = await asyncio.gather(*(client.run(f"c{i}") for i in range(5000)))
    assert [result.stdout for result in results] == [f"c{i}" for i in range(5000)]
    assert len(server.connections) <= 20  # 5000 / 256
    assert max(len(request.calls) for request in server.requests) <= 256
    assert len({key for request in server.requests for key in request.keys}) == 5000


async def test_requests_grow_when_connections_run_out(server: ScriptedServer) -> None:
    policy = msgspec.structs.replace(QUICK, connections=1, max_connections=4)
    async with AsyncClient(server.url, policy=policy) as client:
        results = await client.run_many([f"c{i}" for i in range(4000)])
    assert [result.stdout for result in results] == [f"c{i}" for i in range(4000)]
    assert [len(request.calls) for request in server.requests] == [1000] * 4
    assert len(server.connections) <= 4


async def test_single_runs_one_after_another_reuse_connections(client: AsyncClient, server: ScriptedServer) -> None:
    for i in range(100):
        await client.run(f"c{i}")
    assert len(server.connections) <= 8  # a result is there before its request ended, so the next run may need another one


async def test_large_calls_leave_in_separate_requests(server: ScriptedServer) -> None:
    policy = msgspec.structs.replace(QUICK, max_request_bytes=10_000)
    async with AsyncClient(server.url, policy=policy) as client:
        await client.run_many(["#" * size for size in (4000, 4000, 4000, 20_000, 10)])
    assert sorted(len(request.calls) for request in server.requests) == [1, 1, 1, 2]


@pytest.mark.parametrize("stdout", ["a\u2028b\x85c\u2029", "a\r\nb\n", "\x00", "é🙂" * 100_000], ids=ascii)
async def test_output_with_odd_characters_arrives_whole(client: AsyncClient, server: ScriptedServer, stdout: str) -> None:
    server.play(answer(stdout=stdout))
    assert (await client.run("odd")).stdout == stdout


async def test_lines_may_come_in_pieces_with_blank_ones_between(client: AsyncClient, server: ScriptedServer) -> None:
    async def dribble(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.write(b"\n\r\n")
        text = line(Result("ok", index=1, stdout="second")) + b"\n" + line(Result("ok", stdout="first")).rstrip()
        for byte in text:
            await exchange.write(bytes([byte]))
        await exchange.end()

    server.play(dribble)
    first, second = await client.run_many(["a", "b"])
    assert (first.stdout, second.stdout) == ("first", "second")


async def test_unknown_fields_are_ignored(client: AsyncClient, server: ScriptedServer) -> None:
    async def newer_service(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.write(b'{"status": "ok", "mood": {"x": [1]}, "usage": {"watts": 3}}\n')
        await exchange.end()

    server.play(newer_service)
    assert (await client.run("x")).ok


async def test_first_of_two_results_for_one_call_wins(client: AsyncClient, server: ScriptedServer) -> None:
    async def twice(exchange: Exchange) -> None:
        await exchange.start()
        for stdout in ("first", "second"):
            await exchange.result(0, stdout=stdout)
        await exchange.result(1)
        await exchange.end()

    server.play(twice)
    results = await client.run_many(["a", "b"])
    assert [result.stdout for result in results] == ["first", "b"]
    assert len(server.requests) == 1


async def test_fields_are_put_over_a_call_and_bytes_become_base64(client: AsyncClient, server: ScriptedServer) -> None:
    await client.run(Call("x", id="old", language="cpp"), id="new", files={"a.bin": b"\x00\xff", "b": "AAA="})
    (call,) = server.requests[0].calls
    assert (call.id, call.language, call.files) == ("new", "cpp", {"a.bin": "AP8=", "b": "AAA="})


async def test_changing_a_dict_after_run_does_not_change_the_call(client: AsyncClient, server: ScriptedServer) -> None:
    env = {"A": "1"}
    run = asyncio.create_task(client.run("x", env=env))
    await asyncio.sleep(0)
    env["A"] = "2"
    await run
    assert server.requests[0].calls[0].env == {"A": "1"}


async def test_as_completed_yields_in_order_of_arrival_with_the_users_index(
    client: AsyncClient, server: ScriptedServer
) -> None:
    async def backwards(exchange: Exchange) -> None:
        await exchange.start()
        for index in (2, 0, 1):
            await exchange.result(index)
        await exchange.end()

    server.play(backwards)
    assert [result.index async for result in client.as_completed(["a", "b", "c"])] == [2, 0, 1]


async def test_cancelled_run_gives_its_request_up(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(server.hold)
    run = asyncio.create_task(client.run("slow"))
    await until(lambda: len(server.requests) == 1)
    run.cancel()
    assert await asyncio.to_thread(server.given_up.acquire, timeout=30)
    assert (await client.run("next")).stdout == "next"


async def test_cancelled_run_leaves_others_of_its_request_alone(client: AsyncClient, server: ScriptedServer) -> None:
    async def slow(exchange: Exchange) -> None:
        await exchange.start()
        await asyncio.sleep(0.1)
        for index in range(2):
            await exchange.result(index)
        await exchange.end()

    server.play(slow)
    gone, stays = (asyncio.create_task(client.run(code)) for code in ("gone", "stays"))
    await until(lambda: len(server.requests) == 1)
    gone.cancel()
    assert (await stays).stdout == "stays"
    assert len(server.requests) == 1


async def test_as_completed_closed_early_gives_up_the_rest(client: AsyncClient, server: ScriptedServer) -> None:
    async def one_then_hold(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.result(0)
        await exchange.disconnected()
        server.given_up.release()

    server.play(one_then_hold)
    arrivals = client.as_completed(["a", "b"])
    assert (await anext(arrivals)).index == 0
    await arrivals.aclose()
    assert await asyncio.to_thread(server.given_up.acquire, timeout=30)


async def test_nothing_to_run_gives_nothing(client: AsyncClient) -> None:
    assert await client.run_many([]) == []
    assert [result async for result in client.as_completed([])] == []


async def test_info_is_what_the_service_says(client: AsyncClient) -> None:
    info = await client.info()
    assert (info.version, info.tier, info.workers) == ("0", "none", 0)


def loses(lost: set[str]) -> Act:
    async def act(exchange: Exchange) -> None:
        await exchange.start()
        for index, call in enumerate(exchange.calls):
            await exchange.result(index, **(LOST if call.code in lost else {}))
        await exchange.end()

    return act


async def test_run_many_raises_the_first_failure_and_gives_up_the_rest(client: AsyncClient, server: ScriptedServer) -> None:
    async def lose_one_and_hold(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.result(1, **LOST | {"retryable": False})
        await exchange.disconnected()
        server.given_up.release()

    server.play(lose_one_and_hold)
    with pytest.raises(InfraFailure) as raised:
        await client.run_many(["a", "b", "c"])
    assert raised.value.index == 1
    assert await asyncio.to_thread(server.given_up.acquire, timeout=30)


async def test_run_many_puts_exceptions_in_the_place_of_results(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(ever_after=loses({"b", "d"}))
    outcomes = await client.run_many(["a", "b", "c", "d"], return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Result, InfraFailure, Result, InfraFailure]
    assert [outcome.index for outcome in outcomes] == [0, 1, 2, 3]
    assert outcomes[1] is not outcomes[3]


async def test_as_completed_yields_or_raises_failures(client: AsyncClient, server: ScriptedServer) -> None:
    server.play(ever_after=loses({"b"}))
    outcomes = {o.index: type(o) async for o in client.as_completed(["a", "b", "c"], return_exceptions=True)}
    assert outcomes == {0: Result, 1: InfraFailure, 2: Result}
    with pytest.raises(InfraFailure):
        async for _ in client.as_completed(["b"]):
            pass
