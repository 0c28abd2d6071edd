"""One service behind several addresses: calls go on while one of them is away."""

import asyncio
import pickle
from collections.abc import Iterator

import pytest

from exec_client import AsyncClient, Client, ConnectionFailed, Policy
from loadtest.support.processes import free_port

from .conftest import QUICK
from .scripted_server import Cut, Exchange, ScriptedServer, refuse


@pytest.fixture
def other() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def nobody() -> str:
    return f"http://127.0.0.1:{free_port()}"


async def test_requests_go_to_the_addresses_in_turn(server: ScriptedServer, other: ScriptedServer) -> None:
    async with AsyncClient(f"{server.url}, {other.url}", policy=QUICK) as client:
        for number in range(6):
            assert (await client.run(f"{number}")).stdout == f"{number}"
    assert [codes for exchange in server.requests for codes in exchange.codes] == ["0", "2", "4"]
    assert [codes for exchange in other.requests for codes in exchange.codes] == ["1", "3", "5"]


async def test_address_where_nobody_listens_costs_no_pause(server: ScriptedServer) -> None:
    slow = Policy(backoff_s=300, max_backoff_s=300)
    async with asyncio.timeout(30), AsyncClient(f"{nobody()},{server.url}", policy=slow) as client:
        for number in range(10):
            assert (await client.run(f"{number}", deadline_s=900)).stdout == f"{number}"


async def test_gateway_that_is_not_ready_is_passed_over_and_left_alone(
    server: ScriptedServer, other: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exec_client._transport.REST_S", 600.0)
    server.play(ever_after=refuse("draining", retry_after_s=300.0))
    async with AsyncClient(f"{server.url},{other.url}", policy=QUICK) as client:
        for number in range(6):
            assert (await client.run(f"{number}", deadline_s=60)).stdout == f"{number}"
    assert (len(server.requests), len(other.requests)) == (1, 6)


async def test_what_may_have_been_started_is_sent_to_the_other_with_the_same_key(
    server: ScriptedServer, other: ScriptedServer
) -> None:
    async def die(exchange: Exchange) -> None:
        raise Cut

    server.play(die)
    async with AsyncClient(f"{server.url},{other.url}", policy=QUICK) as client:
        assert (await client.run("a")).stdout == "a"
    assert [exchange.keys for exchange in server.requests] == [exchange.keys for exchange in other.requests]


async def test_all_away_is_a_failed_connection() -> None:
    async with AsyncClient(f"{nobody()},{nobody()}", policy=QUICK) as client:
        with pytest.raises(ConnectionFailed):
            await client.run("a", deadline_s=2)


def test_wrong_address_among_several_is_named_and_a_copy_keeps_all(server: ScriptedServer, other: ScriptedServer) -> None:
    with pytest.raises(ValueError, match="ftp://b"):
        Client("http://a,ftp://b")
    with pickle.loads(pickle.dumps(Client(f"{nobody()},{server.url}", policy=QUICK))) as client:
        assert client.run("a").stdout == "a"
