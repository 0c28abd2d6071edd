"""Gateways and workers joined by a real server: what one accepts, any can run, and all keep the promise together."""

import asyncio
from collections import Counter

import pytest
from cluster_harness import Cluster, Door
from gateway_harness import lines, problem, soon, until
from redis_harness import MovedServer

from exec_client import AsyncClient
from exec_wire import Call, Result, pack, unpack_result
from exec_wire.queue.connection import Subscription
from exec_wire.queue.protocol import LEASE_S, Job, WorkerInfo
from exec_wire.queue.redis import RedisQueue
from exec_wire.queue.redis_entries import Address
from loadtest.support.redis_server import RedisServer
from worker.config import WorkerConfig
from worker.consumer import Consumer
from worker.echo import EchoPool


async def settled(*doors: Door, workers: int) -> None:
    for door in doors:
        await until(lambda door=door: len(door.gateway.worker_registry.workers) == workers)  # type: ignore[misc]


def metric(door: Door, name: str) -> float:
    return door.gateway.metrics.registry.get_sample_value(name, {}) or 0.0


async def test_a_call_is_run_by_a_worker_elsewhere_and_answered_here(cluster: Cluster) -> None:
    door, worker = await cluster.add_gateway(), await cluster.add_worker()
    result = (await door.run("say hello")).json()
    assert (result["status"], result["stdout"], result["worker"]) == ("ok", "hello", "w1")
    assert len(worker.jobs) == 1


async def test_two_gateways_and_three_workers_serve_one_load_while_workers_come_and_go(cluster: Cluster) -> None:
    doors = [await cluster.add_gateway(), await cluster.add_gateway()]

    async def load(door: Door, name: str) -> list[Result]:
        results = []
        for turn in range(6):
            results += await door.batch(*({"code": f"{name}-{turn}-{number}"} for number in range(60)))
        return results

    async def come_and_go(name: str) -> None:
        for _ in range(8):
            async with cluster.echo_worker(name, slots=16):
                await asyncio.sleep(0.15)

    async with cluster.echo_worker("stays"):
        loads = [soon(load(doors[number % 2], f"load{number}")) for number in range(4)]
        changes = [soon(come_and_go(name)) for name in ("b", "c")]
        results = [result for done in await asyncio.gather(*loads) for result in done]
        await asyncio.gather(*changes)
    assert Counter((result.status, result.error) for result in results) == {("ok", ""): 1440}
    wanted = Counter(f"load{which}-{turn}-{number}" for which in range(4) for turn in range(6) for number in range(60))
    assert Counter(result.stdout for result in results) == wanted
    assert {result.worker for result in results} == {"stays", "b", "c"}


async def test_the_idlest_worker_takes_first_and_none_takes_more_than_its_slots(cluster: Cluster) -> None:
    door = await cluster.add_gateway()
    one, two = await cluster.add_worker("w1", slots=2), await cluster.add_worker("w2", slots=6)
    await settled(door, workers=2)
    answering = soon(door.batch(*({"code": "hold"} for _ in range(20))))
    await until(lambda: len(one.jobs) + len(two.jobs) == 8)
    await asyncio.sleep(0.1)
    assert (len(one.jobs), len(two.jobs)) == (2, 6)
    assert len(door.gateway.dispatch.released) == 10  # 1.25 x 8
    one.let_go.set()
    two.let_go.set()
    assert len(await answering) == 20


async def test_gateways_with_calls_waiting_share_the_slots(cluster: Cluster) -> None:
    one, two = await cluster.add_gateway(), await cluster.add_gateway()
    worker = await cluster.add_worker(slots=8)
    await settled(one, two, workers=1)
    first = soon(one.batch(*({"code": "hold"} for _ in range(30))))
    await until(lambda: len(one.gateway.dispatch.released) == 10 and two.gateway.worker_registry.window == 5)
    second = soon(two.batch(*({"code": "hold"} for _ in range(30))))
    await until(lambda: one.gateway.worker_registry.window == two.gateway.worker_registry.window == 5)
    await until(lambda: len(two.gateway.dispatch.released) == 5)
    worker.let_go.set()
    assert (len(await first), len(await second)) == (30, 30)


