"""Which engine a rollout runs on, and when. The scheduler is an engine itself.

    static          round robin, at once
    least_inflight  to the engine with the fewest rollouts, at once
    dynamic         by free KV cache: a rollout waits until an engine has room for its reservation

`dynamic` keeps its own table of reservations; the engines' reports lag behind and only tell capacity and preemptions. A rollout
stays on its engine for all its turns, where its prefix is cached. No rollout waits for the turns of others.

A `safe` reservation is prompt + longest response. Nothing can overflow, but much cache stays unused, because most rollouts are
shorter. An `adaptive` reservation is the mean length of recent rollouts in progress, and two standard deviations of their sum
stay free. The scheduler hands out c times an engine's cache, where c grows by 0.02 (up to 2) with every rollout that ends and
shrinks by 0.7 when an engine preempts (AIMD). To be safe, every turn passes a gate: it waits until the cached tokens, the
expected rest of the turns in progress and the expected length of this turn fit, again by mean and two standard deviations. A
rollout at the gate keeps its cache, so nothing is computed twice.

An engine that fails, hangs or has other weights than it should is lost: its rollouts continue on others, and it is used again
when it answers and has the weights. While no engine is left, rollouts wait for `patience_s`.
"""

import asyncio
import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence

from tqdm import tqdm

from grpo_roc import config
from grpo_roc.engines.base import Engine, EngineError, EngineUnavailable, Generated, Load, Sampling
from grpo_roc.engines.weights import Weights

RECENT = 256
LEARNED = 16  # observed lengths; with fewer, `adaptive` acts as `safe`
MAX_OVERCOMMIT, OVERCOMMIT_STEP = 2.0, 0.02
ATTEMPTS = 10  # of one turn: after so many failures the request is at fault and not the engines
RETRY_S = (0.2, 10.0)  # between attempts to reach a lost engine: the first wait, doubled up to the second


class _Turn:
    """A turn that waits in a queue."""

    def __init__(self, request_id: str, length: int, max_new: int) -> None:
        self.size = (request_id, length, max_new)
        self._admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def admit(self) -> None:
        if not self._admitted.done():
            self._admitted.set_result(None)

    def fail(self, error: EngineError) -> None:
        if not self._admitted.done():
            self._admitted.set_exception(error)

    async def admitted_from(self, queue: "deque[_Turn]") -> None:
        try:
            await self._admitted
        except asyncio.CancelledError:
            if self in queue:
                queue.remove(self)
            raise


