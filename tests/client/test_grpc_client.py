"""The client over gRPC: the same methods, results and errors as over HTTP."""

import asyncio
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_harness import Service, running, until

from exec_client import (
    AsyncClient,
    BadRequest,
    Client,
    Conflict,
    ConnectionFailed,
    DeadlineExceeded,
    Forbidden,
    InfraFailure,
    NotReady,
    Overloaded,
    Policy,
    ProtocolError,
    Result,
    ServiceFailed,
    Tags,
    Test,
    TooLarge,
    UsageError,
)
from exec_service.tenants.keys import add_key
from exec_wire import Limits

QUICK = Policy(backoff_s=0.01, max_backoff_s=0.05, grace_s=0.2)


@pytest.fixture(scope="module")
async def service() -> AsyncIterator[Service]:
    async with running(grpc=True, slots=16) as service:
        yield service


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"grpc://{service.grpc_target}", policy=QUICK) as client:
        yield client


async def test_runs_come_back_as_over_http(service: Service, client: AsyncClient) -> None:
    async with AsyncClient(service.url) as http:
        for code in ("say hello", "fail", "end timeout", "end memory_limit"):
            over_grpc, over_http = await client.run(code, id="x"), await http.run(code, id="x")
            for result in (over_grpc, over_http):
                result.request_id, result.timings = "", type(result.timings)()
            assert over_grpc == over_http


async def test_many_runs_come_back_in_order_and_as_they_land(client: AsyncClient) -> None:
    results = await client.run_many([f"say {n}" for n in range(1000)], tags=Tags(step=1))
    assert [result.stdout for result in results] == [str(n) for n in range(1000)]
    landed = {result.index: result.stdout async for result in client.as_completed(["say a", "say b"])}
    assert landed == {0: "a", 1: "b"}


async def test_files_and_limits_survive(service: Service, client: AsyncClient) -> None:
    await client.run("say x", files={"f": b"\0\1"}, limits=Limits(wall_s=2), env={"A": "b"}, echo_value=True)
    call = service.worker.calls[-1]
    assert (call.files, call.limits, call.env, call.echo_value) == ({"f": "AAE="}, Limits(wall_s=2), {"A": "b"}, True)


async def test_info_and_cancel(service: Service, client: AsyncClient) -> None:
    async with AsyncClient(service.url) as http:
        assert await client.info() == await http.info()
    before = len(service.worker.calls)
    held = asyncio.create_task(client.run("hold", tags=Tags(run="r", step=0)))
    await until(lambda: len(service.worker.calls) > before)
    assert await client.cancel(run="r", step=0) == 1
    assert (await held).status == "cancelled"
    assert await client.cancel(run="r") == 0


async def test_giving_a_run_up_kills_it(service: Service, client: AsyncClient) -> None:
    before, calls = len(service.worker.cancelled), len(service.worker.calls)
    held = asyncio.create_task(client.run("hold"))
    await until(lambda: len(service.worker.calls) > calls)
    held.cancel()
    await until(lambda: len(service.worker.cancelled) == before + 1)


async def test_the_bad_call_of_a_batch_gets_the_error_and_the_others_run(client: AsyncClient) -> None:
    outcomes = await client.run_many(
        ["say a", "say b", "say c"], return_exceptions=True, language="python", idempotency_key="same"
    )
    assert sum(isinstance(outcome, Result) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 2
    with pytest.raises(BadRequest) as error:
        await client.run("say a", language="cobol")
    assert (error.value.code, error.value.field, error.value.status) == ("unknown_language", "$.language", 422)
    with pytest.raises(BadRequest, match="does not fit"):
        await client.run("say a", tags=Tags(step=1 << 70))


async def test_failures_are_the_errors_of_http(service: Service, client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfraFailure):
        await client.run("lose")
    with pytest.raises(DeadlineExceeded):
        await client.run("silent", deadline_s=1)
    dispatch = service.gateway.dispatch

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(dispatch, "accept", broken)
    with pytest.raises(ServiceFailed):
        await client.run("say x", deadline_s=30)
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "not_ready_because", "no sandbox")
    with pytest.raises(NotReady, match="no sandbox"):
        await client.run("say x", deadline_s=2)


