"""Closing, event loops, threads, forks, pickles."""

import asyncio
import gc
import multiprocessing
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import pytest
from common import wait_until

from exec_client import (
    AsyncClient,
    BadRequest,
    Call,
    Client,
    ClientClosed,
    DeadlineExceeded,
    HttpTransport,
    Info,
    InfraFailure,
    Policy,
    ProtocolError,
    Result,
    UsageError,
    WrongEventLoop,
)
from exec_wire import Selection

from .conftest import QUICK, until
from .scripted_server import Exchange, ScriptedServer, answer

# -- AsyncClient ------------------------------------------------------------------------------------------------------------


async def test_closing_raises_in_pending_runs_and_gives_the_requests_up(server: ScriptedServer) -> None:
    server.play(server.hold)
    async with AsyncClient(server.url) as client:
        pending = [asyncio.create_task(client.run("a")) for _ in range(3)]
        await until(lambda: len(server.requests) == 1)
    outcomes = await asyncio.gather(*pending, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ClientClosed] * 3
    assert await asyncio.to_thread(server.given_up.acquire, timeout=30)


async def test_closing_raises_in_runs_that_wait_for_a_pause(server: ScriptedServer) -> None:
    server.play(answer(status="worker_lost", blame="infra", retryable=True))
    async with AsyncClient(server.url, policy=Policy(backoff_s=30, max_backoff_s=30)) as client:
        pending = asyncio.create_task(client.run("a"))
        await until(lambda: len(server.requests) == 1)
        await asyncio.sleep(0.05)
    with pytest.raises(ClientClosed):
        await pending


async def test_closed_client_raises_and_closes_again(server: ScriptedServer) -> None:
    client = AsyncClient(server.url)
    await client.aclose()
    await client.aclose()
    with pytest.raises(ClientClosed):
        await client.run("a")


def test_async_client_in_another_event_loop_says_so(server: ScriptedServer) -> None:
    client = AsyncClient(server.url)

    async def once() -> Result:
        return await client.run("a")

    async def close_elsewhere() -> None:
        await client.aclose()

    with asyncio.Runner() as runner:
        assert runner.run(once()).ok
        with pytest.raises(WrongEventLoop, match="one per loop"):
            asyncio.run(once())
        with pytest.raises(WrongEventLoop):
            asyncio.run(close_elsewhere())
        runner.run(close_elsewhere())


def test_wrong_address_is_refused_when_the_client_is_made() -> None:
    for client_type in (AsyncClient, Client):
        with pytest.raises(ValueError, match="http://"):
            client_type("127.0.0.1:8080")


