"""Keys and gRPC in a cluster: tenants are kept apart and weighed at every gateway."""

from pathlib import Path

import pytest
from cluster_harness import Cluster
from gateway_harness import soon, until
from grpc_harness import caller, refused

from exec_service.tenants.keys import add_key
from loadtest.support.processes import free_port

pytestmark = pytest.mark.one_server  # keys and gRPC are the gateway's


async def test_tenants_stay_apart_across_gateways_and_doors(cluster: Cluster, tmp_path: Path) -> None:
    file, port = tmp_path / "keys.json", free_port()
    lab, rival = add_key(file, "lab", weight=3)[0], add_key(file, "rival")[0]
    one = await cluster.add_gateway(keys=str(file))
    await cluster.add_gateway(keys=str(file), grpc_port=port)
    worker = await cluster.add_worker()
    async with caller(f"127.0.0.1:{port}", lab) as ours, caller(f"127.0.0.1:{port}", rival) as theirs:
        # A record of one gateway is found at the other under the tenant of the key, which no call names.
        body = {"code": "say x", "idempotency_key": "k"}
        first = await one.client.post("/v1/run", json=body, headers={"authorization": f"Bearer {lab}"})
        assert (await ours.run("say x", idempotency_key="k")).stdout == first.json()["stdout"] == "x"
        assert len(worker.jobs) == 1
        with refused("ALREADY_EXISTS", "idempotency_conflict"):
            await ours.run("say y", idempotency_key="k")
        assert (await theirs.run("say y", idempotency_key="k")).stdout == "y"
        # Cancellation reaches the other gateway's calls of this tenant, and of no other.
        held = soon(ours.run("hold", tags={"run": "r"}))
        await until(lambda: "hold" in worker.codes)
        for key, count in ((rival, 0), (lab, 1)):
            gone = await one.client.delete("/v1/calls", params={"run": "r"}, headers={"authorization": f"Bearer {key}"})
            assert gone.json() == {"cancelled": count}
        assert (await held).status == "cancelled"


async def test_the_weight_of_a_key_is_its_share_of_the_line(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys = {"heavy": add_key(file, "heavy", weight=3)[0], "light": add_key(file, "light")[0]}
    door, worker = await cluster.add_gateway(keys=str(file)), await cluster.add_worker(slots=1)
    await until(lambda: door.gateway.worker_registry.slots == 1)
    batches = {tenant: {"calls": [{"code": "hold"}] * 40} for tenant in keys}
    sent = [
        soon(door.client.post("/v1/batch", json=batches[tenant], headers={"authorization": f"Bearer {key}"}))
        for tenant, key in keys.items()
    ]
    await until(lambda: door.gateway.dispatch.admission.calls == 80)
    worker.let_go.set()
    for answer in sent:
        assert (await answer).status_code == 200
    first = [call.tenant for call in worker.calls[4:40]]  # the first few were released before both had come
    assert 24 <= first.count("heavy") <= 30, first


async def test_the_limits_of_a_tenant_hold_for_all_gateways_together(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    headers = {"authorization": f"Bearer {add_key(file, 'small', max_calls=3, calls_per_minute=5)[0]}"}
    one, two = await cluster.add_gateway(keys=str(file)), await cluster.add_gateway(keys=str(file))
    worker = await cluster.add_worker()
    await until(lambda: one.gateway.worker_registry.slots == two.gateway.worker_registry.slots == 4)
    held = [soon(one.client.post("/v1/run", json={"code": f"hold {n}"}, headers=headers)) for n in range(3)]
    await until(lambda: len(worker.jobs) == 3)

    async def refusal() -> str:
        answer = await two.client.post("/v1/run", json={"code": "say 1"}, headers=headers)
        return str(answer.json().get("code", ""))

    keys = two.gateway.keys
    assert keys is not None
    await until(lambda: any(other.tenants for other in keys._others))
    assert await refusal() == "tenant_busy"
    worker.let_go.set()
    for answer in held:
        assert (await answer).status_code == 200
    await until(lambda: all(use.calls == 0 for other in keys._others for use in other.tenants.values()))
    said = [await refusal() for _ in range(5)]
    assert "rate_limited" in said[1:4], said  # two are left, and one more every 12 s