async def test_overload_and_size_are_told_apart() -> None:
    small = {"max_body_bytes": 1 << 20, "max_bytes": 1 << 20, "max_calls": 4, "max_calls_per_request": 4}
    async with (
        running(grpc=True, **small) as service,  # type: ignore[arg-type]
        AsyncClient(f"grpc://{service.grpc_target}", policy=QUICK) as client,
    ):
        with pytest.raises(TooLarge):
            await client.run("say x", stdin="x" * (2 << 20))
        held = [asyncio.create_task(client.run("hold")) for _ in range(4)]
        await until(lambda: len(service.worker.calls) == 4)
        with pytest.raises(Overloaded) as error:
            await client.run("say x", deadline_s=2)
        assert error.value.retry_after_s
        service.worker.let_go.set()
        await asyncio.gather(*held)


async def test_a_service_that_comes_back_is_found_again() -> None:
    async with running(grpc=True) as first:
        port = first.gateway.config.grpc_port
        client = AsyncClient(f"grpc://127.0.0.1:{port}", policy=QUICK)
        assert (await client.run("say 1")).stdout == "1"
    late = asyncio.create_task(client.run("say 2", deadline_s=20))
    await asyncio.sleep(0.3)
    assert not late.done()
    async with running(grpc_port=port):
        assert (await late).stdout == "2"
        await client.aclose()


async def test_nobody_there_is_a_failed_connection_and_http_is_not_grpc(service: Service) -> None:
    async with AsyncClient("grpc://127.0.0.1:1", policy=QUICK) as client:
        with pytest.raises(ConnectionFailed) as error:
            await client.run("say x", deadline_s=30)
        assert not error.value.sent
    async with AsyncClient(f"grpc://127.0.0.1:{service.port}", policy=QUICK) as client:
        with pytest.raises((ConnectionFailed, ProtocolError)):
            await client.run("say x", deadline_s=30)


async def test_a_key_goes_along_as_metadata(tmp_path: Path) -> None:
    key, _ = add_key(tmp_path / "keys.json", "lab")
    async with running(grpc=True, keys=str(tmp_path / "keys.json")) as locked:
        async with AsyncClient(f"grpc://{locked.grpc_target}", api_key=key) as client:
            await client.run("say x")
            assert locked.worker.calls[-1].tenant == "lab"
            with pytest.raises(Forbidden):
                await client.run("say x", tenant="rival")
        async with AsyncClient(f"grpc://{locked.grpc_target}", api_key="exs_wrong") as client:
            with pytest.raises(Forbidden) as error:
                await client.run("say x")
            assert error.value.status == 401


async def test_judging_over_grpc_says_where_it_is(client: AsyncClient) -> None:
    with pytest.raises(UsageError, match="HTTP"):
        await client.judge("x", [Test()])
    with pytest.raises(UsageError, match="HTTP"):
        await client.verify("1", "1")


async def test_the_blocking_client_speaks_it_too(service: Service) -> None:
    def run() -> str:
        with Client(f"grpc://{service.grpc_target}", transport="grpc") as client, pickle.loads(pickle.dumps(client)) as copy:
            return f"{copy.run('say x').stdout}{client.run('say y').stdout}"

    assert await asyncio.to_thread(run) == "xy"


@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_addresses_and_transports_must_agree(make: type[Client] | type[AsyncClient]) -> None:
    make(transport="grpc")
    make("grpc://127.0.0.1:50051")
    with pytest.raises(ValueError, match=r"grpc://.*http://x"):
        make("http://x", transport="grpc")
    with pytest.raises(ValueError, match="http://"):
        make("grpc://x", transport="http")
    with pytest.raises(ValueError, match="127"):
        make("127.0.0.1:50051")


def test_a_fork_is_told_that_grpc_stays_behind() -> None:
    program = """if True:
        import os
        from exec_client import Client, ConnectionFailed, Policy, UsageError
        client = Client("grpc://127.0.0.1:1", policy=Policy(max_attempts=1))
        try:
            client.run("say x", deadline_s=30)
        except ConnectionFailed:
            pass
        if child := os.fork():
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        try:
            client.run("say x")
        except UsageError as error:
            print(error, flush=True)
            os._exit(0)
        os._exit(1)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and "does not work after a fork" in done.stdout, done


def test_without_grpcio_the_words_say_what_to_install() -> None:
    program = """if True:
        import sys
        sys.modules["grpc"] = None
        from exec_client import AsyncClient, UsageError
        try:
            AsyncClient("grpc://127.0.0.1:1")
        except UsageError as error:
            print(error)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert "pip install 'exec-client[grpc]'" in done.stdout
