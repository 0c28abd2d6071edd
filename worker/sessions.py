"""The sessions of one worker: handles requests about them and ends them when they expire.

A session is one process of a sandbox (`sandbox.session_tree`): the first one or a fork. The worker that started a session keeps
it and the records of its finished cells in memory; they end together.
"""

import asyncio
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import NamedTuple, NoReturn, Self

import msgspec

from exec_wire import Result, pack, verdict
from exec_wire.messages import sessions as wire
from exec_wire.messages.sessions import Cell, Refused, Reply, SessionInfo, SessionSpec
from exec_wire.supervisor import Supervisor, stop
from worker.pool import Pool
from worker.sandbox.cell_run import CellRun
from worker.sandbox.protocol import ZygoteReport
from worker.sandbox.runner_client import SandboxUnavailable
from worker.sandbox.session_tree import Member, MemberEnded, NotForkable, SessionSlotBusy, SessionTree, StartFailed
from worker.sandbox.verdict import judge
from worker.sandbox.zygote_client import ZygoteLost
from worker.slots import Claim

log = logging.getLogger("worker")

CHECKPOINT_BYTES = 16 << 20  # of a folder that a checkpoint copies
SWEEP_S = 1.0
IDLE_CPU_S, IDLE_CPU_SHARE = 5.0, 0.1  # CPU time allowed while no cell runs, and how fast it is forgiven
BUSY_PAUSE_S, BUSY_TRIES = 0.05, 40
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


