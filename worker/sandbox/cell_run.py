"""One cell in one process of a session: run it, end it by its limits, judge it, read its output."""

import asyncio
import contextlib
import marshal
import os
import time
from typing import Any

import msgspec

from exec_wire import Display, Result, Timings, verdict
from worker.sandbox.memory_files import close_all, output, sealed, text
from worker.sandbox.session_tree import GRACE_S, Member, MemberReply, decode_untrusted
from worker.sandbox.verdict import KILL_AT_OUTPUT, judge, usage_of
from worker.sandbox.zygote_client import ZygoteLost

CHECK_S = 0.05  # between two checks of a running cell: its output, and how long it has starved
CHECK_SOON_S = 0.005  # the same, for a cell that has nearly used up its time
EXTRAS_BYTES = 16 << 20  # of a cell's value and display data
EXTRAS_NAMES = 10_000  # fields and formats in it: decoding millions would block the event loop
VALUE_CHARS = 64 << 10  # inside/session.py cuts at the same length


class CellExtras(msgspec.Struct):
    """The results of a cell besides its output."""

    value: str | None = None
    display: list[Display] = []
    completed: bool = False


_decode_extras = msgspec.json.Decoder(CellExtras).decode


class CellRun:
    """A cell and the files for its output. `close` closes them."""

    def __init__(self, member: Member, code: str, stdin: str, number: int, limit_s: float, remaining_s: float) -> None:
        """`limit_s` does not count the time that the cell starves; `remaining_s`, until its deadline, counts all time."""
        self._member, self._number = member, number
        self._limit_s, self._remaining_s = limit_s, remaining_s
        self._starved_s = 0.0  # at the last check
        self._cap = member.tree.limits.output_kb * 1024
        self._oom_before = member.tree.oom_kills
        self._given = [sealed("payload", marshal.dumps(code, 2)), sealed("stdin", stdin.encode("utf-8", "surrogatepass"))]
        self._kept = [output("stdout"), output("stderr"), output("extras")]

    def close(self) -> None:
        close_all(self._given)
        close_all(self._kept)

    async def run(self) -> Result:
        started = time.monotonic()
        self._member.begin_cell()
        reply = self._member.send("run", {"cell": self._number}, [*self._given, *self._kept])
        close_all(self._given)
        stopped = await self._watch(reply, started)
        elapsed_s = time.monotonic() - started
        extras = await self._read_extras(reply)
        result = self._judge(reply, stopped)
        result.state_kept = reply.done() and self._member.alive and not self._member.broken
        if result.state_kept:
            result.value, result.display = extras.value, extras.display
            result.completed = extras.completed and result.status == "ok"
        result.timings = Timings(run_ms=round(elapsed_s * 1000, 3))
        await self._measure(result, elapsed_s)
        output_bytes = sum(min(self._cap, size) for size in self._output_sizes())
        await self._member.tree.results.make(output_bytes, lambda: self._read_output(result))
        return result

    async def _watch(self, reply: asyncio.Future[MemberReply], started: float) -> Result | None:
        """Until the cell has replied or its process has ended; stops a cell that exceeds a limit, and returns the verdict."""
        either: set[asyncio.Future[Any]] = {reply, self._member.ended}
        while True:
            due = started + min(self._limit_s + self._starved_s, self._remaining_s)
            check_s = min(CHECK_S, max(CHECK_SOON_S, due - time.monotonic()))
            await asyncio.wait(either, timeout=check_s, return_when=asyncio.FIRST_COMPLETED)
            if any(future.done() for future in either):
                return None
            if self._member.tree.oom_kills > self._oom_before:
                return await self._stop(either, verdict("memory_limit"))
            if self._wrote_too_much:
                return await self._stop(either, verdict("output_limit"))
            elapsed_s = time.monotonic() - started
            with contextlib.suppress(ZygoteLost):  # the session is lost; the next check sees it
                self._starved_s = max(self._starved_s, (await self._member.usage()).starved_ns / 1e9)  # native/cpu_meter.c
            if elapsed_s - self._starved_s >= self._limit_s:
                return await self._stop(either, verdict("timeout"))
            if elapsed_s >= self._remaining_s:
                late = "the deadline passed before the cell had the time that its limit allows"
                return await self._stop(either, verdict("timeout", infra=True, error=late))

    def _output_sizes(self) -> list[int]:
        return [os.fstat(fd).st_size for fd in self._kept[:2]]

    @property
    def _wrote_too_much(self) -> bool:
        return max(self._output_sizes()) > self._cap * KILL_AT_OUTPUT

    async def _stop(self, either: set[asyncio.Future[Any]], stopped: Result) -> Result:
        """Interrupt the cell first, which keeps the session's state; kill it after a grace period."""
        self._member.interrupt()
        await asyncio.wait(either, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        if not any(future.done() for future in either):
            self._member.kill()
            await self._member.wait_dead()
        return stopped

    def _judge(self, reply: asyncio.Future[MemberReply], stopped: Result | None) -> Result:
        ended = self._member.ended
        if not reply.done() and (not ended.done() or ended.exception() is not None):
            return verdict("session_lost", error="the session's zygote died")
        if stopped is not None:
            return stopped
        if ended.done() and ended.exception() is None and ended.result().oom_kills:  # kernel facts before its own reply
            return judge(ended.result(), self._member.tree.limits)
        if self._member.broken:
            return verdict("signal", signal=9, error=f"the session was ended: {self._member.broken}")
        if reply.done() and self._member.tree.oom_kills > self._oom_before:  # one of its children was killed
            return verdict("memory_limit")
        if reply.done() and self._wrote_too_much:  # between two checks
            return verdict("output_limit")
        if reply.done():
            code = reply.result().code & 0xFF
            return verdict("ok" if code == 0 else "error", exit_code=code)
        return judge(ended.result(), self._member.tree.limits, output_bytes=max(self._output_sizes()))

    async def _measure(self, result: Result, elapsed_s: float) -> None:
        try:
            report = await self._member.usage() if self._member.alive else self._member.ended.result()
        except ZygoteLost:
            return
        cpu_ns, self._member.cpu_ns = report.cpu_ns - self._member.cpu_ns, report.cpu_ns
        result.usage = usage_of(report, elapsed_s, self._starved_s, cpu_ns)

    async def _read_extras(self, reply: asyncio.Future[MemberReply]) -> CellExtras:
        """The cell's value and display data. A session that writes anything else there is ended."""
        fd = self._kept[2]
        if not reply.done() or not self._member.alive or os.fstat(fd).st_size > EXTRAS_BYTES:
            return CellExtras()
        data = os.pread(fd, EXTRAS_BYTES, 0)
        names = data.count(b'":') - data.count(b'\\":')
        extras = decode_untrusted(_decode_extras, data) if names <= EXTRAS_NAMES else None
        if extras is None or len(extras.value or "") > VALUE_CHARS:
            await self._member.end_because("the value and display data of its cell cannot be read")
            return CellExtras()
        return extras

    def _read_output(self, result: Result) -> None:
        stdout_bytes, stderr_bytes = self._output_sizes()
        result.stdout, cut_out = text(self._kept[0], stdout_bytes, self._cap)
        result.stderr, cut_err = text(self._kept[1], stderr_bytes, self._cap)
        result.truncated = cut_out or cut_err
