"""The client for programs with an event loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, Self, TypeVar, Unpack, overload

from exec_client import judging
from exec_client._calls import CallFields, make, make_call, make_selection
from exec_client._outbox import Outbox
from exec_client._retry import Policy, send_until_answered
from exec_client._transport import Transport, TransportName, make_transport, with_key
from exec_client.errors import BadRequest, ClientClosed, ExecError, WrongEventLoop
from exec_client.judging import JudgeFields, VerifyFields
from exec_client.sessions import SPEC, AsyncSession, SessionFields
from exec_wire import Call, Info, Judge, Judgement, Result, Test, Verification, Verify

C = TypeVar("C", bound="ClientSettings")

CLOSE_S = 2.0  # for requests to cancel, before the client closes without their answers


class ClientSettings:
    """The arguments of both clients. A client is pickled by these: the copy opens connections of its own."""

    def __init__(
        self,
        base_url: str = "",
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        transport: Transport | TransportName | None = None,
        policy: Policy = Policy(),  # noqa: B008 (frozen)
    ) -> None:
        self._base_url = base_url
        self._headers = with_key(headers, api_key)
        self._given_transport = transport
        self._policy = policy
        self._closed = False
        self._prepare()

    def _prepare(self) -> None:
        raise NotImplementedError

    def __reduce__(self) -> tuple[object, ...]:
        if not isinstance(self._given_transport, str | None):
            raise TypeError("a client with a transport object of its own cannot be pickled; make it where it is used")
        return self._same(type(self)), ()

    def _same(self, client: type[C]) -> Callable[[], C]:
        """Makes a client with the same settings."""
        given = {"headers": self._headers, "transport": self._given_transport, "policy": self._policy}
        return partial(client, self._base_url, **given)  # type: ignore[arg-type]


class AsyncClient(ClientSettings):
    """Runs programs in the sandboxes of an exec service.

    >>> async with AsyncClient() as client:
    ...     result = await client.run("print(6 * 7)")
    >>> result.status, result.stdout
    ('ok', '42\\n')

    Concurrent `run`s share requests and connections by themselves (`exec_client._outbox` tells how), so thousands of tasks may
    call `run` at once. A `Result` comes back for everything the program did: an error, a time-out, too much output. What the
    service did wrong is retried within the call's `deadline_s` and then raised as `Unavailable`; it is never a `Result`.

    `api_key` is that of a service that asks for one; if it is not given, the variable EXEC_API_KEY is looked at.
    `transport="grpc"`, or an address that begins with grpc://, speaks gRPC; an object in place of HTTP is closed with the
    client. One client belongs to one event loop.
    """

    def _prepare(self) -> None:
        given = self._given_transport
        self._transport = make_transport(self._base_url, self._headers, given) if isinstance(given, str | None) else given
        self._outbox: Outbox | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cancelling: set[asyncio.Task[int]] = set()  # requests to cancel by tags

    async def run(self, call: Call | str, **fields: Unpack[CallFields]) -> Result:
        """Run one program: its code, or a `Call`; keywords are fields of `Call` and win over it.

        >>> async with AsyncClient() as client:
        ...     result = await client.run("print(input())", stdin="hello", deadline_s=30)
        >>> result.tool_text()
        'hello'

        Cancelling the task that awaits this gives the program up.
        """
        return await self._bound().put(*make_call(call, fields))

    @overload
    async def run_many(
        self, calls: Iterable[Call | str], *, return_exceptions: Literal[False] = False, **fields: Unpack[CallFields]
    ) -> list[Result]: ...
    @overload
    async def run_many(
        self, calls: Iterable[Call | str], *, return_exceptions: bool, **fields: Unpack[CallFields]
    ) -> list[Result | ExecError]: ...
    async def run_many(
        self, calls: Iterable[Call | str], *, return_exceptions: bool = False, **fields: Unpack[CallFields]
    ) -> list[Result] | list[Result | ExecError]:
        """Run programs; their results in the order of `calls`. `fields` hold for each of them.

        >>> async with AsyncClient() as client:
        ...     results = await client.run_many(["print(1)", "print(2)"], tags=Tags(step=7))
        >>> [result.stdout for result in results]
        ['1\\n', '2\\n']

        As with `asyncio.gather`: the first call that ends without a result raises, and the rest is given up; with
        `return_exceptions=True` every call is waited for and the exceptions stand in the list where the results would. A
        trainer wants the second, so that it can leave those samples out of the loss and keep the others.
        """
        futures = self._put_all(calls, fields, return_exceptions)
        try:
            return await asyncio.gather(*futures, return_exceptions=return_exceptions)  # type: ignore[return-value]
        finally:
            _give_up(futures)

    @overload
    def as_completed(
        self, calls: Iterable[Call | str], *, return_exceptions: Literal[False] = False, **fields: Unpack[CallFields]
    ) -> AsyncGenerator[Result, None]: ...
    @overload
    def as_completed(
        self, calls: Iterable[Call | str], *, return_exceptions: bool, **fields: Unpack[CallFields]
    ) -> AsyncGenerator[Result | ExecError, None]: ...
    def as_completed(
        self, calls: Iterable[Call | str], *, return_exceptions: bool = False, **fields: Unpack[CallFields]
    ) -> AsyncGenerator[Any, None]:
        """Run programs; each result as soon as it is there, `index` being the position in `calls`.

        >>> async with AsyncClient() as client:
        ...     lengths = {r.index: len(r.stdout) async for r in client.as_completed(["print(1)", "print(100)"])}
        >>> sorted(lengths.items())
        [(0, 2), (1, 4)]

        Exceptions as in `run_many`; they have an `index` too. The programs start with the first iteration; closing the iterator
        gives up those that are not finished.
        """
        return self._arrivals(calls, fields, return_exceptions)

    async def _arrivals(
        self, calls: Iterable[Call | str], fields: CallFields, return_exceptions: bool
    ) -> AsyncGenerator[Result | BaseException, None]:
        arrivals: asyncio.Queue[asyncio.Future[Result]] = asyncio.Queue()
        futures = self._put_all(calls, fields, return_exceptions)
        for future in futures:
            future.add_done_callback(arrivals.put_nowait)
        try:
            for _ in futures:
                future = await arrivals.get()
                error = future.exception()
                yield error if error is not None and return_exceptions else future.result()
        finally:
            _give_up(futures)

    async def judge(self, judge: Judge | str, tests: Iterable[Test] | None = None, **fields: Unpack[JudgeFields]) -> Judgement:
        """Run one program on many tests: its code and the tests, or a `Judge`; keywords are its fields and win over it.

        >>> async with AsyncClient() as client:
        ...     judgement = await client.judge("print(int(input()) * 2)", [Test("3", "6"), Test("4", "9")])
        >>> judgement.verdict, judgement.score, [test.verdict for test in judgement.tests]
        ('WA', 0.5, ['AC', 'WA'])

        A test that could not be judged, through no fault of the program, is INFRA; then `score` is None: leave the sample out.
        """
        self._bound()
        return await judging.judge(self._transport, self._policy, judging.make_judge(judge, tests, fields))

    async def verify(self, answer: str, truth: str, **fields: Unpack[VerifyFields]) -> Verification:
        """Is a model's answer equal to the truth? Keywords are the other fields of `Verify`.

        >>> async with AsyncClient() as client:
        ...     verification = await client.verify(r"It is \\boxed{\\frac{1}{2}}.", "0.5")
        >>> verification.equal
        True

        `equal` is None if that could not be found out and the model is not to blame.
        """
        return (await self.verify_many([(answer, truth)], **fields))[0]

    async def verify_many(
        self, items: Iterable[Verify | tuple[str, str]], **fields: Unpack[VerifyFields]
    ) -> list[Verification]:
        """Compare answers with truths: pairs of both, or `Verify`s; in their order. `fields` hold for each of them.

        >>> async with AsyncClient() as client:
        ...     found = await client.verify_many([("7", "7"), ("8", "9")], kind="numeric")
        >>> [verification.equal for verification in found]
        [True, False]
        """
        self._bound()
        return await judging.verify_all(self._transport, self._policy, items, fields)

    def session(self, *, rebuild: bool = False, **fields: Unpack[SessionFields]) -> AsyncSession:
        """A Python session, whose variables last from one cell to the next; keywords are fields of `SessionSpec`.

            async with client.session() as session:
                await session.run("x = 6")
                result = await session.run("x * 7")  # result.value is '42'

        `rebuild`: a lost session is created again and its cells run again, which is right for deterministic cells.
        """
        self._bound()
        return AsyncSession(self._transport, self._policy, make(SPEC, (), fields)[0], rebuild)

    async def cancel(
        self,
        *,
        run: str | None = None,
        step: int | None = None,
        group: str | None = None,
        rollout: str | None = None,
        tenant: str = "",
        timeout_s: float = 10.0,
    ) -> int:
        """Cancel the calls whose tags have all of these values, from any client; returns their number.

        >>> async with AsyncClient() as client:
        ...     await client.cancel(run="no-such-run", step=7)
        0

        Their callers get a `Result` with the status `cancelled`: at once if the program has not started, else when it is dead.
        Calls of this client that wait to be sent count too. A call of this client whose request is under way at this moment is
        cancelled when it arrives, and may not be counted. Cancelling the task that awaits this does not stop it.
        """
        selection = make_selection(run, step, group, rollout, tenant)
        withdrawn = self._bound().withdraw(selection)
        asking = asyncio.create_task(send_until_answered(partial(self._transport.cancel, selection), self._policy, timeout_s))
        self._cancelling.add(asking)
        asking.add_done_callback(self._asked_to_cancel)
        return withdrawn + await asyncio.shield(asking)

    def _asked_to_cancel(self, asking: asyncio.Task[int]) -> None:
        self._cancelling.discard(asking)
        if not asking.cancelled():
            asking.exception()  # seen: the task that waited for it may be gone
        if self._outbox is not None:
            self._outbox.cancel_withdrawn()

    async def info(self, timeout_s: float = 10.0) -> Info:
        """Information on the service: version, isolation tier, slots, limits."""
        self._bound()
        return await send_until_answered(self._transport.info, self._policy, timeout_s)

    async def aclose(self) -> None:
        """Calls that still wait raise `ClientClosed`. Closing twice is fine."""
        if self._loop is not None:
            self._check_loop()
        if self._closed:
            return
        self._closed = True
        if self._cancelling:
            await asyncio.wait(self._cancelling, timeout=CLOSE_S)
        if self._outbox is not None:
            await self._outbox.aclose()
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        self._bound()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _bound(self) -> Outbox:
        """The outbox, made on first use, when the event loop is known."""
        if self._closed:
            raise ClientClosed("this client is closed")
        if self._outbox is None:
            self._loop = asyncio.get_running_loop()
            self._outbox = Outbox(self._transport, self._policy, self._headers.get("x-request-id", ""))
        self._check_loop()
        return self._outbox

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise WrongEventLoop(
                "this AsyncClient belongs to another event loop (that of its first use); "
                "make one per loop, or use Client, which any thread and loop may share"
            )

    def _put_all(
        self, calls: Iterable[Call | str], fields: CallFields, return_exceptions: bool
    ) -> list[asyncio.Future[Result]]:
        """All are checked before the first one leaves: a wrong one raises while nothing has run yet."""
        if isinstance(calls, str):
            raise TypeError("calls is a list of programs; for a single one there is run()")
        outbox = self._bound()
        checked = [_checked(call, fields, index, return_exceptions) for index, call in enumerate(calls)]
        return [
            _failed(made) if isinstance(made, BadRequest) else outbox.put(*made, index) for index, made in enumerate(checked)
        ]


def _checked(call: Call | str, fields: CallFields, index: int, return_exceptions: bool) -> tuple[Call, int] | BadRequest:
    try:
        return make_call(call, fields)
    except BadRequest as error:
        error.index = index
        if not return_exceptions:
            raise
        return error


def _failed(error: ExecError) -> asyncio.Future[Result]:
    future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


def _give_up(futures: list[asyncio.Future[Result]]) -> None:
    for future in futures:
        if not future.cancel() and not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not log it
