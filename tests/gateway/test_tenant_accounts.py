"""Limits of a tenant: at one gateway, and shared by several."""

from typing import Any

import pytest

from exec_service.refusals import Refusal
from exec_service.tenants.accounts import Account, Allowance
from exec_wire.queue import protocol as queue


def test_too_many_per_minute_are_refused_with_the_time_to_wait() -> None:
    now = [1000.0]
    account = Account("t", Allowance(calls_per_minute=10), clock=lambda: now[0])
    account.check(10)
    account.take_up(10)
    with pytest.raises(Refusal) as refused:
        account.check(2)
    assert refused.value.code == "rate_limited"
    wait_s = refused.value.retry_after_s or 0
    assert 12 <= wait_s <= 12.2
    now[0] += wait_s - 0.5
    with pytest.raises(Refusal):
        account.check(2)
    now[0] += 0.5
    account.check(2)


class Gateways:
    """The accounts of one tenant at several gateways that tell each other their use in `exchange`."""

    def __init__(self, count: int, **allowance: Any) -> None:
        self.now = 1000.0
        self.accounts = [Account("t", Allowance(**allowance), clock=lambda: self.now) for _ in range(count)]

    def exchange(self) -> None:
        uses = [account.use() for account in self.accounts]
        infos = [queue.GatewayInfo(str(n), tenants={} if use is None else {"t": use}) for n, use in enumerate(uses)]
        for n, account in enumerate(self.accounts):
            account.learn(infos[:n] + infos[n + 1 :])

    def take(self, gateway: int, calls: int = 1) -> int:
        """How many of them, sent one by one, are accepted."""
        for taken in range(calls):
            try:
                self.accounts[gateway].check(1)
            except Refusal:
                return taken
            self.accounts[gateway].take_up(1)
        return calls

    @property
    def in_flight(self) -> int:
        return sum(account.calls for account in self.accounts)


def test_calls_in_flight_at_one_gateway_count_at_all() -> None:
    gateways = Gateways(3, max_calls=12)
    assert gateways.take(0, 20) == 12, "one gateway may have all of it"
    gateways.exchange()
    assert gateways.take(1, 20) == 0
    gateways.accounts[0].give_back(5)
    gateways.exchange()
    assert gateways.take(1, 20) == 5
    gateways.exchange()
    assert gateways.take(2, 20) == 0
    gateways.accounts.pop(0)  # its gateway is gone
    gateways.exchange()
    assert gateways.in_flight == 5
    assert gateways.take(1, 20) == 6, "one is kept for the other, which had to refuse"


def test_a_gateway_that_has_all_calls_makes_room_for_one_that_had_to_refuse() -> None:
    gateways = Gateways(2, max_calls=10)
    gateways.take(0, 20)
    most = []
    for _ in range(20):  # seconds, in each of which three calls end at each gateway
        gateways.exchange()
        gateways.now += 1
        for n, account in enumerate(gateways.accounts):
            account.give_back(min(3, account.calls))
            gateways.take(n, 20)
        most.append(gateways.in_flight)
    assert [account.calls for account in gateways.accounts] == [5, 5]
    assert max(most) <= 10 + 3  # what ended since the others last heard of it was given out twice


def test_one_request_that_takes_the_whole_limit_is_accepted_when_nothing_is_in_flight() -> None:
    gateways = Gateways(2, max_calls=10, calls_per_minute=1000)
    gateways.take(0, 20)
    gateways.exchange()
    assert gateways.take(1) == 0
    gateways.accounts[0].give_back(10)
    gateways.exchange()
    for account in gateways.accounts:
        account.check(10)


@pytest.mark.parametrize("busy", [1, 2, 4])
def test_calls_per_minute_are_the_same_however_many_gateways_take_them(busy: int) -> None:
    gateways = Gateways(4, calls_per_minute=60)
    taken = 0
    for _ in range(600):
        for n in range(busy):
            accepted = gateways.take(n, 5)
            gateways.accounts[n].give_back(accepted)
            taken += accepted
        gateways.exchange()
        gateways.now += 1
    assert 600 <= taken <= 600 + 60 + 5 * busy  # ten minutes, what was saved up, what nobody had heard of yet
