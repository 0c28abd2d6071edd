"""A plain gRPC caller, without our client: what any other language would do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
import pytest

from exec_wire import proto
from exec_wire.messages.calls import Result
from exec_wire.problems import Problem


class Caller:
    def __init__(self, target: str, key: str = "") -> None:
        self.channel = grpc.aio.insecure_channel(target, [("grpc.max_receive_message_length", -1)])
        self.metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self.run_ = self.channel.unary_unary(f"/{proto.SERVICE}/Run")
        self.run_batch_ = self.channel.unary_stream(f"/{proto.SERVICE}/RunBatch")
        self.stream_ = self.channel.stream_stream(f"/{proto.SERVICE}/Stream")
        self.cancel_ = self.channel.unary_unary(f"/{proto.SERVICE}/Cancel")
        self.info_ = self.channel.unary_unary(f"/{proto.SERVICE}/Info")

    async def run(self, code: str, timeout: float = 20, **fields: Any) -> Result:
        request = proto.CALL.write(code=code, **fields)
        return result(proto.RESULT.read(await self.run_(request, timeout=timeout, metadata=self.metadata)))

    def batch(self, *calls: dict[str, Any], timeout: float = 20) -> Any:
        return self.run_batch_(proto.CALL_BATCH.write(calls=calls), timeout=timeout, metadata=self.metadata)

    def stream(self, timeout: float = 20) -> Any:
        return self.stream_(timeout=timeout, metadata=self.metadata)

    async def cancel(self, **selection: Any) -> int:
        answer = await self.cancel_(proto.SELECTION.write(**selection), timeout=30, metadata=self.metadata)
        return int(proto.CANCELLED.read(answer).get("cancelled", 0))


def result(fields: dict[str, Any]) -> Result:
    return msgspec.convert(fields, Result)


def results(message: bytes) -> list[Result]:
    return [result(fields) for fields in proto.RESULT_BATCH.read(message).get("results", [])]


async def all_results(answer: Any) -> list[Result]:
    """All that come until the end; by `read`, which may not be mixed with iteration."""
    got: list[Result] = []
    while (message := await answer.read()) is not grpc.aio.EOF:
        got += results(message)
    return got


def calls(*codes: str, **fields: Any) -> bytes:
    return proto.CALL_BATCH.write(calls=[{"code": code, **fields} for code in codes])


@asynccontextmanager
async def caller(target: str, key: str = "") -> AsyncIterator[Caller]:
    made = Caller(target, key)
    try:
        yield made
    finally:
        await made.channel.close()


class Refused:
    """`with refused("INVALID_ARGUMENT", "bad_field") as told:` and then `told.problem`."""

    def __init__(self, status: str, code: str) -> None:
        self._status, self._code = status, code
        self.problem = Problem("", "", 0)

    def __enter__(self) -> Refused:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if not isinstance(error, grpc.aio.AioRpcError):
            pytest.fail(f"not refused: {error!r}") if error is None else None
            return False
        trailing = dict(error.trailing_metadata() or ())
        assert (error.code().name, trailing.get(proto.CODE)) == (self._status, self._code), error
        self.problem = msgspec.json.decode(trailing[proto.PROBLEM], type=Problem)
        assert self.problem.code == self._code
        assert self.problem.request_id == trailing["x-request-id"]
        return True


refused = Refused


async def drained(answer: Any, patience_s: float = 120) -> Any:
    """The status that a call ends with."""
    async with asyncio.timeout(patience_s):
        return await answer.code()
