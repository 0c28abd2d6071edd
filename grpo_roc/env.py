"""The world outside of the model: programs run in the service, answers are verified by it.

What fails on the service's side is tried again for `patience_s` and never becomes the model's fault: a call whose outcome
stays unknown is `infra`, and so is an answer that could not be verified.
"""

from __future__ import annotations

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
from typing import Literal, NamedTuple

from exec_client import AsyncClient, Limits, Result, Tags, Unavailable, Verification
from grpo_roc import config
from grpo_roc.chat import ParseFailure, ToolCall

Outcome = Literal["ok", "error", "infra"]
_TRANSIENT = (
    "OSError: [Errno 11] Resource temporarily unavailable",
    "the interpreter was restarted, nothing was run; send the call again",
    "ConnectionResetError: [Errno 104] Connection reset by peer while the program was being sent to its machine. Try again.",
    "busy",
)


class Heard(NamedTuple):
    """What became of one tool call, for the model (`text`) and for the score (`outcome`)."""

    text: str
    outcome: Outcome
    status: str
    wait_s: float = 0.0


class Place(NamedTuple):
    """Where in a run something happens; it decides injected faults and tags the service's calls."""

    seed: int = 0
    step: int = 0
    group: int = 0
    sample: int = 0
    turn: int = 0
    call: int = 0


class ToolEnv:
    """`run` may be called by thousands of tasks at once; the client puts what waits together into requests."""

    def __init__(
        self,
        client: AsyncClient,
        service: config.Service,
        noise: config.Noise = config.Noise(),  # noqa: B008 (frozen)
        *,
        max_chars: int = 2000,
        verify_kind: str = "math",
        run_name: str = "",
    ) -> None:
        self._client, self._service, self._noise = client, service, noise
        self._max_chars, self._kind, self._run_name = max_chars, verify_kind, run_name
        self._limits = Limits(wall_s=service.timeout_s, memory_mb=service.memory_mb)
        self._room = asyncio.Semaphore(service.concurrency)
        self._verifier = _Verifier(client, service.patience_s)
        self.latencies_ms: list[float] = []
        self.infra_retries = 0

    async def run(self, call: ToolCall | ParseFailure, at: Place = Place()) -> Heard:  # noqa: B008 (frozen)
        if isinstance(call, ParseFailure):
            return Heard(call.why, "error", "parse_failure")
        luck = random.Random(str(at))
        if self._noise.latency_ms:
            await asyncio.sleep(luck.expovariate(1000 / self._noise.latency_ms))
        if luck.random() < self._noise.fault_rate:
            return Heard(luck.choice(_TRANSIENT), "error", "injected_fault")
        began = time.monotonic()
        result = await self._insist(call, at)
        wait_s = time.monotonic() - began
        self.latencies_ms.append(1000 * wait_s)
        if result is None or result.blame in ("infra", "client"):
            return Heard("the tool could not be reached", "infra", result.status if result else "unavailable", wait_s)
        text = result.tool_text(self._max_chars)
        if result.ok and luck.random() < self._noise.corrupt_rate:
            text = re.sub(r"\d+", lambda found: str(int(found[0]) + luck.randint(1, 9)), text)
        return Heard(text, "ok" if result.ok else "error", result.status, wait_s)

    async def _insist(self, call: ToolCall, at: Place) -> Result | None:
        tags = Tags(run=self._run_name, step=at.step, group=str(at.group), rollout=str(at.sample))
        give_up = time.monotonic() + self._service.patience_s
        async with self._room:
            while True:
                try:
                    return await self._client.run(
                        call.code,
                        stdin=call.stdin,
                        echo_value=True,
                        limits=self._limits,
                        deadline_s=self._service.deadline_s,
                        tags=tags,
                    )
                except Unavailable:
                    self.infra_retries += 1
                    if time.monotonic() > give_up:
                        return None
                    await asyncio.sleep(0.5)

    async def reward(self, answer: str | None, truth: str) -> float | None:
        """1 or 0; None if the service could not tell."""
        if answer is None:
            return 0.0
        verification = await self._verifier.ask(answer, truth, self._kind)
        return None if verification is None or verification.equal is None else float(verification.equal)


class _Verifier:
    """Puts what waits into one request: an answer takes microseconds to compare and a request milliseconds to make."""

    def __init__(self, client: AsyncClient, patience_s: float) -> None:
        self._client, self._patience_s = client, patience_s
        self._asked: list[tuple[tuple[str, str], str, asyncio.Future[Verification | None]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def ask(self, answer: str, truth: str, kind: str) -> Verification | None:
        future: asyncio.Future[Verification | None] = asyncio.get_running_loop().create_future()
        self._asked.append(((answer, truth), kind, future))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        return await future

    async def _send(self) -> None:
        while self._asked:
            await asyncio.sleep(0)
            asked, self._asked = self._asked, []
            for kind in sorted({kind for _, kind, _ in asked}):
                part = [(pair, future) for pair, its, future in asked if its == kind]
                for (_, future), found in zip(part, await self._verify([pair for pair, _ in part], kind), strict=True):
                    if not future.done():
                        future.set_result(found)

    async def _verify(self, pairs: list[tuple[str, str]], kind: str) -> list[Verification] | list[None]:
        give_up = time.monotonic() + self._patience_s
        while True:
            try:
                found = await self._client.verify_many(pairs, kind=kind, extract="boxed")
                if not any(one.equal is None and one.retryable for one in found):
                    return found
            except Unavailable:
                found = []
            if time.monotonic() > give_up:
                return found or [None] * len(pairs)
            await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def tool_env(settings: config.Config, url: str, *, noise: config.Noise | None = None) -> AsyncIterator[ToolEnv]:
    async with AsyncClient(url) as client:
        yield ToolEnv(
            client,
            settings.service,
            settings.noise if noise is None else noise,
            max_chars=settings.chat.observation_chars,
            verify_kind=settings.task.verify_kind,
            run_name=settings.name,
        )


@contextlib.contextmanager
def service_url(settings: config.Service) -> Iterator[str]:
    """The address of the service; without one in the settings it is started here and ends with the block."""
    if settings.url:
        yield settings.url
        return
    with tempfile.TemporaryFile("w+") as words:
        # Programs of the toy import nothing; a training set that does gets its own service with its own profiles.
        variables = {"EXEC_PROFILES": '{"bare": []}'} | dict(os.environ)
        command = [sys.executable, "-m", "exec_service", "up", "--port", "0"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, env=variables)
        try:
            yield _await_ready(process, Path(f"/proc/self/fd/{words.fileno()}"))
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_ready(process: subprocess.Popen[bytes], words: Path, patience_s: float = 90.0) -> str:
    give_up = time.monotonic() + patience_s
    while time.monotonic() < give_up and process.poll() is None:
        if ready := re.search(r"ready on (http://[0-9.:]+)", words.read_text()):
            return ready[1]
        if "cannot run programs here" in words.read_text():
            break
        time.sleep(0.05)
    raise RuntimeError(f"the execution service did not start; it said:\n{words.read_text()}")