async def test_a_short_line_passes_a_long_one_of_another_tenant(cluster: Cluster) -> None:
    door, worker = await cluster.add_gateway(), await cluster.add_worker(slots=2)
    await settled(door, workers=1)
    long = soon(door.batch(*({"code": "hold", "tenant": "many"} for _ in range(50))))
    await until(lambda: len(worker.jobs) == 2)
    waiting = len(door.gateway.dispatch.waiting)
    short = soon(door.run("say hi", tenant="one"))
    await until(lambda: len(door.gateway.dispatch.waiting) > waiting)
    worker.let_go.set()
    await short
    assert len(worker.jobs) < 10
    await long


async def test_a_call_goes_to_a_worker_of_the_tier_that_it_requires(cluster: Cluster) -> None:
    door = await cluster.add_gateway()
    await cluster.add_worker("weak", tier="C", slots=50)
    await cluster.add_worker("strong", tier="A", slots=1)
    await settled(door, workers=2)
    results = await door.batch(*({"code": "say x", "require_tier": "B"} for _ in range(20)))
    assert {result.worker for result in results} == {"strong"}


async def test_a_call_that_few_can_run_does_not_hold_up_the_others(cluster: Cluster) -> None:
    door = await cluster.add_gateway()
    plain = await cluster.add_worker("plain", slots=4)
    compiler = await cluster.add_worker("compiler", slots=1, needs=("cpp",))
    await settled(door, workers=2)
    slow = soon(door.batch(*({"code": "hold", "language": "cpp"} for _ in range(30))))
    await until(lambda: len(compiler.jobs) == 1)
    assert len(await asyncio.wait_for(door.batch(*({"code": "say x"} for _ in range(30))), 30)) == 30
    assert (len(plain.jobs), len(compiler.jobs)) == (30, 1)
    compiler.let_go.set()
    await slow


async def test_a_key_gets_the_result_that_another_gateway_has_recorded(cluster: Cluster) -> None:
    one, two, worker = await cluster.add_gateway(), await cluster.add_gateway(), await cluster.add_worker()
    first = (await one.run("say x", idempotency_key="k", tenant="t")).json()
    again = (await two.run("say x", idempotency_key="k", tenant="t", id="mine")).json()
    assert (again["stdout"], again["worker"], again["id"]) == (first["stdout"], first["worker"], "mine")
    assert len(worker.jobs) == 1
    problem(await two.run("say y", idempotency_key="k", tenant="t"), 422, "idempotency_conflict")
    assert (await two.run("say y", idempotency_key="k", tenant="other")).json()["stdout"] == "y"


async def test_what_we_did_wrong_is_recorded_nowhere(cluster: Cluster) -> None:
    one, two, worker = await cluster.add_gateway(), await cluster.add_gateway(), await cluster.add_worker()
    await one.run("lose", idempotency_key="k")
    await two.run("lose", idempotency_key="k")
    assert len(worker.jobs) == 2


async def test_cancellation_reaches_what_other_gateways_have(cluster: Cluster) -> None:
    one, two, worker = await cluster.add_gateway(), await cluster.add_gateway(), await cluster.add_worker()
    await settled(one, two, workers=1)
    call = {"code": "hold", "tags": {"run": "r"}}
    first, second = soon(one.batch(*[call] * 10)), soon(two.batch(*[call] * 10, {"code": "hold", "tags": {"run": "other"}}))
    await until(lambda: len(worker.jobs) == 4)
    await until(lambda: len(one.gateway.dispatch.waiting) + len(two.gateway.dispatch.waiting) > 5)
    response = await two.client.delete("/v1/calls", params={"run": "r"})
    assert response.json() == {"cancelled": 20}
    assert {result.status for result in await asyncio.wait_for(first, 30)} == {"cancelled"}
    worker.let_go.set()
    assert Counter(result.status for result in await second) == {"cancelled": 10, "ok": 1}


