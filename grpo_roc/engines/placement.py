"""Which engine a rollout goes to: every engine's KV cache in tokens, as reserved here and as the engine reports it.

    static          round robin, at once
    least_inflight  to the engine with the fewest rollouts, at once
    dynamic         to an engine that has room for the whole rollout; it waits until there is one

A rollout keeps its engine, where its tokens are cached, for all its turns. So `dynamic` reserves cache for the length that the
rollout is expected to reach. `safe` reserves the longest possible length, and no cache overflows. `adaptive` reserves the mean
length of recent rollouts that were longer than this one is now. Under `adaptive`, the reservations may add up to c times the
cache, where c grows (to at most 2) with every rollout that ends and shrinks when the engine preempts one.

The engine's own figures come first. No rollout goes to an engine that has waiting requests, and tokens in use beyond the
reservations (by other clients) count as reserved. Rollouts of one prompt share its blocks, which count once per engine. They
stay on one engine while it has room and the filled share of its cache is at most `AFFINITY` above that of the emptiest engine.
"""

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from typing import TypeVar

from grpo_roc import config
from grpo_roc.engines.base import EngineError, Load

RECENT = 256
LEARNED = 16  # observed lengths; with fewer, `adaptive` acts as `safe`
MAX_OVERCOMMIT, OVERCOMMIT_STEP, SHRINK = 2.0, 0.02, 0.7
AFFINITY = 0.25


class Rollout:
    """A rollout in progress. `prefix` is the same for all rollouts of a prompt."""

    def __init__(self, prompt: Sequence[int], max_new: int) -> None:
        self.prefix, self.prompt = hash(tuple(prompt)), len(prompt)
        self.length, self.longest = len(prompt), len(prompt) + max_new


class Room:
    """The KV cache of one engine."""

    def __init__(self) -> None:
        self.load = Load(0, 0, 0, 0, 0)
        self.overcommit = 1.0
        self.reserved = 0
        self._foreign = 0  # tokens in use beyond the reservations, at the last report
        self.rollouts: dict[Rollout, int] = {}  # their reservations
        self._prefixes: Counter[int] = Counter()

    def report(self, load: Load) -> None:
        if load.capacity <= 0:
            raise EngineError(f"an engine reports a cache of {load.capacity} tokens")
        if load.preempted > self.load.preempted and self.rollouts:
            self.shrink()
        self.load, self._foreign = load, max(0, load.used - self.reserved)

    def shrink(self) -> None:
        self.overcommit = max(0.25, SHRINK * self.overcommit)

    def need(self, rollout: Rollout, expected: int) -> int:
        """Tokens of cache that the rollout adds here: whole blocks, and those of its prompt only if no other one has them."""
        block = self.load.block or 1
        shared = rollout.prompt // block * block if self.has(rollout) else 0
        return -(-expected // block) * block - shared

    def has(self, rollout: Rollout) -> bool:
        """Whether another rollout of its prompt is here, and the engine shares prefixes."""
        return bool(self.load.block) and self._prefixes[rollout.prefix] > 0

    def free(self, util: float) -> float:
        return self.load.capacity * util * self.overcommit - self.reserved - self._foreign

    @property
    def filled(self) -> tuple[float, int]:
        return (self.reserved + self._foreign) / max(1, self.load.capacity), self.load.running

    def add(self, rollout: Rollout, expected: int) -> None:
        self.reserved += self.need(rollout, expected)
        self.rollouts[rollout] = expected
        self._prefixes[rollout.prefix] += 1

    def remove(self, rollout: Rollout) -> None:
        expected = self.rollouts.pop(rollout)
        self._prefixes[rollout.prefix] -= 1
        self.reserved -= self.need(rollout, expected)
        if not self._prefixes[rollout.prefix]:
            del self._prefixes[rollout.prefix]


R = TypeVar("R", bound=Room)


class Placement:
    def __init__(self, settings: config.Scheduler) -> None:
        self.settings = settings
        self._responses: deque[int] = deque(maxlen=RECENT)  # lengths of rollouts that ended
        self._placed = 0

    def choose(self, rooms: Sequence[R], rollout: Rollout) -> R | None:
        """None: no engine has room now."""
        if self.settings.mode == "static":
            self._placed += 1
            return rooms[(self._placed - 1) % len(rooms)]
        if self.settings.mode == "least_inflight":
            return min(rooms, key=lambda room: len(room.rollouts))
        fits = [room for room in rooms if self._fits(room, rollout)]
        if not fits:  # a rollout larger than any engine runs alone: it would wait forever
            return None if any(room.rollouts for room in rooms) else max(rooms, key=lambda room: room.free(1.0))
        emptiest = min(fits, key=lambda room: room.filled)
        homes = [room for room in fits if room.has(rollout) and room.filled[0] <= emptiest.filled[0] + AFFINITY]
        return min(homes, key=lambda room: room.filled, default=emptiest)

    def _fits(self, room: Room, rollout: Rollout) -> bool:
        if room.load.waiting and room.rollouts:
            return False
        return room.need(rollout, self.expected(rollout)) <= room.free(self.settings.util)

    def expected(self, rollout: Rollout) -> int:
        """The length to reserve for; nothing where reservations are not used."""
        if self.settings.mode != "dynamic":
            return 0
        now = rollout.length - rollout.prompt
        longer = [length for length in self._responses if length > now]
        if self.settings.reserve == "safe" or len(self._responses) < LEARNED or not longer:
            return rollout.longest
        return min(rollout.longest, rollout.prompt + round(statistics.fmean(longer)))

    def ended(self, room: Room, rollout: Rollout) -> None:
        self._responses.append(rollout.length - rollout.prompt)
        most = MAX_OVERCOMMIT if self.settings.reserve == "adaptive" else 1.0
        room.overcommit = min(most, room.overcommit + OVERCOMMIT_STEP)