async def test_proxy_from_the_environment_is_ignored(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    async with AsyncClient(server.url, policy=QUICK) as client:
        assert (await client.run("a")).ok


async def test_headers_go_with_every_request(server: ScriptedServer) -> None:
    async with AsyncClient(server.url, headers={"authorization": "Bearer key"}) as client:
        await client.run("a")
    assert server.requests[0].headers["authorization"] == "Bearer key"


# -- other transports -------------------------------------------------------------------------------------------------------


class Echo:
    """The least a transport must do."""

    def __init__(self) -> None:
        self.closed = False

    async def send(self, calls: Sequence[Call], timeout_s: float, request_id: str = "") -> AsyncGenerator[Result, None]:
        for index, call in enumerate(calls):
            yield Result("ok", index=index, stdout=call.code)

    async def info(self, timeout_s: float) -> Info:
        return Info(version="echo")

    async def cancel(self, selection: Selection, timeout_s: float) -> int:
        return 7 if selection.run == "mine" else 0

    async def aclose(self) -> None:
        self.closed = True


class Broken(Echo):
    async def send(self, calls: Sequence[Call], timeout_s: float, request_id: str = "") -> AsyncGenerator[Result, None]:
        yield Result("ok", index=0)
        raise ZeroDivisionError("a bug")


async def test_another_transport_can_be_plugged_in_and_is_closed_with_the_client() -> None:
    transport = Echo()
    async with AsyncClient(transport=transport) as client:
        assert [result.stdout for result in await client.run_many(["a", "b"])] == ["a", "b"]
        assert (await client.info()).version == "echo"
        assert await client.cancel(run="mine") == 7
    assert transport.closed


async def test_bug_in_a_transport_is_raised_and_nobody_hangs() -> None:
    async with AsyncClient(transport=Broken()) as client:
        fine, failed = await client.run_many(["a", "b"], return_exceptions=True)
    assert isinstance(fine, Result)
    assert isinstance(failed, ProtocolError) and isinstance(failed.__cause__, ZeroDivisionError)


async def test_transport_works_with_httpx2_too(server: ScriptedServer) -> None:
    httpx2 = pytest.importorskip("httpx2")
    async with AsyncClient(transport=HttpTransport(server.url, library=httpx2)) as client:
        assert (await client.run("a")).ok


# -- Client -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def blocking(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.url, policy=QUICK) as client:
        yield client


def test_sync_client_has_every_method(blocking: Client, server: ScriptedServer) -> None:
    assert blocking.run("a", id="x").id == "x"
    assert [result.stdout for result in blocking.run_many(code for code in "abc")] == ["a", "b", "c"]
    assert sorted(result.index for result in blocking.as_completed(["a", "b"])) == [0, 1]
    assert blocking.info().tier == "none"
    assert blocking.cancel(run="r", step=3) == 0
    assert server.cancels == [{"run": "r", "step": "3"}]


def test_sync_client_raises_what_the_async_one_raises(blocking: Client, server: ScriptedServer) -> None:
    server.play(ever_after=answer(status="worker_lost", blame="infra", retryable=True))
    with pytest.raises(InfraFailure):
        blocking.run("a")
    with pytest.raises(InfraFailure):
        list(blocking.as_completed(["a"]))
    (failure,) = blocking.run_many(["a"], return_exceptions=True)
    assert isinstance(failure, InfraFailure)
    with pytest.raises(BadRequest):
        blocking.run("\ud800")


def test_eight_threads_share_one_sync_client(blocking: Client, server: ScriptedServer) -> None:
    def work(name: int) -> list[str]:
        return [blocking.run(f"{name}-{i}").stdout for i in range(50)]

    assert in_threads(8, work) == [[f"{name}-{i}" for i in range(50)] for name in range(8)]
    assert len(server.connections) <= QUICK.max_connections


async def test_sync_client_works_inside_a_running_event_loop(blocking: Client) -> None:
    assert blocking.run("a").ok


def test_sync_as_completed_yields_before_the_last_is_finished(blocking: Client, server: ScriptedServer) -> None:
    async def one_then_hold(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.result(1)
        await exchange.disconnected()
        server.given_up.release()

    server.play(one_then_hold)
    arrivals = blocking.as_completed(["a", "b"])
    assert next(arrivals).index == 1
    arrivals.close()
    assert server.given_up.acquire(timeout=30)


def test_closing_sync_client_raises_in_other_threads_and_ends_its_thread(server: ScriptedServer) -> None:
    server.play(ever_after=server.hold)
    client = Client(server.url)
    raised: queue.Queue[type[BaseException]] = queue.Queue()

    def wait(start: Callable[[], object]) -> None:
        try:
            start()
        except BaseException as error:
            raised.put(type(error))

    starts: list[Callable[[], object]] = [
        lambda: client.run("a"),
        lambda: client.run_many(["a", "b"]),
        lambda: list(client.as_completed(["a"])),
    ]
    threads = [threading.Thread(target=wait, args=(start,)) for start in starts]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(len(request.calls) for request in server.requests) == 4)
    client.close()
    assert [raised.get(timeout=30) for _ in threads] == [ClientClosed] * 3
    assert client_threads() == []
    with pytest.raises(ClientClosed):
        client.run("a")
    client.close()


def test_collected_client_ends_its_thread(server: ScriptedServer) -> None:
    client = Client(server.url)
    assert client.run("a").ok
    assert len(client_threads()) == 1
    del client
    gc.collect()
    wait_until(lambda: client_threads() == [])


def test_unused_client_starts_no_thread(server: ScriptedServer) -> None:
    with Client(server.url):
        assert client_threads() == []


def test_interpreter_ends_when_a_client_was_left_open(server: ScriptedServer) -> None:
    program = f"from exec_client import Client; client = Client({server.url!r}); print(client.run('a').stdout)"
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("a\n", "", 0)


def test_interrupt_gives_the_program_up(blocking: Client, server: ScriptedServer) -> None:
    server.play(server.hold)

    def interrupt() -> None:
        wait_until(lambda: len(server.requests) == 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            blocking.run("a")
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()
    assert server.given_up.acquire(timeout=30)


# -- forks and pickles ------------------------------------------------------------------------------------------------------


def run_in_child(client: Client, code: str, answers: Any) -> None:
    try:
        answers.put(client.run(code, deadline_s=60).stdout)
    except Exception as error:
        answers.put(error)


def ask_forked_child(client: Client) -> object:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=run_in_child, args=(client, "child", answers))
    child.start()
    answer = answers.get()
    child.join(10)
    assert child.exitcode == 0
    return answer


def test_forked_child_starts_anew_and_parent_goes_on(blocking: Client, server: ScriptedServer) -> None:
    assert blocking.run("parent").stdout == "parent"
    assert ask_forked_child(blocking) == "child"
    assert blocking.run("parent again").stdout == "parent again"
    ports = {request.codes[0]: request.connection for request in server.requests}
    assert ports["child"] not in (ports["parent"], ports["parent again"])


def test_fork_while_a_thread_runs_calls_does_not_disturb_either(blocking: Client, server: ScriptedServer) -> None:
    stop = threading.Event()
    outputs: list[str] = []

    def work() -> None:
        while not stop.is_set():
            outputs.append(blocking.run("parent").stdout)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert [ask_forked_child(blocking) for _ in range(5)] == ["child"] * 5
    finally:
        stop.set()
        thread.join()
    assert set(outputs) == {"parent"}


def test_forked_child_with_its_parents_transport_object_says_so() -> None:
    with Client(transport=Echo()) as client:
        assert client.run("a").ok
        error = ask_forked_child(client)
    assert isinstance(error, UsageError) and "make a new Client" in str(error)


def test_pickled_clients_keep_their_settings(server: ScriptedServer) -> None:
    policy = Policy(max_attempts=2)
    with Client(server.url, headers={"x-team": "rl"}, policy=policy) as client:
        assert client.run("a").ok
        with pickle.loads(pickle.dumps(client)) as copy:
            assert copy.run("b").ok
    assert {request.headers["x-team"] for request in server.requests} == {"rl"}
    assert pickle.loads(pickle.dumps(AsyncClient(server.url, policy=policy)))._policy == policy
    with pytest.raises(TypeError, match="transport"):
        pickle.dumps(Client(transport=Echo()))


def test_deadline_holds_for_the_sync_client(blocking: Client, server: ScriptedServer) -> None:
    server.play(server.hold)
    with pytest.raises(DeadlineExceeded):
        blocking.run("a", deadline_s=0.1)


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "exec-client"]


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    outcomes: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda n=n: outcomes.update({n: work(n)})) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[n] for n in range(count)]