async def test_a_tenants_cancellation_leaves_other_tenants_alone_everywhere(cluster: Cluster) -> None:
    one, two, worker = await cluster.add_gateway(), await cluster.add_gateway(), await cluster.add_worker()
    running = soon(one.run("hold", tags={"run": "r"}, tenant="a"))
    await until(lambda: len(worker.jobs) == 1)
    assert (await two.client.delete("/v1/calls", params={"run": "r", "tenant": "b"})).json() == {"cancelled": 0}
    worker.let_go.set()
    assert (await running).json()["status"] == "ok"


async def test_a_cancelled_run_frees_its_slot_while_others_share_its_request(cluster: Cluster) -> None:
    """Request and cancel go to different gateways."""
    one, two, worker = await cluster.add_gateway(), await cluster.add_gateway(), await cluster.add_worker(slots=6)
    await settled(one, two, workers=1)
    async with AsyncClient(f"{one.client.base_url},{two.client.base_url}") as client:
        runs = [soon(client.run("hold")) for _ in range(6)]
        await until(lambda: len(worker.jobs) == 6)
        for run in runs[:5]:
            run.cancel()
        await until(lambda: len(set(worker.cancelled)) == 5)
        worker.let_go.set()
        assert (await runs[5]).status == "ok"


async def test_calls_are_cancelled_by_request_and_index_through_any_gateway(cluster: Cluster) -> None:
    one, two, worker = await cluster.add_gateway(), await cluster.add_gateway(), await cluster.add_worker()
    headers = {"x-request-id": "r"}
    running = soon(one.client.post("/v1/batch", json={"calls": [{"code": "hold", "tenant": "a"}] * 3}, headers=headers))
    await until(lambda: len(worker.jobs) == 3)
    query = "request=r&index=0&index=2"
    assert (await two.client.delete(f"/v1/calls?{query}&tenant=b")).json() == {"cancelled": 0}
    assert (await two.client.delete(f"/v1/calls?{query}&tenant=a")).json() == {"cancelled": 2}
    await until(lambda: len(worker.cancelled) == 2)
    worker.let_go.set()
    assert {result.index: result.status for result in lines(await running)} == {0: "cancelled", 1: "ok", 2: "cancelled"}


async def test_a_cancel_that_comes_to_another_gateway_before_the_request_acts_when_that_comes(cluster: Cluster) -> None:
    one, two, worker = await cluster.add_gateway(), await cluster.add_gateway(), await cluster.add_worker()
    await settled(one, two, workers=1)
    assert (await two.client.delete("/v1/calls?request=early&index=0")).json() == {"cancelled": 0}
    answer = await one.client.post("/v1/run", json={"code": "say never"}, headers={"x-request-id": "early"})
    assert answer.json()["status"] == "cancelled"
    assert worker.codes == []


async def test_a_worker_does_not_start_what_was_cancelled_before_it_was_handed_out(cluster: Cluster) -> None:
    """The cancel is heard on another connection than the job comes on."""
    gateway = RedisQueue(cluster.url).gateway("g")
    await gateway.announce(False)
    async with cluster.echo_worker("w1") as consumer:
        await until(lambda: consumer._queue._notes._connection is not None)  # type: ignore[attr-defined]
        assert await gateway.cancel(["job-1"]) == []
        await until(lambda: "job-1" in consumer._cancelled)
        payload = pack(Call("echo"))
        await gateway.publish([Job("job-1", payload, 60_000, "g"), Job("job-2", payload, 60_000, "g")])
        answers: dict[str, str] = {}
        async with asyncio.timeout(10):
            while len(answers) < 2:
                answers |= {answer.id: unpack_result(answer.payload).status for answer in await gateway.receive()}
    await gateway.leave()
    assert answers == {"job-1": "cancelled", "job-2": "ok"}


