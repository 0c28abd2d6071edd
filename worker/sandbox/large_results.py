"""Large results: a thread makes them in slices, so that the event loop is not blocked; their total memory is bounded."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LARGE_BYTES = 256 << 10  # smaller ones are made at once, because a thread takes longer
EXPANSION = 3  # an invalid byte becomes a character of three bytes; base64 expands less
T = TypeVar("T")


class LargeResults:
    """A task that makes a large result holds its bytes until the task ends, when the answer is sent. Other tasks wait.

    `max_bytes` is for all results, `max_bytes_each` for the output and files of one, as sent.
    """

    def __init__(self, max_bytes: int = 256 << 20, max_bytes_each: int = 32 << 20) -> None:
        self.max_bytes_each = max_bytes_each
        self._most, self._used = max_bytes, 0
        self._held: dict[asyncio.Task[object], int] = {}
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._thread = ThreadPoolExecutor(1, "large-results")  # one thread: Python runs one at a time anyway

    async def make(self, bytes_: int, work: Callable[[], T]) -> T:
        """Run `work`, which reads about `bytes_`. If this is cancelled, it waits for the end of `work`, so that the caller can
        close files."""
        if bytes_ <= LARGE_BYTES:
            return work()
        await self._hold(min(EXPANSION * bytes_, self.max_bytes_each, self._most))
        made = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            await asyncio.wait({made})
            raise

    def release(self) -> None:
        """Give back the bytes of the task's last result before the task ends."""
        self._ended(asyncio.current_task())

    async def _hold(self, bytes_: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._ended(task)  # its last result is sent or not needed
        task.add_done_callback(self._ended)
        if self._waiting or self._used + bytes_ > self._most:
            await self._wait(bytes_)
        else:
            self._used += bytes_
        self._held[task] = bytes_

    async def _wait(self, bytes_: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((bytes_, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(bytes_)
            raise

    def _ended(self, task: asyncio.Task[object] | None) -> None:
        if task in self._held:
            self._give_back(self._held.pop(task))

    def _give_back(self, bytes_: int) -> None:
        self._used -= bytes_
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.cancelled() and self._used + wanted > self._most:
                return
            self._waiting.popleft()
            if not turn.done():
                self._used += wanted
                turn.set_result(None)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
