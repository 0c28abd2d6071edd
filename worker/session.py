"""One session of a worker: its state, and the records of its finished cells."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from exec_wire import Limits, Result
from exec_wire.messages.calls import pack
from exec_wire.messages.sessions import Cell, Refused, SessionInfo, SessionSpec
from worker.sandbox.session_member import Member

RECORDS, RECORD_BYTES, RECORD_S = 64, 16 << 20, 120.0  # of one session's finished cells
MAX_QUEUED = 64  # requests of one session that wait or run; the record of such a cell is never dropped
RETRY_AFTER_S = 5.0


class Refusal(Exception):
    def __init__(self, code: str, detail: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.reply = Refused(code, detail, retry_after_s=retry_after_s)


class Record(NamedTuple):
    """A cell that runs or has run under an idempotency key."""

    code: tuple[str, str]
    result: asyncio.Future[Result]
    ends_at: float = math.inf  # of a finished cell


class Session:
    def __init__(self, id: str, member: Member, spec: SessionSpec, parent: str = "", cells: int = 0) -> None:
        self.id, self.member, self.spec, self.parent, self.cells = id, member, spec, parent, cells
        self.checkpoint: Member | None = None
        self.checkpoint_files = False
        self.running = False
        self.why_ended = ""
        self.lost = False
        self.lock = asyncio.Lock()  # one request at a time, in order of arrival
        self.pending = 0
        self.used_at = time.monotonic()
        self._records: dict[str, Record] = {}

    @property
    def limits(self) -> Limits:
        return self.member.tree.limits

    @property
    def alive(self) -> bool:
        return self.member.alive and not self.member.broken

    @property
    def can_roll_back(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.alive

    @asynccontextmanager
    async def in_turn(self) -> AsyncIterator[None]:
        """Use of the session by one request at a time. Restarts its idle time."""
        if self.pending >= MAX_QUEUED:
            detail = f"{self.pending} requests of this session wait or run; wait for their answers"
            raise Refusal("session_queue_full", detail, RETRY_AFTER_S)
        self.pending += 1
        try:
            async with self.lock:
                try:
                    yield
                finally:
                    self.used_at = time.monotonic()
        finally:
            self.pending -= 1

    def info(self, worker: str, files_restored: bool | None = None) -> SessionInfo:
        return SessionInfo(
            self.id,
            "running" if self.running else "idle" if self.alive else "ended",
            self.parent,
            self.spec.profile,
            self.cells,
            self.can_roll_back,
            round(time.monotonic() - self.used_at, 3),
            self.spec.ttl_s,
            self.member.tree.memory_bytes,
            self.spec.tags,
            worker,
            self.why_ended,
            files_restored,
        )

    def recorded(self, cell: Cell) -> asyncio.Future[Result] | None:
        """The result of the cell with this key. A cell is never run twice: a repeated request waits for the same run."""
        now = time.monotonic()
        for key in [key for key, record in self._records.items() if record.ends_at < now]:
            del self._records[key]
        record = self._records.get(cell.idempotency_key) if cell.idempotency_key else None
        if record is not None and record.code != (cell.code, cell.stdin):
            raise Refusal("idempotency_conflict", "the key was used for another cell of this session")
        return record.result if record is not None else None

    def record(self, cell: Cell) -> asyncio.Future[Result]:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if cell.idempotency_key:
            self._records[cell.idempotency_key] = Record((cell.code, cell.stdin), future)
        return future

    def finish(self, cell: Cell, future: asyncio.Future[Result], result: Result) -> None:
        """Keep the record for a while and drop the oldest ones beyond the bounds, but none of a cell that waits or runs."""
        future.set_result(result)
        if (record := self._records.pop(cell.idempotency_key, None)) is None:
            return
        self._records[cell.idempotency_key] = record._replace(ends_at=time.monotonic() + RECORD_S)
        finished = [key for key, record in self._records.items() if record.result.done()]
        while len(finished) > RECORDS or (finished and self._record_bytes() > RECORD_BYTES):
            del self._records[finished.pop(0)]

    def forget(self, cell: Cell) -> None:
        """The cell was not run: a repeated request runs it."""
        self._records.pop(cell.idempotency_key, None)

    def _record_bytes(self) -> int:
        done = (record.result.result() for record in self._records.values() if record.result.done())
        return sum(
            len(result.stdout) + len(result.stderr) + len(result.value or "") + len(pack(result.display)) for result in done
        )
