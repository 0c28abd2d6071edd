"""Keeps the long-lived tasks of a process running.

A task that raises, or returns, is logged with its traceback, counted and started again after a pause, which doubles with every
failure. A task that fails `MOST_FAILURES` times within `WINDOW_S` does not recover by itself: the supervisor gives up and says
so (`gave_up_because`, `on_give_up`). The process then takes no more work, drains and exits with `EXIT_TASK_FAILED`. Tasks are
restarted even then, because draining needs them.

An unavailable queue is no failure of a task: the task pauses and goes on.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine
from typing import Any, ParamSpec, TypeVar

from exec_wire.queue.protocol import QueueUnavailable

log = logging.getLogger("exec_wire.supervisor")

MOST_FAILURES, WINDOW_S = 5, 60.0
PAUSE_S, PAUSE_MOST_S = 0.1, 10.0
UNAVAILABLE_PAUSE_S = 0.3
SETTLED_S = 1.0  # a task that was restarted counts as failing until it has run for so long
EXIT_TASK_FAILED = 70  # sysexits: internal software error

P = ParamSpec("P")
T = TypeVar("T")


class TaskKeepsFailing(Exception):
    """The supervisor gave up; the message says why."""


class Supervisor:
    """One per process. The code that starts a task also cancels it."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()  # by task, since the start; every task that was started has an entry
        self.gave_up_because = ""
        self._failed_at: dict[str, deque[float]] = {}
        self._failing_until: dict[str, float] = {}
        self._on_give_up: list[Callable[[], None]] = []

    def on_give_up(self, tell: Callable[[], None]) -> None:
        self._on_give_up.append(tell)

    def start(self, name: str, run: Callable[[], Coroutine[Any, Any, object]]) -> asyncio.Task[None]:
        """Call `run` and await it, again and again, until the task is cancelled."""
        self._know(name)
        return asyncio.create_task(self._keep_running(name, run), name=name)

    def guarded(self, name: str, call: Callable[P, object]) -> Callable[P, None]:
        """`call` for a loop or a timer that has to go on with the next item: an exception counts as a failure of the task."""
        self._know(name)

        def guard(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                call(*args, **kwargs)
            except Exception as error:
                self.failed(name, error)

        return guard

    def is_failing(self, name: str) -> bool:
        """Whether the task is down or was restarted less than `SETTLED_S` ago."""
        return time.monotonic() < self._failing_until.get(name, 0.0)

    def check(self) -> None:
        """Raise `TaskKeepsFailing` if the supervisor gave up."""
        if self.gave_up_because:
            raise TaskKeepsFailing(self.gave_up_because)

    def _know(self, name: str) -> None:
        self.failures.setdefault(name, 0)
        self._failed_at.setdefault(name, deque(maxlen=MOST_FAILURES))

    async def _keep_running(self, name: str, run: Callable[[], Coroutine[Any, Any, object]]) -> None:
        while True:
            pause_s = UNAVAILABLE_PAUSE_S
            try:
                await run()
                pause_s = self.failed(name, RuntimeError("the task returned"))
            except QueueUnavailable as error:
                log.warning("%s; the task goes on", error, extra={"task": name})
            except asyncio.CancelledError as cancelled:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                pause_s = self.failed(name, cancelled)  # an awaitable was cancelled, not the task itself
            except Exception as error:
                pause_s = self.failed(name, error)
            await asyncio.sleep(pause_s)

    def failed(self, name: str, error: BaseException) -> float:
        """Log and count a failure; for a task that its owner starts again. Gives how long to pause before the next start."""
        self._know(name)
        now, failed_at = time.monotonic(), self._failed_at[name]
        self.failures[name] += 1
        failed_at.append(now)
        recent = sum(at > now - WINDOW_S for at in failed_at)
        pause_s: float = min(PAUSE_S * 2 ** (recent - 1), PAUSE_MOST_S)
        self._failing_until[name] = now + pause_s + SETTLED_S
        log.error("a task failed; it goes on in %.1f s", pause_s, exc_info=error, extra={"task": name})
        if recent >= MOST_FAILURES and not self.gave_up_because:
            self._give_up(f"the task {name!r} failed {recent} times within {WINDOW_S:g} s: {type(error).__name__}: {error}")
        return pause_s

    def _give_up(self, why: str) -> None:
        self.gave_up_because = why
        log.critical("%s; this process drains and exits", why)
        for tell in self._on_give_up:
            tell()


async def stop(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, supervised or not, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def logged(task: asyncio.Task[T], failed: str) -> asyncio.Task[T]:
    """A task that nobody awaits: its exception is logged with the message `failed`."""

    def end(task: asyncio.Task[T]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(failed, exc_info=error)

    task.add_done_callback(end)
    return task