async def test_a_cancel_that_is_sent_while_the_workers_subscription_is_broken_acts_when_it_is_back(
    own_server: RedisServer,
) -> None:
    queue = RedisQueue(own_server.url)
    gateway = queue.gateway("g")
    await gateway.announce(False)
    async with Consumer("w", EchoPool(WorkerConfig(slots=2, echo_ms=120_000)), queue.worker("w")) as consumer:
        await gateway.publish([Job(id, pack(Call("echo")), 200_000, "g") for id in ("cancelled", "goes-on")])
        await until(lambda: len(consumer._running) == 2)
        own_server.say("CLIENT", "KILL", "TYPE", "pubsub")
        assert await gateway.cancel(["cancelled"]) == []
        async with asyncio.timeout(20):
            [answer] = await gateway.receive()
        assert (answer.id, unpack_result(answer.payload).status) == ("cancelled", "cancelled")
        await until(lambda: list(consumer._running) == ["goes-on"])
    await gateway.leave()


async def test_a_gateway_of_an_older_version_is_not_asked_to_cancel_by_request(cluster: Cluster) -> None:
    """It would not know the field, take the selection for one without tags, and cancel everything of the tenant."""
    one, _ = await cluster.add_gateway(), await cluster.add_gateway()
    older = Subscription(cluster.url, [Address(cluster.url).asks])
    await older.listen()
    assert (await one.client.delete("/v1/calls?request=r&index=0")).json() == {"cancelled": 0}
    assert (await one.client.delete("/v1/calls?run=r")).json() == {"cancelled": 0}
    _, said = await older.message()
    assert b"request" not in said
    await older.close()


async def test_a_caller_who_leaves_has_its_programs_killed(cluster: Cluster) -> None:
    door, worker = await cluster.add_gateway(), await cluster.add_worker()
    leaving = soon(door.batch(*({"code": "hold"} for _ in range(10))))
    await until(lambda: len(worker.jobs) == 4)
    leaving.cancel()
    await until(lambda: len(worker.cancelled) == 4)
    await until(lambda: door.gateway.dispatch.admission.calls == 0)
    assert len(worker.jobs) == 4


async def test_a_worker_that_dies_loses_nothing(cluster: Cluster, moved_server: MovedServer) -> None:
    door = await cluster.add_gateway()
    dead = RedisQueue(cluster.url).worker("dead")
    answering = soon(door.run("say x"))
    await until(lambda: bool(door.gateway.dispatch.waiting))
    await dead.announce(WorkerInfo("dead", 1))
    assert len(await asyncio.wait_for(dead.take(1), 30)) == 1
    await moved_server.pass_s(LEASE_S + 0.1)
    worker = await cluster.add_worker()
    result = (await answering).json()
    assert (result["status"], result["worker"]) == ("ok", "w1")
    assert [taken.deliveries for taken in worker.jobs] == [2]
    await dead.leave()


async def test_of_two_answers_the_first_is_delivered_and_the_other_one_counted(
    cluster: Cluster, moved_server: MovedServer
) -> None:
    """As after a worker stood still for longer than its lease."""
    door, slow = await cluster.add_gateway(), await cluster.add_worker("slow", slots=1)
    answering = soon(door.run("hold"))
    await until(lambda: len(slow.jobs) == 1)
    slow._tasks[0].cancel()  # it does not renew any more
    await moved_server.pass_s(LEASE_S + 0.1)
    quick = await cluster.add_worker("quick")
    await until(lambda: len(quick.jobs) == 1)
    quick.let_go.set()
    assert (await answering).json()["worker"] == "quick"
    slow.let_go.set()
    await until(lambda: metric(door, "exec_late_answers_total") == 1)


