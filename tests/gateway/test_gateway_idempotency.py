"""The same key runs once: it joins what runs and repeats what has finished, for its own tenant only."""

import asyncio
from typing import Any

import msgspec
import pytest
from gateway_harness import Service, lines, problem, running, soon, until

from exec_service.dispatch.idempotency import RECORD_OVERHEAD_BYTES, Idempotency, PayloadDiffers, Record
from exec_service.dispatch.tickets import Key, PendingJob


async def test_a_finished_call_is_repeated_from_its_record(service: Service) -> None:
    first = (await service.run("say x", idempotency_key="k", id="one")).json()
    again = (await service.run("say x", idempotency_key="k", id="two", deadline_s=5, tags={"step": 2})).json()
    assert (again["stdout"], again["id"], again["worker"]) == ("x", "two", "w1")
    assert again["request_id"] != first["request_id"]
    assert len(service.worker.jobs) == 1


async def test_the_programs_own_failure_is_recorded_too(service: Service) -> None:
    for _ in range(2):
        assert (await service.run("fail", idempotency_key="k")).json()["status"] == "error"
    assert len(service.worker.jobs) == 1


async def test_a_failure_of_ours_is_not_recorded(service: Service) -> None:
    for _ in range(2):
        assert (await service.run("lose", idempotency_key="k")).json()["status"] == "worker_lost"
    assert len(service.worker.jobs) == 2


async def test_the_same_key_joins_the_running_call(service: Service) -> None:
    first, second = (soon(service.run("hold", idempotency_key="k", id=name)) for name in ("a", "b"))
    await until(lambda: service.gateway.dispatch.admission.calls == 2)
    await until(lambda: len(service.worker.jobs) == 1)
    service.worker.let_go.set()
    assert [(await answering).json()["id"] for answering in (first, second)] == ["a", "b"]
    assert len(service.worker.jobs) == 1


async def test_the_same_key_twice_in_a_batch_runs_once(service: Service) -> None:
    response = await service.batch(*({"code": "say x", "idempotency_key": "k", "id": str(n)} for n in range(3)), stream="false")
    assert [(result["id"], result["index"], result["stdout"]) for result in response.json()["results"]] == [
        ("0", 0, "x"),
        ("1", 1, "x"),
        ("2", 2, "x"),
    ]
    assert len(service.worker.jobs) == 1


async def test_when_one_of_two_leaves_the_run_goes_on(service: Service) -> None:
    leaving = soon(service.run("hold", idempotency_key="k"))
    await until(lambda: len(service.worker.jobs) == 1)
    staying = soon(service.run("hold", idempotency_key="k"))
    await until(lambda: service.gateway.dispatch.admission.calls == 2)
    leaving.cancel()
    await until(lambda: service.gateway.dispatch.admission.calls == 1)
    service.worker.let_go.set()
    assert (await staying).json()["status"] == "ok"
    assert service.worker.cancelled == [] and len(service.worker.jobs) == 1


async def test_when_both_leave_the_run_is_cancelled_and_the_key_is_free(service: Service) -> None:
    leaving = [soon(service.run("hold", idempotency_key="k")) for _ in range(2)]
    await until(lambda: service.gateway.dispatch.admission.calls == 2 and len(service.worker.jobs) == 1)
    for task in leaving:
        task.cancel()
    await until(lambda: len(service.worker.cancelled) == 1)
    assert (await service.run("say other", idempotency_key="k")).json()["stdout"] == "other"


async def test_another_payload_with_the_key_is_422_while_running_and_after(service: Service) -> None:
    running_call = soon(service.run("hold", idempotency_key="k"))
    await until(lambda: len(service.worker.jobs) == 1)
    body = problem(await service.run("say other", idempotency_key="k"), 422, "idempotency_conflict")
    assert body["field"] == "$.idempotency_key"
    service.worker.let_go.set()
    await running_call
    problem(await service.run("say other", idempotency_key="k"), 422, "idempotency_conflict")
    response = await service.batch({"code": "say fine"}, {"code": "say other", "idempotency_key": "k"})
    assert problem(response, 422, "idempotency_conflict")["field"] == "$.calls[1].idempotency_key"
    assert service.worker.codes == ["hold"]


