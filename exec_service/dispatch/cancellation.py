"""Cancelling calls by their tags, or by the id of their request: here, and at the other gateways."""

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

from msgspec import UNSET

from exec_service.dispatch.call_table import CallTable
from exec_service.dispatch.tickets import Ticket
from exec_wire.messages.calls import Selection
from exec_wire.queue.early_cancels import EarlyCancels
from exec_wire.queue.protocol import GatewayQueue, QueueUnavailable

log = logging.getLogger("exec_service.dispatch")

CANCELS_PER_TURN = 500  # of the event loop: answering one takes about 20 µs
RETRY_S = 0.5


class Cancellation:
    def __init__(
        self, table: CallTable, queue: GatewayQueue, cancel_ticket: Callable[[Ticket], bool], clock: Callable[[], float]
    ) -> None:
        self._table, self._queue, self._cancel_ticket = table, queue, cancel_ticket
        self._tasks: set[asyncio.Task[int]] = set()  # each until every gateway has answered
        # By tenant, request id and index; None in place of an index stands for all.
        self.early: EarlyCancels[tuple[str, str, int | None]] = EarlyCancels(clock)

    async def cancel(self, selection: Selection) -> int:
        """Cancel the selected calls here and at other gateways; returns how many.

        A waiting call is answered at once, a running one when its program was killed. This runs in a task of its own: it goes
        on when the caller disconnects, and `finish` waits for it.
        """
        task = asyncio.create_task(self._cancel_everywhere(selection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def finish(self, timeout_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def was_early(self, ticket: Ticket) -> bool:
        """Whether the call was cancelled before it was accepted here."""
        request = ticket.request.origin.request_id
        return (ticket.tenant, request, None) in self.early or self.early.take((ticket.tenant, request, ticket.index))

    async def serve_other_gateways(self) -> NoReturn:
        while True:
            try:
                for ask in await self._queue.asked():
                    await self._queue.tell(ask, await self._cancel_here(ask.selection))
            except QueueUnavailable:
                await asyncio.sleep(RETRY_S)

    async def _cancel_everywhere(self, selection: Selection) -> int:
        here = await self._cancel_here(selection)
        try:
            return here + await self._queue.ask_others(selection)
        except QueueUnavailable as unavailable:
            log.warning("cannot ask other gateways to cancel: %s", unavailable)
            return here

    async def _cancel_here(self, selection: Selection) -> int:
        picked = self._select_of_request(selection) if selection.request is not UNSET else self._select(selection)
        count = 0
        for position, ticket in enumerate(picked, 1):
            count += self._cancel_ticket(ticket)
            if position % CANCELS_PER_TURN == 0:
                await asyncio.sleep(0)
        return count

    def _select(self, selection: Selection) -> list[Ticket]:
        jobs = [job for job in self._table.jobs.values() if not job.cancelling]
        return [ticket for job in jobs for ticket in job.tickets if selection.picks(ticket.tags, ticket.tenant)]

    def _select_of_request(self, selection: Selection) -> list[Ticket]:
        """An index without a call is remembered: the request may be on its way, or have come to another gateway."""
        request, wanted = str(selection.request), set(selection.index)
        pending = [ticket for one in self._table.requests.get(request, ()) for ticket in one.pending]
        picked = [
            ticket
            for ticket in pending
            if (not wanted or ticket.index in wanted) and selection.picks(ticket.tags, ticket.tenant)
        ]
        if not selection.names_a_tag:  # tags are compared with calls that are here
            for index in wanted.difference(ticket.index for ticket in picked):
                self.early.add((selection.tenant, request, index))
            if not wanted and not picked:
                self.early.add((selection.tenant, request, None))
        return picked
