"""A burst is accepted whole before it is served, over both transports, and its parts add up."""

from __future__ import annotations

import pytest

from loadtest import burst
from loadtest.burst import orders, too_many
from loadtest.redis_server import NoServer, find_server

CALLS = 300


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_all_calls_are_in_flight_at_once_and_each_gets_its_result(transport: str) -> None:
    try:
        find_server()
    except NoServer as error:
        pytest.skip(str(error))
    one = burst.burst(CALLS, transport=transport, sandboxed=False, processes=2, batch=100)
    assert (one.in_flight, one.books.right, one.books.answered) == (CALLS, CALLS, CALLS)
    assert {"load", "gateway", "redis", "workers"} <= one.cpu_ms.keys()
    assert {"load 1", "load 2", "worker 1"} <= one.bytes_of.keys()


def test_parts_of_a_burst_add_up_and_belong_to_one_tenant() -> None:
    made = orders("http://x", 10, 3, 4, sandboxed=False)
    assert [order.calls for order in made] == [4, 3, 3]
    assert {order.tenant for order in made} == {"first"} and len({order.name for order in made}) == 3


def test_more_connections_than_descriptors_are_refused_with_a_way_out() -> None:
    assert too_many(45_000, 1500, "http") == "" == too_many(10**9, 1, "grpc")
    assert "--batch" in too_many(10**9, 1, "http")