async def test_two_payloads_for_one_key_in_a_batch_are_422_and_none_is_run(service: Service) -> None:
    calls: list[dict[str, Any]] = [{"code": "say a", "idempotency_key": "k"}, {"code": "say b", "idempotency_key": "k"}]
    body = problem(await service.batch(*calls), 422, "idempotency_conflict")
    assert body["field"] == "$.calls[1].idempotency_key"
    assert (await service.run("say b", idempotency_key="k")).status_code == 200
    assert service.worker.codes == ["say b"]


@pytest.mark.parametrize("change", [{"stdin": "x"}, {"limits": {"wall_s": 3}}, {"env": {"A": "1"}}, {"priority": "bulk"}])
async def test_what_changes_the_run_changes_the_payload(service: Service, change: dict[str, Any]) -> None:
    await service.run("say x", idempotency_key="k")
    problem(await service.run("say x", idempotency_key="k", **change), 422, "idempotency_conflict")


async def test_the_order_of_files_does_not_change_the_payload(service: Service) -> None:
    await service.run("say x", idempotency_key="k", env={"A": "1", "B": "2"})
    assert (await service.run("say x", idempotency_key="k", env={"B": "2", "A": "1"})).status_code == 200
    assert len(service.worker.jobs) == 1


async def test_a_key_belongs_to_its_tenant(service: Service) -> None:
    await service.run("say a", idempotency_key="k", tenant="one")
    assert (await service.run("say b", idempotency_key="k", tenant="two")).json()["stdout"] == "b"


async def test_without_a_key_equal_calls_are_run_each(service: Service) -> None:
    assert len(lines(await service.batch({"code": "say x"}, {"code": "say x"}))) == 2
    assert len(service.worker.jobs) == 2


async def test_one_joiner_may_run_out_of_time_before_the_other() -> None:
    async with running(worker=False) as service:
        patient = soon(service.run("say x", idempotency_key="k", deadline_s=30))
        await until(lambda: service.gateway.dispatch.admission.calls == 1)
        hasty = (await service.run("say x", idempotency_key="k", deadline_s=0.1)).json()
        assert hasty["status"] == "expired"
        async with service.worker:
            assert (await patient).json()["status"] == "ok"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def record(keys: Idempotency, name: str, result: bytes = b"result") -> Key:
    flight = PendingJob(name, b"payload", "python", Key("t", name))
    keys.start(flight)
    keys.finish(flight, result, "none")
    assert flight.key is not None
    return flight.key


def test_a_record_lapses_after_its_time() -> None:
    clock = Clock()
    keys = Idempotency(120, 1 << 20, clock)
    key = record(keys, "k")
    clock.now += 119
    assert isinstance(keys.find(key, b"payload"), Record)
    with pytest.raises(PayloadDiffers):
        keys.find(key, b"other")
    clock.now += 1
    assert keys.find(key, b"other") is None
    assert keys._bytes == 0


def test_the_oldest_records_make_room_within_the_budget() -> None:
    size = 1000 + RECORD_OVERHEAD_BYTES
    keys = Idempotency(120, 2 * size, Clock())
    first, second, third = (record(keys, name, b"x" * 1000) for name in "abc")
    assert keys.find(first, b"payload") is None
    assert keys.find(second, b"payload") is not None and keys.find(third, b"payload") is not None
    huge = record(keys, "d", b"x" * 10_000)
    assert keys.find(huge, b"payload") is None
    assert keys.find(third, b"payload") is not None
    assert keys._bytes == 2 * size


async def test_results_of_joiners_are_their_own_objects(service: Service) -> None:
    response = await service.batch(*({"code": "say x", "idempotency_key": "k", "id": str(n)} for n in range(2)))
    assert {result.id for result in lines(response)} == {"0", "1"}
    assert msgspec.json.decode(response.content.splitlines()[0])["request_id"] == response.headers["x-request-id"]
    await asyncio.sleep(0)
