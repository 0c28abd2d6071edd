"""The client for programs without an event loop, and for threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from exec_client._calls import CallFields
from exec_client._transport import TransportName, addresses_of, check_url
from exec_client.aio import AsyncClient, ClientSettings
from exec_client.errors import ClientClosed, ExecError, UsageError
from exec_client.judging import JudgeFields, VerifyFields
from exec_client.sessions import AsyncSession, SessionFields
from exec_wire import Call, Judge, Judgement, Result, Tags, Test, Verification, Verify

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The same method of a `Client` or a `Session`: it waits for the answer."""

    @functools.wraps(method)
    def wait(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        answer: T = self._wait(lambda asynchronous: method(asynchronous, *args, **kwargs))
        return answer

    return wait


class Client(ClientSettings):
    """`AsyncClient` for code that blocks. The event loop lives in a thread of the client's own, started on first use.

    >>> with Client() as client:
    ...     print(client.run("print(6 * 7)").stdout, end="")
    42

    Threads may share one client: their calls share requests. It works where an event loop is running already (a notebook), but
    blocks it. After `os.fork` the child's copy opens its own thread and connections. It can be pickled. Closed by
    `with`, `close()`, garbage collection or the end of the interpreter; calls that still wait raise `ClientClosed`.
    """

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self._thread: _LoopThread | None = None
        self._finalizer: weakref.finalize[..., Client] | None = None
        self._forked = False
        self._kind: TransportName | None = None
        if isinstance(self._given_transport, str | None):
            kinds = {check_url(address, self._given_transport)[0] for address in addresses_of(self._base_url)}
            self._kind = "grpc" if "grpc" in kinds else "http"
        _watch_forks()
        _clients.add(self)

    def run(self, call: Call | str, **fields: Unpack[CallFields]) -> Result:
        """Run one program: its code, or a `Call`; keywords are fields of `Call` and win over it.

        >>> with Client() as client:
        ...     result = client.run("1 / 0", id="mine")
        >>> result.id, result.status, result.blame
        ('mine', 'error', 'model')
        """
        return self._wait(lambda client: client.run(call, **fields))

    @overload
    def run_many(
        self, calls: Iterable[Call | str], *, return_exceptions: Literal[False] = False, **fields: Unpack[CallFields]
    ) -> list[Result]: ...
    @overload
    def run_many(
        self, calls: Iterable[Call | str], *, return_exceptions: bool, **fields: Unpack[CallFields]
    ) -> list[Result | ExecError]: ...
    def run_many(
        self, calls: Iterable[Call | str], *, return_exceptions: bool = False, **fields: Unpack[CallFields]
    ) -> list[Result] | list[Result | ExecError]:
        """Run programs; their results in the order of `calls`. `fields` hold for each of them. See `AsyncClient.run_many`.

        >>> with Client() as client:
        ...     outcomes = client.run_many(["print(1)", "print(2)"], return_exceptions=True)
        >>> [outcome.stdout for outcome in outcomes if isinstance(outcome, Result)]
        ['1\\n', '2\\n']
        """
        calls = calls if isinstance(calls, str) else list(calls)  # the user's iterator runs in the user's thread
        return self._wait(lambda client: client.run_many(calls, return_exceptions=return_exceptions, **fields))

    @overload
    def as_completed(
        self, calls: Iterable[Call | str], *, return_exceptions: Literal[False] = False, **fields: Unpack[CallFields]
    ) -> Generator[Result, None, None]: ...
    @overload
    def as_completed(
        self, calls: Iterable[Call | str], *, return_exceptions: bool, **fields: Unpack[CallFields]
    ) -> Generator[Result | ExecError, None, None]: ...
    def as_completed(
        self, calls: Iterable[Call | str], *, return_exceptions: bool = False, **fields: Unpack[CallFields]
    ) -> Generator[Any, None, None]:
        """Run programs; each result as soon as it is there, `index` being the position in `calls`.

        See `AsyncClient.as_completed`.

        >>> with Client() as client:
        ...     sorted(result.index for result in client.as_completed(["print(1)", "print(2)"]))
        [0, 1]
        """
        calls = calls if isinstance(calls, str) else list(calls)
        return self._arrivals(lambda client: client.as_completed(calls, return_exceptions=return_exceptions, **fields))

    def _arrivals(self, start: Callable[[AsyncClient], AsyncIterator[T]]) -> Generator[T, None, None]:
        arrivals: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()

        async def pump(client: AsyncClient) -> None:
            async for outcome in start(client):
                arrivals.put((outcome,))

        pumping = self._submit(pump)
        # Whatever ends the pump, also its being cancelled before it began, ends the loop below.
        pumping.add_done_callback(lambda _: arrivals.put(None))
        try:
            while (arrival := arrivals.get()) is not None:
                yield arrival[0]
            _outcome(pumping)
        finally:
            pumping.cancel()

    def judge(self, judge: Judge | str, tests: Iterable[Test] | None = None, **fields: Unpack[JudgeFields]) -> Judgement:
        """Run one program on many tests. See `AsyncClient.judge`.

        >>> with Client() as client:
        ...     judgement = client.judge("print(int(input()) * 2)", [Test("3", "6"), Test("4", "8")])
        >>> judgement.verdict, judgement.score
        ('AC', 1.0)
        """
        tests = None if tests is None else list(tests)
        return self._wait(lambda client: client.judge(judge, tests, **fields))

    verify = _blocking(AsyncClient.verify)

    def verify_many(self, items: Iterable[Verify | tuple[str, str]], **fields: Unpack[VerifyFields]) -> list[Verification]:
        """Compare answers with truths, in their order. See `AsyncClient.verify_many`."""
        items = list(items)
        return self._wait(lambda client: client.verify_many(items, **fields))

    def session(self, *, rebuild: bool = False, **fields: Unpack[SessionFields]) -> Session:
        """A Python session, whose variables last from one cell to the next. See `AsyncClient.session`.

        with client.session() as session:
            session.run("x = 6")
            result = session.run("x * 7")  # result.value is '42'
        """

        async def make(client: AsyncClient) -> AsyncSession:
            return client.session(rebuild=rebuild, **fields)

        return Session(self, self._wait(make))

    cancel = _blocking(AsyncClient.cancel)
    info = _blocking(AsyncClient.info)

    def close(self) -> None:
        """Calls that still wait in other threads raise `ClientClosed`. Closing twice is fine."""
        with self._lock:
            self._closed = True
            finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, start: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        future = self._submit(start)
        try:
            return _outcome(future)
        except BaseException:
            future.cancel()  # Ctrl-C here gives the program up there
            raise

    def _submit(self, start: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        # Under the lock, so that nothing is handed to a loop that is about to stop and would never answer.
        with self._lock:
            if self._closed:
                raise ClientClosed("this client is closed")
            return self._started().submit(start)

    def _started(self) -> _LoopThread:
        if self._forked and self._kind is None:
            raise UsageError("the process forked and the client's own transport object stayed behind; make a new Client here")
        if self._forked and self._kind == "grpc":
            raise UsageError("gRPC does not work after a fork; start the process by spawn, or use HTTP")
        if self._thread is None:
            self._thread = _LoopThread(self._same(AsyncClient))
            self._finalizer = weakref.finalize(self, self._thread.stop)
        return self._thread

    def _after_fork(self) -> None:
        """In the child: threads did not come along, the lock may be held by one of them, sockets belong to the parent."""
        self._lock = threading.Lock()
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._thread is not None:
            self._forked = True
            _left_behind.append(self._thread)
        self._thread = self._finalizer = None


class Session:
    """`AsyncSession` for code that blocks. Made by `Client.session`."""

    def __init__(self, client: Client, session: AsyncSession) -> None:
        self._client, self._session = client, session

    @property
    def id(self) -> str:
        return self._session.id

    def start(self) -> Self:
        self._wait(lambda session: session.start())
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    run = _blocking(AsyncSession.run)
    rollback = _blocking(AsyncSession.rollback)
    interrupt = _blocking(AsyncSession.interrupt)
    put_files = _blocking(AsyncSession.put_files)
    fetch_files = _blocking(AsyncSession.fetch_files)
    info = _blocking(AsyncSession.info)
    close = _blocking(AsyncSession.close)

    def fork(self, n: int = 1, *, tags: Tags | None = None) -> list[Session]:
        """See `AsyncSession.fork`."""
        return [Session(self._client, made) for made in self._wait(lambda session: session.fork(n, tags=tags))]

    def _wait(self, start: Callable[[AsyncSession], Coroutine[Any, Any, T]]) -> T:
        return self._client._wait(lambda _: start(self._session))


class _LoopThread:
    """An event loop in a thread, and the AsyncClient on it. Does not know its Client, so that the Client can be collected."""

    def __init__(self, make_client: Callable[[], AsyncClient]) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = make_client()
        # A daemon, or the interpreter would wait for it before it runs the finalizer that stops it.
        self._thread = threading.Thread(target=self._main, name="exec-client", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def submit(self, start: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(start(self._client), self._loop)

    def stop(self) -> None:
        """Fail the waiting calls, close the connections, stop the loop and the thread."""
        shutting_down = asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop)
        if threading.current_thread() is self._thread:
            return  # the garbage collector may run this in the loop's own thread: waiting would deadlock
        shutting_down.result()
        self._thread.join()

    async def _shut_down(self) -> None:
        await self._client.aclose()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        if rest:  # those that were just failed pass their exception on before what is left is cancelled
            await asyncio.wait(rest, timeout=0.1)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        self._loop.call_soon(self._loop.stop)


def _outcome(future: concurrent.futures.Future[T]) -> T:
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise ClientClosed("the client was closed before this call was answered") from None


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
_left_behind: list[_LoopThread] = []
"""Loops of a parent process, kept so that no destructor closes in the child what the parent uses."""


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_reset_clients)


def _reset_clients() -> None:
    for client in list(_clients):
        client._after_fork()
