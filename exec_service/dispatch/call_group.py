"""The calls of one request that takes several, such as a judgement: admitted together, made when the request comes to them."""

import asyncio
from collections.abc import Collection
from typing import Any

import msgspec

from exec_service.dispatch.admission import Reservation
from exec_service.dispatch.dispatch import Dispatch
from exec_service.dispatch.requests import Origin
from exec_wire.messages.calls import Call, Result, Tags, verdict

RETRIES = 3
PAUSE_S = 0.1  # before the first retry; doubled each time
LEAST_PLACES = 16


class CallGroup:
    """`run` makes a call, and makes it again when we were at fault. A call's `deadline_s` counts from the group's beginning.

    Only as many calls of an group are in the line at once as keep the workers busy: a judgement of a thousand tests holds few
    copies of its program, and lets others pass.
    """

    def __init__(self, dispatch: Dispatch, room: Reservation, origin: Origin) -> None:
        self._dispatch, self._room, self.origin = dispatch, room, origin
        self._began_at = asyncio.get_running_loop().time()
        self._places = asyncio.Semaphore(places(dispatch))
        self._cancelled: set[tuple[str, Tags]] = set()

    def _left_s(self, call: Call) -> float:
        return self._began_at + call.deadline_s - asyncio.get_running_loop().time()

    async def run(self, call: Call) -> Result:
        pause_s = PAUSE_S
        for _ in range(RETRIES):
            result = await self._run_once(call)
            if not result.retryable or self._dispatch.draining or self._left_s(call) <= pause_s:
                return result
            await asyncio.sleep(pause_s)
            pause_s *= 2
        return await self._run_once(call)

    async def _run_once(self, call: Call) -> Result:
        async with self._places:
            if (call.tenant, call.tags) in self._cancelled:
                return verdict("cancelled")
            if (left_s := self._left_s(call)) <= 0:
                return verdict("expired", error="the deadline passed before this was run")
            calls = [msgspec.structs.replace(call, deadline_s=left_s)]
            async with self._dispatch.run(calls, self.origin, room=self._room) as request:
                await request.changed.wait()
                result = request.arrived[0]
        if result.status == "cancelled":  # who cancels by tags means also what is not in the line yet
            self._cancelled.add((call.tenant, call.tags))
        return result


def places(dispatch: Dispatch) -> int:
    return max(LEAST_PLACES, 2 * dispatch.window)


def raise_first(tasks: Collection[asyncio.Task[Any]]) -> None:
    """If one of them failed, which nobody expects, its exception."""
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