class TrackedEngine:
    """An engine and its reservations."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.capacity = 0  # tokens that can be reserved
        self.reserved = 0
        self.inflight = 0
        self.served = 0
        self.preempted = 0
        self.overcommit = 1.0
        self.generating: dict[str, int] = {}  # expected tokens of a rollout at the end of its turn
        self.idle: dict[str, int] = {}  # tokens of a rollout that waits for a tool or at the gate
        self.gate: deque[_Turn] = deque()
        self.calls: set[asyncio.Future[Generated]] = set()
        self.watch: asyncio.Task[None] | None = None  # notices when it hangs
        self.recovery: asyncio.Task[None] | None = None  # of a lost engine
        self.weights: Weights | None = None  # that it loaded last

    @property
    def usable(self) -> bool:
        return self.recovery is None

    @property
    def free(self) -> float:
        return self.capacity * self.overcommit - self.reserved


class Scheduler:
    name = "scheduler"

    def __init__(self, engines: Sequence[Engine], settings: config.Scheduler) -> None:
        if not engines:
            raise config.ConfigError("engines: at least one is needed")
        self.settings = settings
        self.engines = [TrackedEngine(engine) for engine in engines]
        self._assigned: dict[str, tuple[TrackedEngine, int]] = {}
        self._waiting: deque[_Turn] = deque()
        self._lengths: deque[int] = deque(maxlen=RECENT)
        self._turns: deque[int] = deque(maxlen=RECENT)
        self._length_of: dict[str, int] = {}
        self._next = 0
        self._polled_at = float("-inf")
        self._weights: Weights | None = None
        self.losses = 0  # how often an engine was lost

    # -- the engine protocol ----------------------------------------------------------------------------------------------

    async def generate(self, request_id: str, ids: list[int], sampling: Sampling) -> Generated:
        for attempt in range(ATTEMPTS):
            tracked = await self._engine_of(request_id, len(ids), sampling.max_new)
            try:
                await self._pass_gate(tracked, request_id, len(ids), sampling.max_new)
                generated = await self._call(tracked, request_id, ids, sampling)
                break
            except EngineUnavailable as error:
                self._lose(tracked, error)
                self._unassign(request_id)
                if attempt == ATTEMPTS - 1:
                    raise
        self._length_of[request_id] = len(ids) + len(generated.ids)
        self.end_turn(request_id, len(ids), len(generated.ids))
        self._open_gate(tracked)
        if generated.preempted:
            self.shrink(tracked)
        return generated

    async def release(self, request_id: str) -> None:
        tracked = self.end_rollout(request_id, self._length_of.pop(request_id, 0))
        self._admit()
        if tracked is not None:
            self._open_gate(tracked)
            await tracked.engine.release(request_id)

    async def load(self) -> Load:
        loads = [await tracked.engine.load() for tracked in self.engines if tracked.usable]
        return Load(*(sum(values) for values in zip(*loads, strict=True)))

    async def update_weights(self, weights: Weights) -> None:
        """Give all engines the weights. A lost one gets them when it is back."""
        previous, self._weights = self._weights, weights
        await asyncio.gather(*(self._push(tracked, weights) for tracked in self.engines if tracked.usable))
        if not all(tracked.usable for tracked in self.engines):
            await weights.folder()  # the next training step changes the tensors
        weights.keep_files_only()
        if previous is not None:
            previous.discard()

    async def check(self) -> None:
        for tracked in self.engines:
            await tracked.engine.check()

    async def aclose(self) -> None:
        tasks = [task for tracked in self.engines for task in (tracked.watch, tracked.recovery) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(tracked.engine.aclose() for tracked in self.engines))
        if self._weights is not None:
            self._weights.discard()

    # -- lost engines -----------------------------------------------------------------------------------------------------

    async def _call(self, tracked: TrackedEngine, request_id: str, ids: list[int], sampling: Sampling) -> Generated:
        call = asyncio.ensure_future(tracked.engine.generate(request_id, ids, sampling))
        tracked.calls.add(call)
        if tracked.watch is None or tracked.watch.done():
            tracked.watch = asyncio.create_task(self._watch(tracked))
        try:
            return await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise EngineUnavailable(f"{tracked.engine.name} does not answer") from None
            raise
        finally:
            call.cancel()
            tracked.calls.discard(call)

    async def _watch(self, tracked: TrackedEngine) -> None:
        """End the calls of an engine that does not answer two checks in a row."""
        misses = 0
        while tracked.calls:
            await asyncio.sleep(self.settings.check_s)
            try:
                await tracked.engine.check()
                misses = 0
            except EngineError as error:
                misses += 1
                if misses > 1:
                    self._lose(tracked, error)
                    for call in tracked.calls:
                        call.cancel()
                    return

    def _lose(self, tracked: TrackedEngine, error: EngineError) -> None:
        """Use other engines from now on, until this one is back."""
        if not tracked.usable:
            return
        self.losses += 1
        tqdm.write(f"engine lost: {error}")
        tracked.recovery = asyncio.create_task(self._recover(tracked))
        while tracked.gate:
            tracked.gate.popleft().fail(EngineUnavailable(str(error)))
        self._admit()

    async def _recover(self, tracked: TrackedEngine) -> None:
        began, (wait, longest) = time.monotonic(), RETRY_S
        while True:
            weights = self._weights
            try:
                await self._resync(tracked, weights)
                if weights is self._weights:  # else newer ones came meanwhile
                    break
            except EngineError as error:
                if time.monotonic() - began > self.settings.patience_s and not any(one.usable for one in self.engines):
                    self._give_up(error)
                await asyncio.sleep(wait)
                wait = min(2 * wait, longest)
        tqdm.write(f"engine back after {time.monotonic() - began:.0f} s: {tracked.engine.name}")
        tracked.recovery = None
        self._polled_at = float("-inf")
        self._admit()

    @staticmethod
    async def _resync(tracked: TrackedEngine, weights: Weights | None) -> None:
        """It may have failed for a moment, or have restarted with other weights."""
        if tracked.weights is weights:
            with contextlib.suppress(EngineUnavailable):
                return await tracked.engine.check()
        if weights is None:
            return await tracked.engine.check()
        await tracked.engine.update_weights(weights)
        tracked.weights = weights

    async def _push(self, tracked: TrackedEngine, weights: Weights) -> None:
        try:
            await tracked.engine.update_weights(weights)
            tracked.weights = weights
        except EngineUnavailable as error:
            self._lose(tracked, error)

    def _give_up(self, error: EngineError) -> None:
        while self._waiting:
            self._waiting.popleft().fail(error)

    # -- reservations -----------------------------------------------------------------------------------------------------

    async def _engine_of(self, request_id: str, prompt: int, max_new: int) -> TrackedEngine:
        """The rollout's engine; another one if it is lost."""
        if request_id in self._assigned and not self._assigned[request_id][0].usable:
            self._unassign(request_id)
        if request_id not in self._assigned:
            await self._wait_for_engine(request_id, prompt, max_new)
        return self._assigned[request_id][0]

    async def _wait_for_engine(self, request_id: str, prompt: int, max_new: int) -> None:
        await self._poll()
        turn = _Turn(request_id, prompt, max_new)
        self._waiting.append(turn)
        self._admit()
        await turn.admitted_from(self._waiting)

    def _admit(self) -> None:
        """First come, first served."""
        while self._waiting and self.try_assign(*self._waiting[0].size):
            self._waiting.popleft().admit()

    def try_assign(self, request_id: str, prompt: int, max_new: int) -> TrackedEngine | None:
        """Assign this rollout to an engine; None: no engine has room now."""
        usable = [tracked for tracked in self.engines if tracked.usable]
        if not usable:
            return None
        if self.settings.mode == "static":
            self._next += 1
            return self._assign(request_id, usable[(self._next - 1) % len(usable)], 0)
        if self.settings.mode == "least_inflight":
            return self._assign(request_id, min(usable, key=lambda tracked: tracked.inflight), 0)
        needed = self.reservation(prompt, max_new)
        tracked = max(usable, key=lambda tracked: tracked.free - self._spread(tracked))
        # A rollout larger than any engine runs alone: it would wait forever.
        if needed > tracked.free - self._spread(tracked) and any(tracked.inflight for tracked in usable):
            return None
        return self._assign(request_id, tracked, needed)

    def _assign(self, request_id: str, tracked: TrackedEngine, reserved: int) -> TrackedEngine:
        tracked.reserved += reserved
        tracked.inflight += 1
        tracked.served += 1
        self._assigned[request_id] = (tracked, reserved)
        return tracked

    def end_rollout(self, request_id: str, length: int) -> TrackedEngine | None:
        """Free the reservation of a rollout that ended with `length` tokens."""
        tracked = self._unassign(request_id)
        if tracked is None:
            return None
        self._lengths.append(length)
        if self.settings.reserve == "adaptive":
            tracked.overcommit = min(MAX_OVERCOMMIT, tracked.overcommit + OVERCOMMIT_STEP)
        return tracked

    def _unassign(self, request_id: str) -> TrackedEngine | None:
        assigned = self._assigned.pop(request_id, None)
        if assigned is None:
            return None
        tracked, reserved = assigned
        tracked.generating.pop(request_id, None)
        tracked.idle.pop(request_id, None)
        tracked.reserved -= reserved
        tracked.inflight -= 1
        return tracked

    def reservation(self, prompt: int, max_new: int) -> int:
        longest = prompt + max_new
        if self.settings.reserve == "safe" or len(self._lengths) < LEARNED:
            return longest
        return min(longest, mean_in_progress(self._lengths))

    def _spread(self, tracked: TrackedEngine) -> float:
        """Two standard deviations of the sum of this engine's rollouts."""
        if self.settings.reserve == "safe" or len(self._lengths) < LEARNED:
            return 0.0
        return 2 * statistics.pstdev(self._lengths) * math.sqrt(tracked.inflight + 1)

    def shrink(self, tracked: TrackedEngine) -> None:
        """After a preemption: hand out less of this engine's cache."""
        if self.settings.reserve == "adaptive":
            tracked.overcommit = max(0.25, 0.7 * tracked.overcommit)

    # -- turns ------------------------------------------------------------------------------------------------------------

    async def _pass_gate(self, tracked: TrackedEngine, request_id: str, length: int, max_new: int) -> None:
        if not tracked.gate and self.try_turn(request_id, length, max_new):
            return
        turn = _Turn(request_id, length, max_new)
        tracked.gate.append(turn)
        self._open_gate(tracked)
        await turn.admitted_from(tracked.gate)

    def _open_gate(self, tracked: TrackedEngine) -> None:
        while tracked.gate and self.try_turn(*tracked.gate[0].size):
            tracked.gate.popleft().admit()

    def try_turn(self, request_id: str, length: int, max_new: int) -> bool:
        """Start a turn of this rollout, which has `length` tokens; False: it has to wait."""
        if self.settings.reserve == "safe" or self.settings.mode != "dynamic":
            return True
        tracked, _ = self._assigned[request_id]
        tracked.idle[request_id] = length
        learned = len(self._turns) >= LEARNED
        end = length + (min(max_new, mean_in_progress(self._turns)) if learned else max_new)
        others = sum(tracked.generating.values()) + sum(tracked.idle.values()) - length
        spread = 2 * statistics.pstdev(self._turns) * math.sqrt(len(tracked.generating) + 1) if learned else 0.0
        if end + others + spread > tracked.capacity and tracked.generating:
            return False
        del tracked.idle[request_id]
        tracked.generating[request_id] = end
        return True

    def end_turn(self, request_id: str, length: int, generated: int) -> None:
        tracked, _ = self._assigned[request_id]
        tracked.generating.pop(request_id, None)
        tracked.idle[request_id] = length + generated
        self._turns.append(generated)

    # -- the engines' reports ---------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        """Read capacity and preemptions, at most every `poll_s`."""
        if time.monotonic() - self._polled_at < self.settings.poll_s:
            return
        self._polled_at = time.monotonic()
        for tracked in [one for one in self.engines if one.usable]:
            try:
                load = await tracked.engine.load()
            except EngineUnavailable as error:
                self._lose(tracked, error)
                continue
            if load.capacity <= 0:
                raise EngineError(f"{tracked.engine.name} reports a cache of {load.capacity} tokens")
            tracked.capacity = int(load.capacity * self.settings.util)
            if load.preempted > tracked.preempted and tracked.inflight:
                self.shrink(tracked)
            tracked.preempted = load.preempted


def mean_in_progress(lengths: Sequence[int]) -> int:
    """The mean length of rollouts in progress. Long ones run longer, so it is the sum of squares over the sum."""
    return math.ceil(sum(length**2 for length in lengths) / max(1, sum(lengths)))
