"""All calls of a burst are accepted before the first is served, over both transports."""

import pytest

from loadtest.load import burst
from loadtest.load.burst import orders
from loadtest.support.redis_server import NoServer, find_server

CALLS = 300


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_all_calls_are_in_flight_at_once_and_each_gets_its_result(transport: str) -> None:
    try:
        find_server()
    except NoServer as error:
        pytest.skip(str(error))
    one = burst.burst(CALLS, transport=transport, sandboxed=False, senders=2, batch=100)
    assert (one.in_flight, one.counts.right, one.counts.answered) == (CALLS, CALLS, CALLS)
    assert {"load", "gateway", "redis", "workers"} <= one.cpu_ms.keys()
    assert one.misses() == [] and burst.row(one)[:2] == [transport, "echo"]


def test_parts_of_a_burst_add_up_and_belong_to_one_tenant() -> None:
    made = orders("http://x", 10, 3, 4, sandboxed=False)
    assert [order.calls for order in made] == [4, 3, 3]
    assert {order.tenant for order in made} == {"first"} and len({order.name for order in made}) == 3
