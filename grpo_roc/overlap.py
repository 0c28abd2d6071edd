"""The rollouts of a step: made when they are asked for, or during the update before (`rl.overlap: one_step_off`).

With the overlap, engines and trainer work at the same time, and the rollouts of a step are of weights that are one update old:

    engines   roll 0 | roll 1 (weights 0) | roll 2 (weights 1) | …
    trainer          | update 0           | update 1           | …

Importance weights (`rl.is_cap`) correct for the age. A checkpoint has the rollouts that wait for their update: a resumed run
learns from the same ones.
"""

import asyncio
import time

import msgspec

from grpo_roc import config
from grpo_roc.env import Position
from grpo_roc.rollout import Actor, Limits, Times, Trajectory
from grpo_roc.tasks.base import Task


class Rolled(msgspec.Struct):
    step: int
    rollouts: list[Trajectory]
    times: dict[str, float]


class Rollouts:
    """Makes the rollouts of training steps, one step at a time. Only rank 0 has one."""

    def __init__(self, actor: Actor, rl: config.Rl) -> None:
        self.actor, self._rl = actor, rl
        self._next: asyncio.Task[Rolled] | None = None
        self.busy = Busy()

    def begin(self, step: int, task: Task, limits: Limits) -> None:
        self._next = asyncio.create_task(self._roll(step, task, limits))

    async def take(self, step: int, task: Task, limits: Limits) -> Rolled:
        """The rollouts that were begun before, or else new ones."""
        if self._next is None:
            self.begin(step, task, limits)
        assert self._next is not None
        rolled = await self._next
        self._next = None
        assert rolled.step == step
        return rolled

    async def _roll(self, step: int, task: Task, limits: Limits) -> Rolled:
        rl, times = self._rl, Times(float)
        count = rl.group * (1 if rl.arm == "grpo" else rl.oversample)
        with self.busy:
            problems = task.batch(rl.seed, step, rl.prompts)
            rollouts = await self.actor.roll(problems, count, limits, Position(rl.seed, step), times)
        return Rolled(step, rollouts, dict(times))

    async def finish(self) -> None:
        """Wait until the rollouts that were begun are done, so that the engines are idle; the next `take` returns them."""
        if self._next is not None:
            await asyncio.wait([self._next])

    async def discard(self) -> None:
        """Cancel the rollouts that were begun: the next step has other limits or problems."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
            self._next = None

    async def encode(self) -> bytes:
        """The rollouts that wait for their update, for a checkpoint; empty if there are none."""
        return msgspec.msgpack.encode(await self._next) if self._next is not None else b""

    def restore(self, encoded: bytes) -> None:
        if encoded:
            self._next = asyncio.get_running_loop().create_task(_value(msgspec.msgpack.decode(encoded, type=Rolled)))


async def _value(rolled: Rolled) -> Rolled:
    return rolled


class Busy:
    """Counts the seconds within `with` blocks."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.read()
        self._since = None

    def read(self) -> float:
        """The seconds until now, also of a block that has not ended."""
        if self._since is not None:
            now = time.monotonic()
            self._seconds += now - self._since
            self._since = now
        return self._seconds