async def test_calls_that_the_server_forgot_are_published_again(
    cluster: Cluster, moved_server: MovedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exec_service.dispatch.release.RENEW_S", 0.1)
    monkeypatch.setattr("exec_service.dispatch.release.RECONCILE_S", 0.5)
    door, worker = await cluster.add_gateway(), await cluster.add_worker(slots=4)
    await settled(door, workers=1)
    answering = soon(door.batch(*({"code": "hold"} for _ in range(12))))
    await until(lambda: len(door.gateway.dispatch.released) == 5 and len(worker.jobs) == 4)
    moved_server.say("FLUSHALL")
    await until(lambda: metric(door, "exec_republished_total") == 5)
    worker.let_go.set()
    results = await answering
    assert sorted(result.index for result in results) == list(range(12))
    assert {result.status for result in results} == {"ok"}


async def test_a_call_that_is_lost_again_and_again_is_given_up_as_our_fault(
    cluster: Cluster, moved_server: MovedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exec_service.dispatch.release.RENEW_S", 0.05)
    monkeypatch.setattr("exec_service.dispatch.release.RECONCILE_S", 0.1)
    door, worker = await cluster.add_gateway(), await cluster.add_worker(slots=1)
    answering = soon(door.run("silent"))
    while not answering.done():
        await asyncio.sleep(0.1)
        moved_server.say("DEL", "x1:jobs:python")
    result = (await answering).json()
    assert (result["status"], result["blame"], result["retryable"]) == ("worker_lost", "infra", False)
    assert len(worker.jobs) <= 3


async def test_a_server_clock_that_jumps_makes_no_call_late(cluster: Cluster, moved_server: MovedServer) -> None:
    """The worker is told that nothing remains; the gateway's own clock knows better."""
    door = await cluster.add_gateway()
    async with cluster.echo_worker("w1", slots=1) as consumer:
        await settled(door, workers=1)
        await consumer.drain(0)  # it stays announced for a while, but takes nothing
        answering = soon(door.run("x", deadline_s=30))
        await until(lambda: len(door.gateway.dispatch.released) == 1)
        await moved_server.pass_s(3600)
        async with cluster.echo_worker("w2", slots=1):
            result = (await asyncio.wait_for(answering, 30)).json()
    assert (result["status"], result["worker"]) == ("ok", "w2")


async def test_a_draining_worker_finishes_what_runs_and_others_take_the_rest(cluster: Cluster) -> None:
    door = await cluster.add_gateway()
    async with cluster.echo_worker("leaves") as consumer:
        await settled(door, workers=1)
        await door.run("x")
        await consumer.drain(5)
    async with cluster.echo_worker("stays"):
        assert (await door.run("y")).json()["worker"] == "stays"
        await until(lambda: [worker.id for worker in door.gateway.worker_registry.workers] == ["stays"])


async def test_a_gateway_that_drains_finishes_what_it_accepted_and_leaves(cluster: Cluster, moved_server: MovedServer) -> None:
    one, two, worker = await cluster.add_gateway(drain_s=10), await cluster.add_gateway(), await cluster.add_worker()
    answering = soon(one.batch(*({"code": "hold"} for _ in range(10))))
    await until(lambda: len(worker.jobs) == 4)
    one.stop.set()
    await until(lambda: one.gateway.dispatch.draining)
    problem(await one.run(), 503, "draining")
    assert (await two.client.get("/readyz")).status_code == 200
    worker.let_go.set()
    assert len(await answering) == 10
    assert (await two.run()).json()["status"] == "ok"


async def test_a_gateway_is_ready_without_workers_and_says_how_many_there_are(cluster: Cluster) -> None:
    door = await cluster.add_gateway()
    assert (await door.client.get("/readyz")).status_code == 200
    assert (await door.client.get("/v1/info")).json()["workers"] == 0
    await cluster.add_worker(slots=3)
    await settled(door, workers=1)
    info = (await door.client.get("/v1/info")).json()
    assert (info["workers"], info["slots"], info["worker_list"][0]["id"]) == (1, 3, "w1")
    assert (metric(door, "exec_workers"), metric(door, "exec_queue_up")) == (1, 1)


async def test_metrics_are_not_at_the_port_of_the_callers(cluster: Cluster) -> None:
    door = await cluster.add_gateway()
    problem(await door.client.get("/metrics"), 404, "not_found")
