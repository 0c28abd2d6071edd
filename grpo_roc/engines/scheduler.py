"""Which engine a rollout goes to, and when. Itself an engine, so that rollouts do not notice.

    static          as many rollouts to each, at once
    least_inflight  to the one with the fewest, at once
    dynamic         by room in the KV cache: a rollout waits until an engine can hold all that it may become

`dynamic` trusts its own table of reservations; what engines report lags behind and is only read to learn their capacity and to
see preemptions. A rollout stays on its engine for all its turns, where its prefix is cached. Nothing waits for a turn to end.

Reservations: `safe` takes prompt + longest response, so nothing can overflow, and holds far more than is used: most rollouts
stay shorter, and those that do not are long at different times. `adaptive` takes what a rollout that is under way came to on
the average of late, and keeps two standard deviations of their sum free; it promises c times an engine's cache, where c grows
by 0.02, up to 2, with each rollout that ends in peace and shrinks by 0.7 when an engine preempts (AIMD). What makes this safe
is a gate before every turn: it waits until the tokens that are there, what the turns under way may still say, and what this one
may say fit together, again by average and two standard deviations. A rollout that waits holds its cache, and nothing is
computed twice.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_roc import config
from grpo_roc.engines.base import Engine, EngineError, Generated, Load, Sampling

RECENT = 256
LEARNED = 16  # lengths; before that, `adaptive` is `safe`
MOST, STEP = 2.0, 0.02


class Seat:
    """An engine, and what is promised of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.capacity = 0  # tokens that may be promised
        self.reserved = 0
        self.inflight = 0
        self.served = 0
        self.preempted = 0
        self.overcommit = 1.0
        self.speaking: dict[str, int] = {}  # tokens that a rollout will have at the end of its turn
        self.silent: dict[str, int] = {}  # tokens that it has while it waits for a tool or for the gate
        self.gate: deque[tuple[str, int, int, asyncio.Future[None]]] = deque()

    @property
    def room(self) -> float:
        return self.capacity * self.overcommit - self.reserved


