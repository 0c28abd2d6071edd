"""The zygotes of a worker, which fill its slots.

A slot (`worker.slots`) is a permit to use a core, with a uid and control groups of its own; a zygote forks programs into any.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import socket
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import NoReturn

from exec_wire import Call, Limits, Result, Sandbox, verdict
from exec_wire.supervisor import Supervisor, logged, stop
from worker.compile_cache import OUTPUT, CompileCache, CompileFailed
from worker.config import WorkerConfig
from worker.languages import LANGUAGES, Compiled, Interpreted
from worker.profiles import ProfileChoice
from worker.sandbox import memory, tiers
from worker.sandbox.execution import IN_ZYGOTE, Execution, Start, misfit, setup_failed, zygote_failed
from worker.sandbox.large_results import LargeResults
from worker.sandbox.runner_client import RunnerLink, SandboxUnavailable
from worker.sandbox.runner_options import RunnerOptions
from worker.sandbox.session_tree import Member, Tree
from worker.sandbox.zygote_client import HEARTBEAT_S, NotStarted, ZygoteLink, ZygoteLost
from worker.slots import Slots

log = logging.getLogger("worker")

FAILURES_BEFORE_RECYCLING = 3
RUNNER_PAUSE_S, RUNNER_PAUSE_MOST_S = 0.2, 10.0  # between attempts to start another runner; doubled each time


def runner_options(config: WorkerConfig) -> RunnerOptions:
    """For a runner that the worker starts itself."""
    return RunnerOptions(
        packages=Path(config.packages),
        uid_base=config.uid_base,
        min_tier=config.min_tier,
        max_slots=config.slots,
        max_sessions=config.max_sessions,
        mask_layers=tuple(config.mask_layers),
        fault_injection=config.fault_injection,
    )


class SlotBusy(Exception):
    """Nothing was started: processes of a lost zygote are still dying in this slot, or the chosen zygote is just gone."""


class Pool(Slots):
    """`async with Pool(...)`: a runner and its zygotes are there, and gone afterwards."""

    def __init__(self, config: WorkerConfig, supervisor: Supervisor | None = None) -> None:
        super().__init__(config.slots)
        self.config = config
        self._supervisor = supervisor or Supervisor()
        self._choice = ProfileChoice(config.profiles)
        self._zygotes: list[ZygoteLink] = []
        self._change = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._places = deque(range(config.slots, config.slots + config.max_sessions))  # of sessions
        self._numbers = itertools.count(1)
        self._failures: dict[int, int] = {}  # set-up failures in a row, by zygote
        self._stillborn: set[str] = set()  # profiles whose last zygote died before it was warm
        self._warming: set[asyncio.Task[None]] = set()
        self._compiled = CompileCache(config.compile_cache_bytes)
        self._results = LargeResults(config.results_bytes, config.max_result_bytes)
        self.sandbox = Sandbox()
        self.zygote_restarts = 0

    async def __aenter__(self) -> Pool:
        await self._start_runner()
        start = self._supervisor.start
        self._tasks = [start("zygotes", self._beat), start("runner", self._keep_runner)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop(self._tasks)
        self._drop_zygotes()
        self._compiled.close()
        self._results.close()
        await self._runner.close()

    async def _start_runner(self) -> None:
        config = self.config
        if config.runner_socket:
            runner = await RunnerLink.join(Path(config.runner_socket))
        else:
            runner = RunnerLink.start(runner_options(config))
        wishes = {
            "slots": config.slots,
            "sessions": config.max_sessions,
            "profiles": config.profiles,
            "min_tier": config.min_tier,
        }
        try:
            await runner.configure(wishes, self._add_zygote)
            self._check_tier(runner)
            self._check_memory(runner)
        except BaseException:
            await runner.close()
            raise
        self._runner = runner
        self.sandbox = Sandbox(runner.tier, runner.layers)

    def _check_tier(self, runner: RunnerLink) -> None:
        """Fail closed: a sandbox weaker than what was asked for runs nothing."""
        wanted = self.config.min_tier
        if tiers.at_least(runner.tier, wanted):
            return
        words = tiers.shortfall(runner.tier, wanted, runner.layers, runner.missing)
        raise SandboxUnavailable(words, runner.missing)

    def _check_memory(self, runner: RunnerLink) -> None:
        if self.config.strict_memory and (words := self._shortfall(runner)):
            raise SandboxUnavailable(f"{words}. EXEC_STRICT_MEMORY is set, so no program is run")

    def _shortfall(self, runner: RunnerLink) -> str:
        return memory.shortfall(self.slots, Limits().memory_mb, runner.memory)

    async def _keep_runner(self) -> NoReturn:
        """A runner that ends takes its zygotes with it. What ran is started again in the zygotes of the next one."""
        while True:
            await self._runner.lost.wait()
            log.error("the runner ended; starting another one")
            self._drop_zygotes()
            await self._runner.close()
            await self._start_runner_again()

    async def _start_runner_again(self) -> None:
        pause_s = RUNNER_PAUSE_S
        while True:
            try:
                return await self._start_runner()
            except (SandboxUnavailable, OSError) as error:
                log.error("no sandbox: %s; trying again", error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RUNNER_PAUSE_MOST_S)

    def _drop_zygotes(self) -> None:
        for zygote in self._zygotes:
            zygote.close()
        self._zygotes = []
        self._failures.clear()

    @property
    def alive(self) -> bool:
        """There is a runner, so there are zygotes or there will be."""
        return not self._runner.lost.is_set()

    @property
    def missing(self) -> dict[str, str]:
        """Layers of the sandbox that do not work here, and why."""
        return self._runner.missing

    @property
    def memory_mb(self) -> int:
        """What there is where programs run."""
        return self._runner.memory.bytes >> 20

    @property
    def memory_shortfall(self) -> str:
        """In words, if programs in all slots can need more memory than there is where they run."""
        return self._shortfall(self._runner)

    @property
    def languages(self) -> list[str]:
        """Whose programs can be run: what the runner has, which may live in another container than we."""
        return list(self._runner.languages)

    def _command(self, language: str) -> str:
        return self._runner.languages.get(language) or language

    @property
    def profiles(self) -> list[str]:
        return list(self.config.profiles)

    @property
    def free_places(self) -> int:
        return len(self._places)

    async def start_session(self, profile: str, limits: Limits, env: dict[str, str], files: dict[str, str]) -> Member:
        """A session's first process. `ZygoteLost`, `StartFailed`, or `PlaceBusy` if it was not started."""
        zygote = await self._zygote_of(profile or self._choice.choose(""), sessions=True)
        index = self._places.popleft()
        tree = Tree(zygote, self._runner, index, limits, self._numbers, self._results)
        try:
            return await tree.start(env, files)
        finally:
            self._give_back_place_of(tree, index)

    def _give_back_place_of(self, tree: Tree, index: int) -> None:
        """When nothing is left of it. A place is used again as late as possible: a lost zygote's processes die slowly."""

        def give_back(_: object) -> None:
            self._places.append(index)
            if tree.link.retired and not tree.link.sessions:
                tree.link.close()

        if tree.started:
            tree.ended.add_done_callback(give_back)
        else:
            give_back(None)

    async def run(self, call: Call, slot: int, remaining_s: float, fail_step: int = 0) -> Result:
        """One program, from start to result. `ZygoteLost` if its zygote died under it, `SlotBusy` if it was not started."""
        if (words := misfit(call)) is not None:
            return verdict("rejected", error=words)
        language = LANGUAGES.get(call.language)
        if isinstance(language, Compiled):
            return await self._run_compiled(language, call, slot, remaining_s, fail_step)
        if isinstance(language, Interpreted):
            source = f"../{language.source}"
            return await self._run(call, slot, remaining_s, fail_step, Start([self._command(language.name), source], source))
        return await self._run(call, slot, remaining_s, fail_step, IN_ZYGOTE)

    async def _run_compiled(self, language: Compiled, call: Call, slot: int, remaining_s: float, fail_step: int) -> Result:
        started = time.monotonic()

        async def compile(compiler_call: Call) -> Result:
            command = [self._command(language.name), *language.flags, "-o", OUTPUT, language.source]
            return await self._run(compiler_call, slot, remaining_s, 0, Start(command, language.source), kept_here=True)

        try:
            binary = await self._compiled.program(language, call, compile)
        except CompileFailed as failed:
            return failed.result
        finally:
            self._results.let_go()
        compiled_s = time.monotonic() - started
        try:
            result = await self._run(call, slot, remaining_s - compiled_s, fail_step, Start([""], binary=binary))
        finally:
            os.close(binary)
        result.timings.start_ms = round(result.timings.start_ms + compiled_s * 1000, 3)
        return result

    async def _run(
        self, call: Call, slot: int, remaining_s: float, fail_step: int, start: Start, *, kept_here: bool = False
    ) -> Result:
        """`kept_here`: the result is not sent to anybody."""
        profile = self._choice.choose(call.code if call.language == "python" else "")
        if (zygote := self._least_loaded(profile)) is None:
            async with asyncio.timeout(remaining_s):
                zygote = await self._zygote_of(profile)
        most = call.limits.file_mb << 22 if kept_here else self.config.max_result_bytes
        execution = Execution(call, remaining_s, next(self._numbers), fail_step, start, most)
        try:
            try:
                say = await zygote.run(execution, slot)
            except NotStarted:
                raise SlotBusy from None
            if say.step != 0 and say.error == errno.EBUSY:
                raise SlotBusy
            if zygote_failed(say, self._runner.steps) or not setup_failed(say):
                self._count_failures(zygote, setup_failed(say))
            sandbox = Sandbox(self.sandbox.tier, self.sandbox.layers, zygote.profile)
            make = partial(execution.result, say, sandbox, self._runner.steps)
            return await self._results.make(execution.weigh(), make)
        finally:
            execution.close()

    async def wait_ready(self) -> None:
        """Every profile has a zygote that is warm; `SandboxUnavailable` if one cannot be had."""
        async with self._change:
            await self._change.wait_for(lambda: self._all_warm() or self._stillborn)
        if not self._all_warm():
            raise SandboxUnavailable(f"the interpreters of {sorted(self._stillborn)} do not start; the messages above say why")

    def _all_warm(self) -> bool:
        return {zygote.profile for zygote in self._zygotes if zygote.ready} == set(self.config.profiles)

    async def _zygote_of(self, profile: str, *, sessions: bool = False) -> ZygoteLink:
        while (found := self._least_loaded(profile, sessions=sessions)) is None:
            async with self._change:
                await self._change.wait()
        return found

    def _least_loaded(self, profile: str, *, sessions: bool = False) -> ZygoteLink | None:
        """By programs or by sessions; of another profile, if this one has no zygote now."""
        ready = [zygote for zygote in self._zygotes if zygote.ready]
        best = [zygote for zygote in ready if zygote.profile == profile] or ready
        return min(best, key=lambda zygote: zygote.sessions if sessions else zygote.load, default=None)

    def _add_zygote(self, number: int, profile: str, link: socket.socket) -> None:
        zygote = ZygoteLink(number, profile, link)
        self._zygotes = [other for other in self._zygotes if not other.lost] + [zygote]
        task = logged(asyncio.create_task(self._announce_when_ready(zygote)), "a zygote was not waited for")
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)

    async def _announce_when_ready(self, zygote: ZygoteLink) -> None:
        try:
            await zygote.wait_ready()
        except asyncio.CancelledError:
            self._stillborn.add(zygote.profile)  # it died before it was warm; the runner starts another
        else:
            self._stillborn.discard(zygote.profile)
        async with self._change:
            self._change.notify_all()

    def _count_failures(self, zygote: ZygoteLink, failed: bool) -> None:
        """A zygote in which set-up fails again and again is not trusted any more."""
        self._failures[zygote.number] = self._failures.get(zygote.number, 0) + 1 if failed else 0
        if self._failures[zygote.number] >= FAILURES_BEFORE_RECYCLING:
            if zygote.sessions:
                self._retire(zygote)
            else:
                self._replace(zygote, "set-up failed three times in a row")

    async def _beat(self) -> NoReturn:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for zygote in list(self._zygotes):
                if zygote.warm and not zygote.beat():
                    self._replace(zygote, "it does not answer")

    def _retire(self, zygote: ZygoteLink) -> None:
        """It gets no more programs; it stays until its sessions have ended."""
        log.warning("retiring zygote %s (%s): set-up failed three times in a row", zygote.number, zygote.profile)
        self.zygote_restarts += 1
        zygote.retired = True
        self._runner.retire(zygote.number)

    def _replace(self, zygote: ZygoteLink, why: str) -> None:
        log.warning("recycling zygote %s (%s): %s", zygote.number, zygote.profile, why)
        self.zygote_restarts += 1
        self._failures.pop(zygote.number, None)
        zygote.close()
        self._runner.recycle(zygote.number)


__all__ = ["Pool", "SlotBusy", "ZygoteLost"]
