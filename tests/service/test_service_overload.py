"""More than fits: refused as a whole, with a time to come again; the client comes again."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from service_harness import Service, serving, until_program_runs

from exec_client import AsyncClient, Call, Tags

ROOM = 8
HOLD = {"code": "import time\ntime.sleep(300)", "limits": {"wall_s": 300}, "tags": {"run": "hold"}}


@pytest.fixture(scope="module")
def small() -> Iterator[Service]:
    with serving(max_calls=ROOM, max_calls_per_request=ROOM) as service:
        yield service


async def test_request_beyond_the_room_is_refused_whole(small: Service) -> None:
    async with httpx.AsyncClient(base_url=small.url, timeout=60) as http:
        held = asyncio.create_task(http.post("/v1/batch", json={"calls": [HOLD] * 6}))
        await until_program_runs(small, 2)
        try:
            refused = await http.post("/v1/batch", json={"calls": [{"code": "print(1)"}] * 3})
            assert refused.status_code == 429
            assert refused.headers["content-type"] == "application/problem+json"
            assert refused.json()["code"] == "overloaded"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert small.metric("exec_in_flight") == 6  # nothing of the three
        finally:
            await http.delete("/v1/calls?run=hold")
            statuses = [line for line in (await held).text.splitlines() if '"cancelled"' in line]
        assert len(statuses) == 6
        assert (await http.post("/v1/batch", json={"calls": [{"code": "print(1)"}] * ROOM})).status_code == 200


def test_request_that_can_never_fit_is_413_and_not_429(small: Service) -> None:
    answer = small.http.post("/v1/batch", json={"calls": [{"code": "print(1)"}] * (ROOM + 1)})
    assert (answer.status_code, answer.json()["code"]) == (413, "too_many_calls")
    assert "retry-after" not in answer.headers


async def test_client_comes_again_until_all_are_done(small: Service) -> None:
    before = small.metric('exec_rejected_total{reason="overloaded"}')
    calls = [Call(f"import time\ntime.sleep(0.05)\nprint({n})", tags=Tags(run="many")) for n in range(40)]
    async with AsyncClient(small.url) as client:
        results = await client.run_many(calls)
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(40)]
    refused = small.metric('exec_rejected_total{reason="overloaded"}') - before
    assert 0 < refused < 40  # it was refused, and did not hammer
    assert small.metric("exec_in_flight") == 0
