"""The runner and zygotes of a worker, and the calls that run in them.

A slot (`worker.slots`) is the right to run one program, with a uid and control groups of its own; a zygote forks programs into
any.
"""

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
from typing import NoReturn, Self

from exec_wire import Call, Limits, Result, Sandbox, verdict
from exec_wire.supervisor import Supervisor, logged, stop
from worker.compile_cache import OUTPUT, CompileCache, CompileFailed
from worker.config import WorkerConfig
from worker.languages import LANGUAGES, Compiled, Interpreted
from worker.profiles import ProfileChoice
from worker.sandbox import memory, tiers
from worker.sandbox.execution import Execution, Start, input_problem
from worker.sandbox.large_results import LargeResults
from worker.sandbox.runner_client import RunnerClient, SandboxUnavailable
from worker.sandbox.runner_limits import RunnerOptions
from worker.sandbox.session_tree import Member, SessionTree
from worker.sandbox.verdict import setup_failed, zygote_failed
from worker.sandbox.zygote_client import HEARTBEAT_S, NotStarted, ZygoteClient
from worker.sandbox.zygote_client import ZygoteLost as ZygoteLost
from worker.slots import Slots

log = logging.getLogger("worker")

FAILURES_BEFORE_RECYCLING = 3
RUNNER_PAUSE_S, MAX_RUNNER_PAUSE_S = 0.2, 10.0  # backoff between attempts to start a runner; doubled each time


class SlotBusy(Exception):
    """Nothing was started: processes of a lost zygote are still dying in this slot, or the chosen zygote has just died."""


