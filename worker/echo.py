"""A pool that runs nothing and answers every call with its own code, to measure the path to a worker and back.

It is not a sandbox: the tier of its results is `none`.
"""

import asyncio
from typing import Self

from exec_wire import Call, Result, Sandbox, verdict
from worker.config import WorkerConfig
from worker.slots import Slots


class EchoPool(Slots):
    sandbox = Sandbox()
    profiles: list[str] = []
    languages = ["python"]
    missing: dict[str, str] = {}
    alive = True
    zygote_restarts = 0

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config.slots)
        self._takes_s = config.echo_ms / 1000

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def run(self, call: Call, slot: int, remaining_s: float) -> Result:
        if self._takes_s:
            await asyncio.sleep(self._takes_s)
        return verdict("ok", stdout=call.code, exit_code=0, completed=True, sandbox=self.sandbox)