class Sessions:
    def __init__(self, worker: str, pool: Pool, supervisor: Supervisor | None = None) -> None:
        self._worker, self._pool, self._config = worker, pool, pool.config
        self._supervisor = supervisor or Supervisor()
        self._life = secrets.token_hex(4)
        self.most = self._config.max_sessions
        self._sessions: dict[str, Session] = {}
        self._starting = 0  # sessions that are being started
        self.counts: Counter[str] = Counter({"started": 0, "forks": 0, "rollbacks": 0, "expired": 0, "lost": 0})

    async def __aenter__(self) -> Self:
        self._sweeper = self._supervisor.start("sessions", self._sweep_forever)
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop([self._sweeper])
        await asyncio.gather(*(tree.kill() for tree in self._trees()), return_exceptions=True)

    @property
    def live(self) -> int:
        return sum(session.alive for session in self._sessions.values())

    @property
    def memory_bytes(self) -> int:
        return sum(tree.memory_bytes for tree in self._trees())

    def _trees(self, tenant: str | None = None) -> set[SessionTree]:
        return {session.member.tree for session in self._sessions.values() if tenant is None or session.spec.tenant == tenant}

    async def handle(self, order: wire.Order, remaining_s: float) -> Reply:
        """Do what a request asks of a session. `remaining_s`: until its deadline."""
        try:
            match order:
                case wire.Create():
                    return await self._create(order.spec)
                case wire.ListSessions():
                    picked = [s for s in self._sessions.values() if order.selection.picks(s.spec.tags, s.spec.tenant)]
                    return wire.Told([session.info(self._worker) for session in picked])
                case wire.RunCell():
                    session = self._find(order.session, order.cell.tenant)
                    claim = Claim(session.spec.tenant, session.spec.priority, order.weight, is_cell=True)
                    result = await self._run(session, order.cell, claim, time.monotonic() + remaining_s)
                    return wire.Ran(result, session.spec.tags)
                case wire.ForkSession():
                    return await self._fork(self._find(order.session, order.fork.tenant), order.fork)
                case wire.Look():
                    session = self._find(order.session, order.tenant)
                    session.used_at = time.monotonic()
                    return wire.Told([session.info(self._worker)])
                case wire.RollBack():
                    return await self._roll_back(self._find(order.session, order.tenant))
                case wire.Interrupt():
                    session = self._find(order.session, order.tenant)
                    session.used_at = time.monotonic()
                    if session.running and session.alive:
                        session.member.interrupt()
                    return wire.Did(session.running)
                case wire.PutFiles():
                    return await self._files(self._find(order.session, order.tenant), order.files, [])
                case wire.FetchFiles():
                    return await self._files(self._find(order.session, order.tenant), {}, order.paths)
                case wire.End():
                    await self._end_session(self._find(order.session, order.tenant))
                    return wire.Did(True)
        except Refusal as refusal:
            return refusal.reply

    def _find(self, id: str, tenant: str) -> Session:
        session = self._sessions.get(id)
        if session is not None and session.spec.tenant == tenant:
            return session
        parts = wire.read_session_id(id)
        if session is None and parts is not None and parts.life != self._life:
            raise Refusal("session_lost", "the worker that had the session was restarted")
        raise Refusal("no_such_session", "session not found, or already ended")

    # -- making ---------------------------------------------------------------------------------------------------------------

    async def _create(self, spec: SessionSpec) -> Reply:
        if spec.profile and spec.profile not in self._pool.profiles:
            raise Refusal("bad_field", f"there is no profile {spec.profile!r}; choose one of {', '.join(self._pool.profiles)}")
        self._check_room(spec.tenant, 1)
        self._starting += 1
        try:
            member = await self._start(spec)
        finally:
            self._starting -= 1
        session = self._add(member, msgspec.structs.replace(spec, env={}, files={}))
        self.counts["started"] += 1
        return wire.Told([session.info(self._worker)])

    async def _start(self, spec: SessionSpec) -> Member:
        for _ in range(BUSY_TRIES):
            try:
                return await self._pool.start_session(spec.profile, spec.limits, spec.env, spec.files)
            except (SessionSlotBusy, ZygoteLost, SandboxUnavailable, TimeoutError):
                await asyncio.sleep(BUSY_PAUSE_S)
            except StartFailed as error:
                if error.by_request:
                    raise Refusal("bad_field", f"its files, variables and limits do not fit together: {error}") from error
                raise Refusal("internal", str(error)) from error
        raise Refusal("not_ready", "no warm interpreter available", RETRY_AFTER_S)

    def _add(self, member: Member, spec: SessionSpec, parent: str = "", cells: int = 0) -> Session:
        session = Session(wire.new_session_id(self._worker, self._life), member, spec, parent, cells)
        self._sessions[session.id] = session
        self._watch(session, member)
        return session

    def _check_room(self, tenant: str, more: int) -> None:
        """Ended sessions have no process and do not count; they are kept until a request has seen that, or until they
        expire."""
        own = sum(session.alive and session.spec.tenant == tenant for session in self._sessions.values())
        own_memory = sum(tree.memory_bytes for tree in self._trees(tenant))
        bounds = (
            (self.live + self._starting + more, self.most, "sessions on this worker"),
            (own + more, self._config.max_sessions_per_tenant, "sessions of this tenant"),
            (self.memory_bytes >> 20, self._config.session_memory_mb, "MB used by sessions on this worker"),
            (own_memory >> 20, self._config.session_memory_per_tenant_mb, "MB used by sessions of this tenant"),
        )
        for wanted, most, what in bounds:
            if wanted > most:
                raise Refusal("too_many_sessions", f"{wanted} {what}; {most} is the most", RETRY_AFTER_S)
        if not self._pool.session_slots:
            raise Refusal("too_many_sessions", "no session slot is free on this worker", RETRY_AFTER_S)

    async def _fork(self, session: Session, fork: wire.Fork) -> Reply:
        async with session.in_turn():
            self._require_alive(session)
            self._check_room(session.spec.tenant, fork.n)
            self._starting += fork.n
            try:
                members = await session.member.tree.fork(session.member, fork.n)
            except NotForkable as error:
                self._require_alive(session)
                raise Refusal("not_forkable", str(error)) from error
            except ZygoteLost:
                raise Refusal("session_lost", "the session's zygote died") from None
            finally:
                self._starting -= fork.n
        self.counts["forks"] += fork.n
        spec = msgspec.structs.replace(session.spec, tags=fork.tags or session.spec.tags)
        children = [self._add(member, spec, session.id, session.cells) for member in members]
        return wire.Told([child.info(self._worker) for child in children])

    # -- using ----------------------------------------------------------------------------------------------------------------

    async def _run(self, session: Session, cell: Cell, claim: Claim, deadline: float) -> Result:
        if (known := session.recorded(cell)) is not None:
            session.used_at = time.monotonic()
            return await asyncio.shield(known)
        if session.lost:
            return verdict("session_lost", error="the session's zygote died", state_kept=False)
        future = session.record(cell)
        try:
            result = await self._run_once(session, cell, claim, deadline)
        except BaseException as error:
            session.forget(cell)
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: perhaps no other request waits
            raise
        if result.status == "expired":
            session.forget(cell)
        session.finish(cell, future, result)
        return result

    async def _run_once(self, session: Session, cell: Cell, claim: Claim, deadline: float) -> Result:
        try:
            async with asyncio.timeout(deadline - time.monotonic()) as patience, session.in_turn():
                self._require_alive(session)
                async with self._pool.slot_for_cell(claim, deadline - time.monotonic()):
                    patience.reschedule(None)  # from here on the wall limit applies
                    self._require_alive(session)  # the session may have ended while the cell waited
                    return await self._run_now(session, cell, deadline - time.monotonic())
        except TimeoutError:
            return verdict("expired", error="the deadline passed before the cell was started", state_kept=session.alive)

    async def _run_now(self, session: Session, cell: Cell, remaining_s: float) -> Result:
        if session.spec.auto_checkpoint:
            await self._make_checkpoint(session)
        wall_s = session.member.tree.limits.wall_s if cell.wall_s is None else cell.wall_s
        session.cells += 1
        session.running = True
        try:
            with closing(CellRun(session.member, cell.code, cell.stdin, session.cells, wall_s, remaining_s)) as run:
                result = await run.run()
        finally:
            session.running = False
        result.sandbox = msgspec.structs.replace(self._pool.sandbox, profile=session.member.tree.zygote.profile)
        result.worker, result.id = self._worker, cell.id
        if not result.state_kept:
            session.why_ended = f"its process ended in cell {session.cells}: {session.member.broken or result.status}"
        return result

    async def _make_checkpoint(self, session: Session) -> None:
        """Replaces the last checkpoint. A session that cannot be forked has none."""
        old, session.checkpoint = session.checkpoint, None
        if old is not None and old.alive:
            old.kill()
        try:
            made = await session.member.tree.checkpoint(session.member, CHECKPOINT_BYTES)
            session.checkpoint, session.checkpoint_files = made
        except NotForkable as error:
            log.info("no checkpoint made, the session cannot be forked: %s", error)
        except ZygoteLost:
            pass  # the cell that follows reports it
        else:
            self._watch(session, session.checkpoint)

    async def _roll_back(self, session: Session) -> Reply:
        if session.running:
            raise Refusal("session_busy", "interrupt it first, or wait")
        async with session.in_turn():
            checkpoint, session.checkpoint = session.checkpoint, None
            if checkpoint is None or not checkpoint.alive:
                raise Refusal("no_checkpoint", "create the session with auto_checkpoint: then one is made before each cell")
            old, session.member = session.member, checkpoint
            try:
                if old.alive:
                    await old.tree.end(old)
                files = await checkpoint.tree.restore(checkpoint, session.checkpoint_files)
            except MemberEnded:
                raise Refusal("session_ended", "the process of its checkpoint ended") from None
            session.why_ended = ""
            session.cells -= 1
            self.counts["rollbacks"] += 1
            return wire.Told([session.info(self._worker, files)])

    async def _files(self, session: Session, put: dict[str, str], fetch: list[str]) -> Reply:
        async with session.in_turn():
            self._require_alive(session)
            try:
                found = await session.member.tree.files(session.member, put, fetch)
            except MemberEnded as error:
                raise Refusal("session_ended", str(error)) from error
        if isinstance(found, str):
            raise Refusal("bad_field", found)
        return found

    def _require_alive(self, session: Session) -> None:
        if session.lost:
            raise Refusal("session_lost", "the session's zygote died")
        if not session.alive:
            hint = "roll it back, or create a new one" if session.can_roll_back else "create a new one"
            raise Refusal("session_ended", f"{session.why_ended or 'its process ended'}; {hint}")

    # -- ending ---------------------------------------------------------------------------------------------------------------

    def _watch(self, session: Session, member: Member) -> None:
        """When a process ends by itself: note why, and kill the sandbox if it has no other process."""

        def ended(future: asyncio.Future[ZygoteReport]) -> None:
            if future.cancelled():
                return
            if future.exception() is not None:
                session.lost = session.lost or member is session.member
                self.counts["lost"] += member is session.member
                return
            if member is session.member and not session.running and not session.why_ended:
                how = judge(future.result(), session.member.tree.limits)
                session.why_ended = f"its process ended while no cell ran: {member.broken or how.status}"
                blameless = future.result().oom_kills or not member.broken
                session.lost = how.blame == "infra" and bool(blameless)  # its runner died, or the machine was out of memory
                self.counts["lost"] += session.lost
            if not member.tree.members:
                member.tree.zygote.kill(member.tree.number, member.tree.index)

        member.ended.add_done_callback(ended)

    async def _end_session(self, session: Session) -> None:
        del self._sessions[session.id]
        tree = session.member.tree
        alive = [member for member in (session.member, session.checkpoint) if member is not None and member.alive]
        if alive:
            await tree.end(*alive)
        tree.dead_folders.append(session.member.folder)  # the next fork removes it

    async def _sweep_forever(self) -> NoReturn:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for session in [s for s in self._sessions.values() if not s.pending and now - s.used_at > s.spec.ttl_s]:
                if session.id in self._sessions:
                    self.counts["expired"] += 1
                    await self._end_session(session)
            for tree in self._trees():
                self._check_idle_cpu(tree)

    def _check_idle_cpu(self, tree: SessionTree) -> None:
        """A session that keeps a CPU busy while none of its cells runs bypasses the slots that limit how much runs: end it."""
        own = [session for session in self._sessions.values() if session.member.tree is tree]
        used_s, idle = tree.cpu_s, not any(session.pending for session in own)
        grew_s, tree.cpu_seen_s = used_s - tree.cpu_seen_s, used_s
        tree.idle_cpu_s = max(0.0, tree.idle_cpu_s + grew_s * idle - IDLE_CPU_SHARE * SWEEP_S)
        if tree.idle_cpu_s > IDLE_CPU_S:
            for session in own:
                session.why_ended = "it kept a CPU busy while none of its cells ran"
            tree.zygote.kill(tree.number, tree.index)
