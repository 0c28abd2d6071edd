"""The client against a real service: results, cancelling, leaving, asking twice."""

import asyncio
import threading
from collections.abc import AsyncIterator

import httpx
import pytest
from common import wait_until
from service_harness import Service, mixed_case, serving, slots_in_use, until_no_program_runs, until_program_runs

from exec_client import AsyncClient, Call, Client, Conflict, Limits, Result, Tags
from loadtest.support.processes import free_port

SLEEP = "import time\nprint('began', flush=True)\ntime.sleep(300)"
LONG = Limits(wall_s=300, cpu_s=40)
DRAW = "import random\nprint(random.random())"


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(service.url) as client:
        yield client


async def test_run_returns_what_the_program_did(client: AsyncClient) -> None:
    result = await client.run("print(input())", stdin="hello")
    assert (result.status, result.tool_text()) == ("ok", "hello")
    failed = await client.run("1 / 0")
    assert (failed.status, failed.blame) == ("error", "model")
    assert failed.tool_text().endswith("ZeroDivisionError: division by zero")


async def test_concurrent_runs_get_their_own_results(client: AsyncClient) -> None:
    results = await asyncio.gather(*(client.run(f"print({n})") for n in range(150)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(150)]


async def test_run_many_keeps_the_order_of_mixed_calls(client: AsyncClient) -> None:
    cases = [mixed_case(number) for number in range(100)]
    results = await client.run_many([Call(**case.call) for case in cases])
    assert [problem for case, result in zip(cases, results, strict=True) if (problem := case.problem(result))] == []


async def test_as_completed_yields_the_quick_before_the_slow(client: AsyncClient) -> None:
    codes = ["import time\ntime.sleep(1)", "print(1)", "print(2)"]
    order = [result.index async for result in client.as_completed(codes)]
    assert order[-1] == 0
    assert sorted(order) == [0, 1, 2]


def test_threads_share_one_sync_client(service: Service) -> None:
    printed: dict[int, str] = {}
    with Client(service.url) as client:

        def work(number: int) -> None:
            printed[number] = client.run(f"print({number} ** 2)").stdout

        threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert client.info().tier == "A"
    assert printed == {number: f"{number**2}\n" for number in range(32)}


def test_sync_client_yields_as_completed(service: Service) -> None:
    with Client(service.url) as client:
        printed = {result.index: result.stdout for result in client.as_completed([f"print({n})" for n in range(10)])}
    assert printed == {n: f"{n}\n" for n in range(10)}


async def test_cancel_by_tags_kills_what_runs_and_answers_all_of_it(service: Service, client: AsyncClient) -> None:
    """Two run, two wait, one has another tag."""
    doomed = [asyncio.create_task(client.run(SLEEP, limits=LONG, tags=Tags(run="r", step=n))) for n in range(4)]
    await until_program_runs(service, 2)
    spared = asyncio.create_task(client.run("print('spared')", tags=Tags(run="other")))
    await asyncio.to_thread(wait_until, lambda: service.metric("exec_in_flight") == 5, "all are at the service")
    assert await client.cancel(run="r") == 4
    async with asyncio.timeout(30):
        results: list[Result] = await asyncio.gather(*doomed)
    assert {(result.status, result.blame, result.retryable) for result in results} == {("cancelled", "client", False)}
    await until_no_program_runs(service)
    assert (await spared).stdout == "spared\n"


async def test_cancel_of_one_step_leaves_the_others_running(service: Service, client: AsyncClient) -> None:
    code = "import time\ntime.sleep(1)\nprint('done')"
    kept = asyncio.create_task(client.run(code, tags=Tags(run="s", step=1)))
    doomed = asyncio.create_task(client.run(SLEEP, limits=LONG, tags=Tags(run="s", step=2)))
    await until_program_runs(service, 2)
    assert await client.cancel(run="s", step=2) == 1
    assert (await doomed).status == "cancelled"
    assert (await kept).stdout == "done\n"


async def test_cancelled_task_kills_its_program(service: Service, client: AsyncClient) -> None:
    task = asyncio.create_task(client.run(SLEEP, limits=LONG))
    await until_program_runs(service)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_no_program_runs(service)


@pytest.mark.parametrize("transport", ["http", "grpc"])
async def test_five_of_six_cancelled_tasks_free_five_slots(transport: str) -> None:
    port = free_port()
    with serving("--grpc-port", str(port), slots=6) as service:
        async with AsyncClient(service.url if transport == "http" else f"grpc://127.0.0.1:{port}") as client:
            tasks = [asyncio.create_task(client.run(SLEEP, limits=LONG)) for _ in range(6)]
            await until_program_runs(service, 6)
            for task in tasks[:5]:
                task.cancel()
            async with asyncio.timeout(15):
                while len(slots_in_use(service.block)) > 1:  # noqa: ASYNC110 - it happens in other processes
                    await asyncio.sleep(0.02)
            assert not tasks[5].done()
            results = await asyncio.gather(*(client.run(f"print({number})") for number in range(5)))
            assert [result.stdout for result in results] == [f"{number}\n" for number in range(5)]
            tasks[5].cancel()
        await until_no_program_runs(service, patience_s=15)


@pytest.mark.parametrize("path", ["/v1/run", "/v1/batch", "/v1/batch?stream=false"])
async def test_disconnect_kills_the_running_program(service: Service, path: str) -> None:
    call = {"code": SLEEP, "limits": {"wall_s": 300}}
    body = call if path == "/v1/run" else {"calls": [call, call]}
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as http:
        request = asyncio.create_task(http.post(path, json=body))
        await until_program_runs(service)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await until_no_program_runs(service)
    assert service.metric("exec_in_flight") == 0
    assert service.run("print('still here')").stdout == "still here\n"


async def test_same_key_gives_the_recorded_result(client: AsyncClient) -> None:
    first, second = [await client.run(DRAW, idempotency_key="draw-1") for _ in range(2)]
    assert first.stdout == second.stdout
    assert (await client.run(DRAW, idempotency_key="draw-2")).stdout != first.stdout


async def test_same_key_at_the_same_time_runs_once(service: Service, client: AsyncClient) -> None:
    code = f"import time\ntime.sleep(0.3)\n{DRAW}"
    async with AsyncClient(service.url) as other:
        results = await asyncio.gather(*(one.run(code, idempotency_key="draw-3") for one in (client, other)))
    assert results[0].stdout == results[1].stdout


async def test_key_belongs_to_its_tenant(client: AsyncClient) -> None:
    drawn = {(await client.run(DRAW, idempotency_key="draw-4", tenant=tenant)).stdout for tenant in ("", "a", "b")}
    assert len(drawn) == 3


async def test_same_key_with_another_program_is_a_conflict(client: AsyncClient) -> None:
    await client.run(DRAW, idempotency_key="draw-5")
    with pytest.raises(Conflict):
        await client.run("print(1)", idempotency_key="draw-5")
