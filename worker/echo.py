"""A pool that runs nothing: every call is answered with its own code. For measuring the path to a worker and back.

Not a sandbox, and its results say so: their tier is `none`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from exec_wire import Call, Result, Sandbox, verdict
from worker.config import WorkerConfig


class EchoPool:
    sandbox = Sandbox()
    profiles: list[str] = []
    languages = ["python"]
    missing: dict[str, str] = {}
    alive = True
    zygote_restarts = 0

    def __init__(self, config: WorkerConfig) -> None:
        self.slots = config.slots
        self._takes_s = config.echo_ms / 1000
        self._free = list(range(config.slots))
        self.when_free: Callable[[], None] = lambda: None

    async def __aenter__(self) -> EchoPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take_slot(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
        self.when_free()

    async def next_slot(self) -> int:
        return self._free.pop()

    async def run(self, call: Call, slot: int, remaining_s: float) -> Result:
        if self._takes_s:
            await asyncio.sleep(self._takes_s)
        return verdict("ok", stdout=call.code, exit_code=0, completed=True, sandbox=self.sandbox)
