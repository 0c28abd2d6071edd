"""The tool environment: the service runs programs and verifies answers.

Failures of the service are retried for `patience_s` and never count as the model's: a call without a result has the outcome
`infra`, an answer that could not be verified has no reward.
"""

import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

from exec_client import AsyncClient, Limits, Result, Tags, Unavailable, Verification
from grpo_roc import config
from grpo_roc.chat import Observation, ParseFailure, ToolCall
from grpo_roc.tasks import reasoning

RETRY_S = 0.5
_TRANSIENT = (
    "OSError: [Errno 11] Resource temporarily unavailable",
    "the interpreter was restarted, nothing was run; send the call again",
    "ConnectionResetError: [Errno 104] Connection reset by peer while the program was being sent to its machine. Try again.",
    "busy",
)


class Position(NamedTuple):
    """The position of a call in a run: it seeds injected faults and tags the service's calls."""

    seed: int = 0
    step: int = 0
    group: int = 0
    sample: int = 0
    turn: int = 0
    call: int = 0


class ToolEnv:
    """Thousands of tasks may call `run` at once; the client sends their calls in shared requests."""

    def __init__(self, client: AsyncClient, settings: config.Config, noise: config.Noise) -> None:
        self._client, self._service, self._noise, self._task = client, settings.service, noise, settings.task
        self._max_chars, self._run_name = settings.chat.observation_chars, settings.name
        self._limits = Limits(wall_s=settings.service.timeout_s, memory_mb=settings.service.memory_mb)
        self._concurrency = asyncio.Semaphore(settings.service.concurrency)
        self._verifier = _Verifier(client, settings.service.patience_s, settings.task.verify_kind)
        self.latencies_ms: list[float] = []
        self.infra_retries = 0

    async def run(
        self,
        call: ToolCall | ParseFailure,
        at: Position = Position(),  # noqa: B008 (frozen)
        *,
        faults: bool = True,
    ) -> Observation:
        if isinstance(call, ParseFailure):
            return call.observation()
        rng, noise = random.Random(str(tuple(at))), self._noise if faults else config.Noise()
        if rng.random() < noise.fault_rate:
            return Observation(rng.choice(_TRANSIENT), "error", "injected_fault")
        began = time.monotonic()
        result = await self._run_with_retries(call, at)
        wait_s = time.monotonic() - began
        self.latencies_ms.append(1000 * wait_s)
        if result is None or result.blame in ("infra", "client"):
            return Observation("the tool could not be reached", "infra", result.status if result else "unavailable", wait_s)
        text = result.tool_text(self._max_chars)
        if result.ok and rng.random() < noise.corrupt_rate:
            text = re.sub(r"\d+", lambda found: str(int(found[0]) + rng.randint(1, 9)), text)
        return Observation(text, "ok" if result.ok else "error", result.status, wait_s)

    async def _run_with_retries(self, call: ToolCall, at: Position) -> Result | None:
        tags = Tags(run=self._run_name, step=at.step, group=str(at.group), rollout=str(at.sample))
        fields = {"limits": self._limits, "deadline_s": self._service.deadline_s, "tags": tags}
        give_up = time.monotonic() + self._service.patience_s
        async with self._concurrency:
            while True:
                try:
                    return await self._client.run(call.code, stdin=call.stdin, echo_value=True, **fields)  # type: ignore[arg-type]
                except Unavailable:
                    self.infra_retries += 1
                    if time.monotonic() > give_up:
                        return None
                    await asyncio.sleep(RETRY_S)

    async def reward(self, answer: str | None, truth: str, problem: str = "") -> float | None:
        """1 or 0; None if the service could not verify the answer. Problems of reasoning-gym have scorers of their own."""
        if answer is None:
            return 0.0
        if self._task.kind == "reasoning_gym":
            return reasoning.score(self._task, problem, answer)
        verification = await self._verifier.verify(answer, truth)
        return None if verification is None or verification.equal is None else float(verification.equal)


class _Verifier:
    """Sends all waiting answers in one request: comparing an answer takes microseconds, a request milliseconds."""

    def __init__(self, client: AsyncClient, patience_s: float, kind: str) -> None:
        self._client, self._patience_s, self._kind = client, patience_s, kind
        self._waiting: list[tuple[tuple[str, str], asyncio.Future[Verification | None]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def verify(self, answer: str, truth: str) -> Verification | None:
        future: asyncio.Future[Verification | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(((answer, truth), future))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        return await future

    async def _send(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)
            batch, self._waiting = self._waiting, []
            for (_, future), found in zip(batch, await self._verify([pair for pair, _ in batch]), strict=True):
                if not future.done():
                    future.set_result(found)

    async def _verify(self, pairs: list[tuple[str, str]]) -> list[Verification] | list[None]:
        give_up = time.monotonic() + self._patience_s
        while True:
            try:
                found = await self._client.verify_many(pairs, kind=self._kind, extract="boxed")
                if not any(one.equal is None and one.retryable for one in found):
                    return found
            except Unavailable:
                found = []
            if time.monotonic() > give_up:
                return found or [None] * len(pairs)
            await asyncio.sleep(RETRY_S)


@contextlib.asynccontextmanager
async def tool_env(settings: config.Config, url: str, *, noise: config.Noise | None = None) -> AsyncIterator[ToolEnv]:
    async with AsyncClient(url) as client:
        yield ToolEnv(client, settings, settings.noise if noise is None else noise)


@contextlib.contextmanager
def service_url(settings: config.Service) -> Iterator[str]:
    """The address of the service. Without one in the settings, a service runs for the duration of the block."""
    if settings.url:
        yield settings.url
        return
    with tempfile.TemporaryFile("w+") as log:
        # The toy's programs import nothing. Training sets that need packages run against a service with other profiles.
        variables = {"EXEC_PROFILES": '{"bare": []}'} | dict(os.environ)
        command = [sys.executable, "-m", "exec_service", "up", "--port", "0"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables)
        try:
            yield _await_ready(process, Path(f"/proc/self/fd/{log.fileno()}"))
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_ready(process: subprocess.Popen[bytes], log: Path, timeout_s: float = 90.0) -> str:
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up and process.poll() is None:
        if ready := re.search(r"ready on (http://[0-9.:]+)", log.read_text()):
            return ready[1]
        if "cannot run programs here" in log.read_text():
            break
        time.sleep(0.05)
    raise RuntimeError(f"the execution service did not start; its output:\n{log.read_text()}")