class Pool(Slots):
    """`async with Pool(...)` starts a runner and its zygotes, and stops them at the end."""

    def __init__(self, config: WorkerConfig, supervisor: Supervisor | None = None) -> None:
        super().__init__(config.slots)
        self.config = config
        self._supervisor = supervisor or Supervisor()
        self.profiles = list(config.profiles)
        self._choice = ProfileChoice(config.profiles)
        self._zygotes: list[ZygoteClient] = []
        self._change = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self.session_slots = deque(range(config.slots, config.slots + config.max_sessions))  # the free ones
        self._numbers = itertools.count(1)
        self._failures: dict[int, int] = {}  # set-up failures in a row, by zygote
        self._failed_profiles: set[str] = set()  # whose last zygote died before it was warm
        self._warming: set[asyncio.Task[None]] = set()
        self._compiled = CompileCache(config.compile_cache_bytes)
        self._results = LargeResults(config.results_bytes, config.max_result_bytes)
        self.memory_shortfall = ""  # a message if programs in all slots can need more memory than there is where they run
        self.sandbox = Sandbox()
        self.zygote_restarts = 0

    async def __aenter__(self) -> Self:
        await self._start_runner()
        start = self._supervisor.start
        self._tasks = [start("zygotes", self._ping_forever), start("runner", self._keep_runner)]
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
            runner = await RunnerClient.join(Path(config.runner_socket))
        else:
            options = RunnerOptions(
                packages=Path(config.packages),
                program_python=config.program_python,
                uid_base=config.uid_base,
                min_tier=config.min_tier,
                max_slots=config.slots,
                max_sessions=config.max_sessions,
                mask_layers=tuple(config.mask_layers),
                fault_injection=config.fault_injection,
            )
            runner = RunnerClient.start(options)
        wishes = {
            "slots": config.slots,
            "sessions": config.max_sessions,
            "profiles": config.profiles,
            "min_tier": config.min_tier,
        }
        try:
            await runner.configure(wishes, self._add_zygote)
            tiers.require(config.min_tier, runner.ready.tier, runner.ready.layers, runner.ready.missing)
            shortfall = memory.shortfall(self.slots, Limits().memory_mb, runner.ready.memory)
            if config.strict_memory and shortfall:
                raise SandboxUnavailable(f"{shortfall}. EXEC_STRICT_MEMORY is set, so no program is run")
        except BaseException:
            await runner.close()
            raise
        self._runner, self.memory_shortfall = runner, shortfall
        self.sandbox = Sandbox(runner.ready.tier, runner.ready.layers)

    async def _keep_runner(self) -> NoReturn:
        """Replace a runner that ends. Its zygotes end too; their programs are started again in the zygotes of the next one."""
        while True:
            await self._runner.lost.wait()
            log.error("the runner ended; starting another one")
            self._drop_zygotes()
            await self._runner.close()
            pause_s = RUNNER_PAUSE_S
            while True:
                try:
                    await self._start_runner()
                    break
                except (SandboxUnavailable, OSError) as error:
                    log.error("starting the runner failed: %s; trying again", error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RUNNER_PAUSE_S)

    def _drop_zygotes(self) -> None:
        for zygote in self._zygotes:
            zygote.close()
        self._zygotes = []
        self._failures.clear()

    @property
    def alive(self) -> bool:
        """The runner is connected."""
        return not self._runner.lost.is_set()

    @property
    def missing(self) -> dict[str, str]:
        """Layer -> why it does not work here."""
        return self._runner.ready.missing

    @property
    def memory_mb(self) -> int:
        """Memory of the machine or pod where programs run."""
        return self._runner.ready.memory.bytes >> 20

    @property
    def languages(self) -> list[str]:
        """Languages that the runner has; it may run in another container than the worker."""
        return list(self._runner.ready.languages)

    def _command(self, language: str) -> str:
        return self._runner.ready.languages.get(language) or language

    async def start_session(self, profile: str, limits: Limits, env: dict[str, str], files: dict[str, str]) -> Member:
        """Start a session's first process.

        Raises:
            ZygoteLost, StartFailed, SessionSlotBusy: It was not started.
        """
        zygote = await self._zygote_of(profile or self._choice.choose(""), sessions=True)
        index = self.session_slots.popleft()
        tree = SessionTree(zygote, self._runner, index, limits, self._numbers, self._results)

        def give_back(_: object) -> None:
            self.session_slots.append(index)  # reused as late as possible: a lost zygote's processes die slowly
            if tree.zygote.retired and not tree.zygote.sessions:
                tree.zygote.close()

        try:
            return await tree.start(env, files)
        finally:
            if tree.started:
                tree.ended.add_done_callback(give_back)
            else:
                give_back(None)

    async def run(self, call: Call, slot: int, remaining_s: float, fail_step: int = 0) -> Result:
        """Run one program.

        Raises:
            ZygoteLost: Its zygote died.
            SlotBusy: It was not started.
        """
        if (problem := input_problem(call)) is not None:
            return verdict("rejected", error=problem)
        language = LANGUAGES.get(call.language)
        if isinstance(language, Compiled):
            return await self._run_compiled(language, call, slot, remaining_s, fail_step)
        source = f"../{language.source}" if isinstance(language, Interpreted) else ""
        start = Start([self._command(call.language), source], source) if source else Start()
        return await self._run(call, slot, remaining_s, fail_step, start)

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
            self._results.release()
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
        """`kept_here`: the result is not sent to a gateway."""
        profile = self._choice.choose(call.code if call.language == "python" else "")
        if (zygote := self._least_loaded(profile)) is None:
            async with asyncio.timeout(remaining_s):
                zygote = await self._zygote_of(profile)
        most = call.limits.file_mb << 22 if kept_here else self.config.max_result_bytes
        execution = Execution(call, remaining_s, next(self._numbers), fail_step, start, most)
        try:
            report = await zygote.run(execution, slot)
            if report.step != 0 and report.error == errno.EBUSY:
                raise SlotBusy
            if zygote_failed(report, self._runner.ready.steps) or not setup_failed(report):
                self._count_failures(zygote, setup_failed(report))
            sandbox = Sandbox(self.sandbox.tier, self.sandbox.layers, zygote.profile)
            make = partial(execution.result, report, sandbox, self._runner.ready.steps)
            return await self._results.make(execution.bytes_to_read(), make)
        except NotStarted:
            raise SlotBusy from None
        finally:
            execution.close()

    async def wait_ready(self) -> None:
        """Wait until every profile has a warm zygote; `SandboxUnavailable` if one fails to start."""
        async with self._change:
            await self._change.wait_for(lambda: self._all_warm() or self._failed_profiles)
        if not self._all_warm():
            raise SandboxUnavailable(
                f"the interpreters of {sorted(self._failed_profiles)} do not start; the log lines above say why"
            )

    def _all_warm(self) -> bool:
        return {zygote.profile for zygote in self._zygotes if zygote.ready} == set(self.profiles)

    async def _zygote_of(self, profile: str, *, sessions: bool = False) -> ZygoteClient:
        while (found := self._least_loaded(profile, sessions=sessions)) is None:
            async with self._change:
                await self._change.wait()
        return found

    def _least_loaded(self, profile: str, *, sessions: bool = False) -> ZygoteClient | None:
        """By programs or by sessions; a zygote of another profile if this one has none now."""
        ready = [zygote for zygote in self._zygotes if zygote.ready]
        best = [zygote for zygote in ready if zygote.profile == profile] or ready
        return min(best, key=lambda zygote: zygote.sessions if sessions else zygote.load, default=None)

    def _add_zygote(self, number: int, profile: str, link: socket.socket) -> None:
        zygote = ZygoteClient(number, profile, link)
        self._zygotes = [other for other in self._zygotes if not other.lost] + [zygote]
        task = logged(asyncio.create_task(self._announce_when_ready(zygote)), "waiting for a zygote failed")
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)

    async def _announce_when_ready(self, zygote: ZygoteClient) -> None:
        try:
            await asyncio.shield(zygote.warmed)
        except asyncio.CancelledError:
            self._failed_profiles.add(zygote.profile)  # the runner starts another one
        else:
            self._failed_profiles.discard(zygote.profile)
        async with self._change:
            self._change.notify_all()

    def _count_failures(self, zygote: ZygoteClient, failed: bool) -> None:
        """Replace a zygote in which set-up fails repeatedly."""
        self._failures[zygote.number] = self._failures.get(zygote.number, 0) + 1 if failed else 0
        if self._failures[zygote.number] >= FAILURES_BEFORE_RECYCLING:
            if zygote.sessions:
                self._retire(zygote)
            else:
                self._replace(zygote, "set-up failed three times in a row")

    async def _ping_forever(self) -> NoReturn:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for zygote in list(self._zygotes):
                if zygote.warm and not zygote.ping():
                    self._replace(zygote, "it does not answer")

    def _retire(self, zygote: ZygoteClient) -> None:
        """Give it no more programs; it stays until its sessions have ended."""
        log.warning("retiring zygote %s (%s): set-up failed three times in a row", zygote.number, zygote.profile)
        self.zygote_restarts += 1
        zygote.retired = True
        self._runner.send({"retire": zygote.number})

    def _replace(self, zygote: ZygoteClient, why: str) -> None:
        log.warning("recycling zygote %s (%s): %s", zygote.number, zygote.profile, why)
        self.zygote_restarts += 1
        self._failures.pop(zygote.number, None)
        zygote.close()
        self._runner.send({"recycle": zygote.number})
