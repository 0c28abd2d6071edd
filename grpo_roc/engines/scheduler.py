"""Rollouts on several engines. The scheduler is an engine itself; `placement` says which engine a rollout goes to.

An engine that fails, hangs or has other weights than it should is lost: its rollouts continue on others, and it is used again
when it answers and has the weights. While no engine is left, rollouts wait for `patience_s`.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from tqdm import tqdm

from grpo_roc import config
from grpo_roc.engines.base import Engine, EngineError, EngineUnavailable, Generated, Load, Sampling
from grpo_roc.engines.placement import Placement, Rollout, Room
from grpo_roc.engines.weights import Weights

ATTEMPTS = 10  # of one turn: after so many failures the request is at fault and not the engines
RETRY_S = (0.2, 10.0)  # between attempts to reach a lost engine: the first wait, doubled up to the second


class TrackedEngine(Room):
    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.served = 0
        self.calls: set[asyncio.Future[Generated]] = set()
        self.watch: asyncio.Task[None] | None = None  # notices when it hangs
        self.recovery: asyncio.Task[None] | None = None  # of a lost engine
        self.weights: Weights | None = None  # that it loaded last

    @property
    def usable(self) -> bool:
        return self.recovery is None


class Scheduler:
    name, direct = "scheduler", False

    def __init__(self, engines: Sequence[Engine], settings: config.Scheduler) -> None:
        if not engines:
            raise config.ConfigError("engines: at least one is needed")
        self.settings = settings
        self.engines = [TrackedEngine(engine) for engine in engines]
        self._placement = Placement(settings)
        self._rollouts: dict[str, Rollout] = {}
        self._assigned: dict[Rollout, TrackedEngine] = {}
        self._waiting: deque[tuple[Rollout, asyncio.Future[None]]] = deque()  # first come, first served
        self._polling: asyncio.Task[None] | None = None
        self._weights: Weights | None = None
        self._settled = asyncio.Event()  # cleared while engines sleep or get new weights: a lost one waits until then
        self._settled.set()
        self._asleep = False
        self.losses = 0  # how often an engine was lost

    # -- the engine protocol ----------------------------------------------------------------------------------------------

    async def generate(self, request_id: str, ids: list[int], sampling: Sampling) -> Generated:
        rollout = self._rollouts.setdefault(request_id, Rollout(ids, sampling.max_new))
        for attempt in range(ATTEMPTS):
            tracked = await self._engine_of(rollout)
            try:
                generated = await self._call(tracked, request_id, ids, sampling)
                break
            except EngineUnavailable as error:
                self._lose(tracked, error)
                self._unassign(rollout)
                if attempt == ATTEMPTS - 1:
                    raise
        if generated.preempted:
            tracked.shrink()
        rollout.length = len(ids) + len(generated.ids)
        tracked.remove(rollout)
        tracked.add(rollout, self._placement.expected(rollout))
        self._admit()
        return generated

    async def release(self, request_id: str) -> None:
        rollout = self._rollouts.pop(request_id, None)
        tracked = self._unassign(rollout) if rollout else None
        if rollout and tracked:
            self._placement.ended(tracked, rollout)
            self._admit()
            await tracked.engine.release(request_id)

    async def load(self) -> Load:
        loads = [await tracked.engine.load() for tracked in self.engines if tracked.usable]
        return Load(*(sum(load[field] for load in loads) for field in range(5)))

    async def update_weights(self, weights: Weights) -> None:
        """Give all engines the weights. A lost one gets them when it is back."""
        self._settled.clear()
        previous, self._weights, self._asleep = self._weights, weights, False
        await asyncio.gather(*(self._push(tracked, weights) for tracked in self.engines if tracked.usable))
        await self._keep(weights)
        if previous is not None:
            previous.discard()
        self._settled.set()

    async def _keep(self, weights: Weights) -> None:
        """For engines that are lost; the next training step changes the tensors."""
        if any(tracked.engine.direct for tracked in self.engines):
            return await asyncio.to_thread(weights.keep_copy)
        if not all(tracked.usable for tracked in self.engines):
            await weights.folder()
        weights.keep_files_only()

    async def sleep(self) -> None:
        """Let engines that share GPUs with the trainer free them; the next `update_weights` wakes them."""
        if self.settings.colocated:
            self._settled.clear()
            self._asleep = True
            await asyncio.gather(*(self._or_lose(one, one.engine.sleep()) for one in self.engines if one.usable))

    async def check(self) -> None:
        for tracked in self.engines:
            await tracked.engine.check()

    async def aclose(self) -> None:
        tasks = [task for tracked in self.engines for task in (tracked.watch, tracked.recovery)] + [self._polling]
        started = [task for task in tasks if task is not None]
        for task in started:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)
        await asyncio.gather(*(tracked.engine.aclose() for tracked in self.engines))
        if self._weights is not None:
            self._weights.discard()

    # -- rollouts -----------------------------------------------------------------------------------------------------------

    async def _engine_of(self, rollout: Rollout) -> TrackedEngine:
        """The rollout's engine; another one if it is lost."""
        if rollout in self._assigned and not self._assigned[rollout].usable:
            self._unassign(rollout)
        if rollout not in self._assigned:
            await self._wait(rollout)
        return self._assigned[rollout]

    async def _wait(self, rollout: Rollout) -> None:
        turn = (rollout, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        if self.settings.mode != "dynamic" or all(one.load.capacity for one in self.engines if one.usable):
            self._admit()
        if self._waiting and (self._polling is None or self._polling.done()):
            self._polling = asyncio.create_task(self._poll())
        try:
            await turn[1]
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):
                self._waiting.remove(turn)
            self._unassign(rollout)
            raise

    def _admit(self) -> None:
        known = self.settings.mode != "dynamic"
        while self._waiting and (usable := [one for one in self.engines if one.usable and (known or one.load.capacity)]):
            rollout, admitted = self._waiting[0]
            tracked = self._placement.choose(usable, rollout)
            if tracked is None:
                return
            self._waiting.popleft()
            tracked.add(rollout, self._placement.expected(rollout))
            tracked.served += 1
            self._assigned[rollout] = tracked
            if not admitted.done():
                admitted.set_result(None)

    async def _poll(self) -> None:
        """Read the engines' load while rollouts wait for them."""
        while self._waiting:
            usable = [tracked for tracked in self.engines if tracked.usable]
            try:
                await asyncio.gather(*(self._or_lose(tracked, self._report(tracked)) for tracked in usable))
            except EngineError as error:
                return self._give_up(error)
            self._admit()
            await asyncio.sleep(self.settings.poll_s)

    @staticmethod
    async def _report(tracked: TrackedEngine) -> None:
        tracked.report(await tracked.engine.load())

    def _unassign(self, rollout: Rollout) -> TrackedEngine | None:
        tracked = self._assigned.pop(rollout, None)
        if tracked is not None:
            tracked.remove(rollout)
        return tracked

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
        self._admit()

    async def _recover(self, tracked: TrackedEngine) -> None:
        began, (wait, longest) = time.monotonic(), RETRY_S
        while True:
            try:
                if self._asleep:  # it may have restarted, and uses memory that the trainer needs now
                    await tracked.engine.sleep()
                await self._settled.wait()
                weights = self._weights
                await self._resync(tracked, weights)
                if weights is self._weights and self._settled.is_set():  # else newer ones came meanwhile, or it must sleep
                    break
            except (EngineError, OSError) as error:  # OSError: no room for the weights' files
                if time.monotonic() - began > self.settings.patience_s and not any(one.usable for one in self.engines):
                    self._give_up(EngineError(str(error)))
                await asyncio.sleep(wait)
                wait = min(2 * wait, longest)
        tqdm.write(f"engine back after {time.monotonic() - began:.0f} s: {tracked.engine.name}")
        tracked.recovery = None
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
        async def push() -> None:
            await tracked.engine.update_weights(weights)
            tracked.weights = weights

        await self._or_lose(tracked, push())

    async def _or_lose(self, tracked: TrackedEngine, request: Coroutine[Any, Any, None]) -> None:
        try:
            await request
        except EngineUnavailable as error:
            self._lose(tracked, error)

    def _give_up(self, error: EngineError) -> None:
        while self._waiting:
            _, admitted = self._waiting.popleft()
            if not admitted.done():
                admitted.set_exception(error)
