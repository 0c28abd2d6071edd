"""API keys at the adapters for clients of other services."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from gateway_harness import Service, problem, running, soon, until

from exec_service.tenants.keys import add_key

PISTON = {"language": "python", "version": "*", "files": [{"content": "say hi"}]}
FUSION = {"code": "say hi", "language": "python", "memory_limit_MB": 2048, "run_timeout": 100}
JUDGE = {"type": "batch", "submissions": [{"type": "python", "solution": "say hi"}]}


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncIterator[tuple[Service, str]]:
    key, _ = add_key(tmp_path / "keys.json", "lab", max_limits={"memory_mb": 256, "wall_s": 5, "cpu_s": 60}, max_calls=50)
    keyless_adapters = {"code-judge": {"tenant": "rl", "max_calls": 1}}
    async with running(keys=str(tmp_path / "keys.json"), keyless_adapters=keyless_adapters) as service:
        yield service, key


async def test_a_door_needs_a_key_which_may_be_in_the_url(locked: tuple[Service, str]) -> None:
    service, key = locked
    for path, body in (("/api/v2/execute", PISTON), ("/run_code", FUSION)):
        problem(await service.client.post(path, json=body), 401, "unauthenticated")
        async with httpx.AsyncClient() as plain:
            url = service.url.replace("http://", f"http://any:{key}@")
            assert (await plain.post(f"{url}{path}", json=body)).status_code == 200
        assert service.worker.calls[-1].tenant == "lab"


async def test_limits_at_a_door_are_lowered_to_the_keys(locked: tuple[Service, str]) -> None:
    service, key = locked
    answer = await service.client.post("/run_code", json=FUSION, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    limits = service.worker.calls[-1].limits
    assert (limits.memory_mb, limits.wall_s, limits.cpu_s) == (256, 5, 60)
    assert isinstance(limits.memory_mb, int)


@pytest.mark.parametrize("path", ["/run/long-batch", "//run/long-batch"])
async def test_an_open_door_serves_without_a_key_as_its_tenant(locked: tuple[Service, str], path: str) -> None:
    service, key = locked
    assert (await service.client.post(f"{service.url}{path}", json=JUDGE)).status_code == 200
    assert service.worker.calls[-1].tenant == "rl"
    answer = await service.client.post(f"{service.url}{path}", json=JUDGE, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200 and service.worker.calls[-1].tenant == "lab"
    site = {"origin": "http://evil.example", "host": "evil.example"}
    problem(await service.client.post("/run/long-batch", json=JUDGE, headers=site), 403, "foreign_origin")


async def test_an_open_doors_own_bound_does_not_hold_for_who_has_a_key(locked: tuple[Service, str]) -> None:
    service, key = locked
    slow = {"type": "batch", "submissions": [{"type": "python", "solution": "hold"}]}
    held = soon(service.client.post("/run/long-batch", json=slow))
    await until(lambda: len(service.worker.calls) == 1)
    assert (await service.client.post("/run/long-batch", json=JUDGE)).status_code == 429
    answer = await service.client.post("/run/long-batch", json=JUDGE, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    service.worker.let_go.set()
    await held
