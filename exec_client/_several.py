"""One service behind several addresses, such as the gateways of a cluster that nothing stands in front of.

Requests go to the addresses in turn. One that does not answer, or says that it is not ready, rests for a while; a request that
cannot have reached it goes to the next at once. The caller decides whether a request that may have been started is
sent again (`exec_client._outbox`).
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from exec_client._transport import Transport
from exec_client.errors import ConnectionFailed, NotReady, Unavailable
from exec_wire import Call, Info, Judge, Judgement, Result, Selection, Verification, Verify

REST_S = 1.0

T = TypeVar("T")


class SeveralTransports:
    """At least one; each is closed with this."""

    def __init__(self, transports: Sequence[Transport], clock: Callable[[], float] = time.monotonic) -> None:
        self._transports, self._clock = list(transports), clock
        self._rests_until = [float("-inf")] * len(transports)
        self._turn = 0

    def send(self, calls: Sequence[Call], timeout_s: float, request_id: str = "") -> AsyncGenerator[Result, None]:
        return self._stream(lambda transport: transport.send(calls, timeout_s, request_id))

    def verify(self, items: Sequence[Verify], timeout_s: float) -> AsyncGenerator[Verification, None]:
        return self._stream(lambda transport: transport.verify(items, timeout_s))

    async def judge(self, judge: Judge, timeout_s: float) -> Judgement:
        return await self._one(lambda transport: transport.judge(judge, timeout_s))

    async def info(self, timeout_s: float) -> Info:
        return await self._one(lambda transport: transport.info(timeout_s))

    async def cancel(self, selection: Selection, timeout_s: float) -> int:
        return await self._one(lambda transport: transport.cancel(selection, timeout_s))

    async def ask(
        self, verb: str, path: str, answer: type[T], timeout_s: float, query: Any = None, body: msgspec.Struct | None = None
    ) -> T:
        return await self._one(lambda transport: transport.ask(verb, path, answer, timeout_s, query, body))

    async def aclose(self) -> None:
        for transport in self._transports:
            await transport.aclose()

    async def _stream(self, begin: Callable[[Transport], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        positions = list(self._in_turn())
        for position in positions:
            try:
                async with aclosing(begin(self._transports[position])) as answers:
                    async for answer in answers:
                        yield answer
                return
            except (ConnectionFailed, NotReady) as error:
                self._rest(position, error, last=position == positions[-1])

    async def _one(self, ask: Callable[[Transport], Awaitable[T]]) -> T:
        positions = list(self._in_turn())
        for position in positions:
            try:
                return await ask(self._transports[position])
            except (ConnectionFailed, NotReady) as error:
                self._rest(position, error, last=position == positions[-1])
        raise AssertionError("the last one answers or raises")

    def _in_turn(self) -> Iterator[int]:
        """Those that rest come last: they are still better than none."""
        first, self._turn = self._turn, (self._turn + 1) % len(self._transports)
        positions = [(first + step) % len(self._transports) for step in range(len(self._transports))]
        now = self._clock()
        yield from sorted(positions, key=lambda position: self._rests_until[position] > now)

    def _rest(self, position: int, error: Unavailable, *, last: bool) -> None:
        """Returns if the next one may be asked."""
        self._rests_until[position] = self._clock() + REST_S
        if last or (isinstance(error, ConnectionFailed) and error.sent):
            raise error
