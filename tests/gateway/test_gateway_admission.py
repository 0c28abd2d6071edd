"""Bounded by calls and bytes, all or nothing, with an honest hint when to come again."""

import math

import pytest
from gateway_harness import Service, lines, problem, running, soon, until

from exec_service.dispatch.admission import Admission, InFlight
from exec_service.refusals import Overloaded


def held(count: int, **fields: object) -> list[dict[str, object]]:
    return [{"code": "hold", **fields} for _ in range(count)]


async def test_calls_beyond_the_limit_are_429_and_nothing_is_accepted_half() -> None:
    async with running(max_calls=4, max_calls_per_request=4) as service:
        first = soon(service.batch(*held(3)))
        await until(lambda: service.gateway.dispatch.admission.calls == 3)
        refused = await service.batch(*held(2))
        body = problem(refused, 429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after"]) == math.ceil(body["retry_after_s"])
        assert service.gateway.dispatch.admission.calls == 3
        assert await service.metric("exec_rejected_total", reason="overloaded") == 1

        last = soon(service.batch(*held(1)))
        await until(lambda: service.gateway.dispatch.admission.calls == 4)
        service.worker.let_go.set()
        assert len(lines(await first)) == 3 and len(lines(await last)) == 1
        assert len(service.worker.jobs) == 4


async def test_bulk_never_has_the_last_place_at_the_workers() -> None:
    async with running(slots=4) as service:
        dispatch = service.gateway.dispatch
        bulk = soon(service.batch(*held(20, priority="bulk")))
        await until(lambda: dispatch.admission.calls == 20 and len(dispatch.released) == 4)
        train = soon(service.run("say now"))
        await until(lambda: len(dispatch.released) == 5)
        service.worker.let_go.set()
        assert (await train).json()["stdout"] == "now" and len(lines(await bulk)) == 20
        assert service.worker.codes[4] == "say now"


async def test_bytes_beyond_the_limit_are_429() -> None:
    async with running(max_bytes=10_000, max_body_bytes=10_000) as service:
        first = soon(service.run("hold " + "x" * 6000))
        await until(lambda: service.gateway.dispatch.admission.calls == 1)
        problem(await service.run("say " + "x" * 6000), 429, "overloaded")
        assert (await service.run("say small")).status_code == 200
        service.worker.let_go.set()
        assert (await first).status_code == 200


async def test_everything_is_given_back_when_results_are_delivered(service: Service) -> None:
    await service.batch(*({"code": f"say {'x' * 1000}"} for _ in range(100)))
    await service.batch({"code": "say a"}, {"code": "lose"}, {"code": "garbage"}, stream="false")
    await service.run("say b", idempotency_key="k")
    await service.run("say b", idempotency_key="k")
    admission = service.gateway.dispatch.admission
    await until(lambda: (admission.calls, admission.bytes) == (0, 0))
    assert not service.gateway.dispatch.released and not len(service.gateway.dispatch.table.deadlines)


async def test_results_that_nobody_reads_count_against_admission() -> None:
    async with running(slots=16) as service:
        dispatch = service.gateway.dispatch
        body = {"calls": [{"code": "say " + "x" * 1_000_000} for _ in range(30)]}
        async with service.client.stream("POST", "/v1/batch", json=body):
            # Not read: what has landed and does not fit into the sockets stays charged.
            await until(lambda: len(service.worker.jobs) == 30 and not dispatch.released)
            assert dispatch.admission.calls > 0
            assert dispatch.admission.bytes > 1_000_000
        await until(lambda: (dispatch.admission.calls, dispatch.admission.bytes) == (0, 0))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_retry_after_is_what_the_pace_of_the_last_seconds_promises() -> None:
    clock = Clock()
    admission = Admission(max_calls=100, max_bytes=1000, retry_after_max_s=60, clock=clock)
    admission.charge(100, 100)
    with pytest.raises(Overloaded) as nothing_moves:
        admission.check(1)
    assert nothing_moves.value.retry_after_s == 60

    for _ in range(10):
        clock.now += 1
        admission.give_back(2, 2)  # 2 calls a second
        admission.charge(2, 2)
    with pytest.raises(Overloaded) as calls:
        admission.check(20)
    assert calls.value.retry_after_s == pytest.approx(10, abs=2)
    with pytest.raises(Overloaded) as at_once:
        admission.check(1)
    assert at_once.value.retry_after_s == 1
    admission.give_back(50, 0)
    with pytest.raises(Overloaded) as bytes_:
        admission.check(1, 2000)
    assert bytes_.value.retry_after_s == 60  # 1100 bytes at 2 a second


def test_the_pace_forgets_what_is_long_past() -> None:
    clock = Clock()
    rate = InFlight(clock)
    clock.now += 5
    rate.give_back(50, 0)
    assert rate.per_s()[0] == pytest.approx(10)
    clock.now += 30
    assert rate.per_s() == (0, 0)