class Scheduler:
    name = "scheduler"

    def __init__(self, engines: Sequence[Engine], settings: config.Scheduler) -> None:
        if not engines:
            raise config.ConfigError("engines: there must be at least one")
        self.settings = settings
        self.seats = [Seat(engine) for engine in engines]
        self._placed: dict[str, tuple[Seat, int]] = {}
        self._waiting: deque[tuple[str, int, int, asyncio.Future[Seat]]] = deque()
        self._lengths: deque[int] = deque(maxlen=RECENT)
        self._turns: deque[int] = deque(maxlen=RECENT)
        self._seen: dict[str, int] = {}
        self._next = 0
        self._looked = float("-inf")

    # -- an engine to rollouts --------------------------------------------------------------------------------------------

    async def generate(self, request_id: str, ids: list[int], sampling: Sampling) -> Generated:
        if request_id not in self._placed:
            await self._place(request_id, len(ids), sampling.max_new)
        seat, _ = self._placed[request_id]
        await self._through_gate(seat, request_id, len(ids), sampling.max_new)
        generated = await seat.engine.generate(request_id, ids, sampling)
        self._seen[request_id] = len(ids) + len(generated.ids)
        self.end_turn(request_id, len(ids), len(generated.ids))
        self._open_gate(seat)
        if generated.preempted:
            self.shrink(seat)
        return generated

    async def release(self, request_id: str) -> None:
        seat = self.forget(request_id, self._seen.pop(request_id, 0))
        self._admit()
        if seat is not None:
            self._open_gate(seat)
            await seat.engine.release(request_id)

    async def load(self) -> Load:
        loads = [await seat.engine.load() for seat in self.seats]
        return Load(*(sum(values) for values in zip(*loads, strict=True)))

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        await asyncio.gather(*(seat.engine.update_weights(weights, version) for seat in self.seats))

    async def aclose(self) -> None:
        await asyncio.gather(*(seat.engine.aclose() for seat in self.seats))

    # -- placing ----------------------------------------------------------------------------------------------------------

    async def _place(self, request_id: str, prompt: int, max_new: int) -> None:
        await self._look()
        future: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        self._waiting.append((request_id, prompt, max_new, future))
        self._admit()
        try:
            await future
        except asyncio.CancelledError:
            self._waiting = deque(one for one in self._waiting if one[0] != request_id)
            raise

    def _admit(self) -> None:
        """First come, first served."""
        while self._waiting:
            request_id, prompt, max_new, future = self._waiting[0]
            seat = self.try_place(request_id, prompt, max_new)
            if seat is None:
                return
            self._waiting.popleft()
            if not future.done():
                future.set_result(seat)

    def try_place(self, request_id: str, prompt: int, max_new: int) -> Seat | None:
        """A seat for this rollout, taken at once; None: there is no room now."""
        if self.settings.mode == "static":
            self._next += 1
            return self._sit(request_id, self.seats[(self._next - 1) % len(self.seats)], 0)
        if self.settings.mode == "least_inflight":
            return self._sit(request_id, min(self.seats, key=lambda seat: seat.inflight), 0)
        needed = self.reservation(prompt, max_new)
        seat = max(self.seats, key=lambda seat: seat.room - self._spread(seat))
        # A rollout that no promise covers runs alone: waiting would not make it smaller.
        if needed > seat.room - self._spread(seat) and any(seat.inflight for seat in self.seats):
            return None
        return self._sit(request_id, seat, needed)

    def _sit(self, request_id: str, seat: Seat, reserved: int) -> Seat:
        seat.reserved += reserved
        seat.inflight += 1
        seat.served += 1
        self._placed[request_id] = (seat, reserved)
        return seat

    def forget(self, request_id: str, length: int) -> Seat | None:
        """The rollout is over; it came to `length` tokens."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return None
        seat, reserved = placed
        seat.speaking.pop(request_id, None)
        seat.silent.pop(request_id, None)
        seat.reserved -= reserved
        seat.inflight -= 1
        self._lengths.append(length)
        if self.settings.reserve == "adaptive":
            seat.overcommit = min(MOST, seat.overcommit + STEP)
        return seat

    def reservation(self, prompt: int, max_new: int) -> int:
        longest = prompt + max_new
        if self.settings.reserve == "safe" or len(self._lengths) < LEARNED:
            return longest
        return min(longest, under_way(self._lengths))

    def _spread(self, seat: Seat) -> float:
        """Two standard deviations of what this engine's rollouts will need, taken together."""
        if self.settings.reserve == "safe" or len(self._lengths) < LEARNED:
            return 0.0
        return 2 * statistics.pstdev(self._lengths) * math.sqrt(seat.inflight + 1)

    def shrink(self, seat: Seat) -> None:
        """It preempted: promise less of it."""
        if self.settings.reserve == "adaptive":
            seat.overcommit = max(0.25, 0.7 * seat.overcommit)

    # -- turns ------------------------------------------------------------------------------------------------------------

    async def _through_gate(self, seat: Seat, request_id: str, length: int, max_new: int) -> None:
        if not seat.gate and self.try_turn(request_id, length, max_new):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        seat.gate.append((request_id, length, max_new, future))
        self._open_gate(seat)
        try:
            await future
        except asyncio.CancelledError:
            seat.gate = deque(one for one in seat.gate if one[0] != request_id)
            raise

    def _open_gate(self, seat: Seat) -> None:
        while seat.gate and self.try_turn(*seat.gate[0][:3]):
            future = seat.gate.popleft()[3]
            if not future.done():
                future.set_result(None)

    def try_turn(self, request_id: str, length: int, max_new: int) -> bool:
        """May this rollout, now of `length` tokens, speak? If so it is counted as speaking."""
        if self.settings.reserve == "safe" or self.settings.mode != "dynamic":
            return True
        seat, _ = self._placed[request_id]
        seat.silent[request_id] = length
        learned = len(self._turns) >= LEARNED
        end = length + (min(max_new, under_way(self._turns)) if learned else max_new)
        others = sum(seat.speaking.values()) + sum(seat.silent.values()) - length
        spread = 2 * statistics.pstdev(self._turns) * math.sqrt(len(seat.speaking) + 1) if learned else 0.0
        if end + others + spread > seat.capacity and seat.speaking:
            return False
        del seat.silent[request_id]
        seat.speaking[request_id] = end
        return True

    def end_turn(self, request_id: str, length: int, said: int) -> None:
        seat, _ = self._placed[request_id]
        seat.speaking.pop(request_id, None)
        seat.silent[request_id] = length + said
        self._turns.append(said)

    # -- what engines say -------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Capacity and preemptions, at most every `poll_s`."""
        if time.monotonic() - self._looked < self.settings.poll_s:
            return
        self._looked = time.monotonic()
        for seat in self.seats:
            load = await seat.engine.load()
            if load.capacity <= 0:
                raise EngineError(f"{seat.engine.name} says that its cache holds {load.capacity} tokens")
            seat.capacity = int(load.capacity * self.settings.util)
            if load.preempted > seat.preempted and seat.inflight:
                self.shrink(seat)
            seat.preempted = load.preempted


def under_way(lengths: Sequence[int]) -> int:
    """The average of what is under way at some moment. Long ones are so more often: sum of squares over sum, not the mean."""
    return math.ceil(sum(length**2 for length in lengths) / max(1, sum(lengths)))
