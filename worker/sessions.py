"""The sessions of one worker: who they belong to, what may be asked of them, and when they end.

A session takes part in the life of one sandbox (`sandbox.session_tree`): it is its first process or a fork. The worker that
started a session keeps it, and its records of finished cells, in memory: they end together.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import Counter
from typing import NamedTuple, NoReturn

import msgspec

from exec_wire import Limits, Priority, Result, Tags, verdict
from exec_wire.messages.calls import pack
from exec_wire.messages.sessions import (
    Cell,
    Create,
    Did,
    End,
    FetchFiles,
    ForkSession,
    Got,
    Interrupt,
    ListSessions,
    Look,
    Order,
    PutFiles,
    Ran,
    Refused,
    Reply,
    RollBack,
    RunCell,
    SessionInfo,
    Told,
    new_session_id,
    read_session_id,
)
from exec_wire.supervisor import Supervisor, stop
from worker.pool import Pool, ZygoteLost
from worker.sandbox.execution import Outcome, judge
from worker.sandbox.protocol import Say
from worker.sandbox.runner_client import SandboxUnavailable
from worker.sandbox.session_tree import CellRun, Member, MemberEnded, NotForkable, PlaceBusy, StartFailed, Tree
from worker.slots import Claim

log = logging.getLogger("worker")

CHECKPOINT_BYTES = 16 << 20  # of a folder that is copied for a checkpoint
SWEEP_S = 1.0
IDLE_CPU_S, IDLE_CPU_SHARE = 5.0, 0.1  # CPU time that may be used while no cell runs, and how fast that is forgotten
BUSY_PAUSE_S, BUSY_TRIES = 0.05, 40
RECORDS, RECORD_BYTES, RECORD_S = 64, 16 << 20, 120.0  # of one session's finished cells
MAX_QUEUED = 64  # requests of one session that wait or run; the record of such a cell is never dropped
RETRY_AFTER_S = 5.0


class Refusal(Exception):
    def __init__(self, code: str, detail: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.reply = Refused(code, detail, retry_after_s=retry_after_s)


class Record(NamedTuple):
    """What a key stands for: a cell that runs or has run."""

    code: tuple[str, str]
    result: asyncio.Future[Result]
    ends_at: float = math.inf  # of one that has run


class Session:
    def __init__(
        self, id: str, member: Member, tenant: str, tags: Tags, profile: str, ttl_s: float, auto: bool, priority: Priority
    ) -> None:
        self.id, self.member, self.tenant, self.tags, self.profile, self.ttl_s = id, member, tenant, tags, profile, ttl_s
        self.auto_checkpoint, self.priority = auto, priority
        self.parent = ""
        self.checkpoint: Member | None = None
        self.checkpoint_files = False
        self.cells = 0
        self.running = False
        self.why_ended = ""
        self.lost = False
        self.lock = asyncio.Lock()  # one thing at a time, in the order of asking
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

    def info(self, worker: str, files_restored: bool | None = None) -> SessionInfo:
        return SessionInfo(
            self.id,
            "running" if self.running else "idle" if self.alive else "ended",
            self.parent,
            self.profile,
            self.cells,
            self.can_roll_back,
            round(time.monotonic() - self.used_at, 3),
            self.ttl_s,
            self.member.tree.memory_bytes,
            self.tags,
            worker,
            self.why_ended,
            files_restored,
        )

    def recorded(self, cell: Cell) -> asyncio.Future[Result] | None:
        """What became of the cell with this key. A cell is never run twice: who sends it again waits for the same run."""
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
        """Keep its record for a while, and drop the oldest beyond the bounds: none of a cell that waits or runs."""
        future.set_result(result)
        if (record := self._records.pop(cell.idempotency_key, None)) is None:
            return
        self._records[cell.idempotency_key] = record._replace(ends_at=time.monotonic() + RECORD_S)
        finished = [key for key, record in self._records.items() if record.result.done()]
        while len(finished) > RECORDS or (finished and self._record_bytes() > RECORD_BYTES):
            del self._records[finished.pop(0)]

    def forget(self, cell: Cell) -> None:
        """It was not run: who sends it again has it run."""
        self._records.pop(cell.idempotency_key, None)

    def _record_bytes(self) -> int:
        done = (record.result.result() for record in self._records.values() if record.result.done())
        return sum(
            len(result.stdout) + len(result.stderr) + len(result.value or "") + len(pack(result.display)) for result in done
        )


class Sessions:
    """Use as a context manager."""

    def __init__(self, worker: str, pool: Pool, supervisor: Supervisor | None = None) -> None:
        self._worker, self._pool, self._config = worker, pool, pool.config
        self._supervisor = supervisor or Supervisor()
        self._life = secrets.token_hex(4)
        self._sessions: dict[str, Session] = {}
        self._coming = 0  # that are being made
        self.counts: Counter[str] = Counter({"started": 0, "forks": 0, "rollbacks": 0, "expired": 0, "lost": 0})

    async def __aenter__(self) -> Sessions:
        self._sweeper = self._supervisor.start("sessions", self._sweep_forever)
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop([self._sweeper])
        await asyncio.gather(*(tree.kill() for tree in self._trees()), return_exceptions=True)

    @property
    def most(self) -> int:
        return self._config.max_sessions

    @property
    def live(self) -> int:
        return sum(session.alive for session in self._sessions.values())

    @property
    def memory_bytes(self) -> int:
        return sum(tree.memory_bytes for tree in self._trees())

    def _trees(self, tenant: str | None = None) -> set[Tree]:
        return {session.member.tree for session in self._sessions.values() if tenant is None or session.tenant == tenant}

    async def obey(self, order: Order, remaining_s: float) -> Reply:
        try:
            match order:
                case Create():
                    return await self._create(order)
                case ListSessions():
                    picked = [s for s in self._sessions.values() if order.selection.picks(s.tags, s.tenant)]
                    return Told([session.info(self._worker) for session in picked])
                case RunCell():
                    session = self._find(order.session, order.cell.tenant)
                    claim = Claim(session.tenant, session.priority, order.weight, is_cell=True)
                    return Ran(await self._run(session, order.cell, claim, time.monotonic() + remaining_s))
                case ForkSession():
                    return await self._fork(self._find(order.session, order.fork.tenant), order)
                case Look():
                    session = self._find(order.session, order.tenant)
                    session.used_at = time.monotonic()
                    return Told([session.info(self._worker)])
                case RollBack():
                    return await self._roll_back(self._find(order.session, order.tenant))
                case Interrupt():
                    return self._interrupt(self._find(order.session, order.tenant))
                case PutFiles():
                    return await self._files(self._find(order.session, order.tenant), order.files, [])
                case FetchFiles():
                    return await self._files(self._find(order.session, order.tenant), {}, order.paths)
                case End():
                    await self._end(self._find(order.session, order.tenant))
                    return Did(True)
        except Refusal as refusal:
            return refusal.reply

    def _find(self, id: str, tenant: str) -> Session:
        session = self._sessions.get(id)
        if session is not None and session.tenant == tenant:
            return session
        parts = read_session_id(id)
        if session is None and parts is not None and parts.life != self._life:
            raise Refusal("session_lost", "the worker that had it was started anew")
        raise Refusal("no_such_session", "it has ended, or never was")

    # -- making ---------------------------------------------------------------------------------------------------------------

    async def _create(self, order: Create) -> Reply:
        spec = order.spec
        if spec.profile and spec.profile not in self._pool.profiles:
            raise Refusal("bad_field", f"there is no profile {spec.profile!r}; there are {', '.join(self._pool.profiles)}")
        self._check_room(spec.tenant, 1)
        self._coming += 1
        try:
            member = await self._start(order)
        finally:
            self._coming -= 1
        session = self._add(member, spec.tenant, spec.tags, spec.profile, spec.ttl_s, spec.auto_checkpoint, spec.priority)
        self.counts["started"] += 1
        return Told([session.info(self._worker)])

    async def _start(self, order: Create) -> Member:
        spec = order.spec
        for _ in range(BUSY_TRIES):
            try:
                return await self._pool.start_session(spec.profile, spec.limits, spec.env, spec.files)
            except (PlaceBusy, ZygoteLost, SandboxUnavailable, TimeoutError):
                await asyncio.sleep(BUSY_PAUSE_S)
            except StartFailed as error:
                if error.by_request:
                    raise Refusal("bad_field", f"its files, variables and limits do not fit together: {error}") from error
                raise Refusal("internal", str(error)) from error
        raise Refusal("not_ready", "no interpreter could be had", RETRY_AFTER_S)

    def _add(
        self, member: Member, tenant: str, tags: Tags, profile: str, ttl_s: float, auto: bool, priority: Priority
    ) -> Session:
        session = Session(new_session_id(self._worker, self._life), member, tenant, tags, profile, ttl_s, auto, priority)
        self._sessions[session.id] = session
        self._watch(session, member)
        return session

    def _check_room(self, tenant: str, more: int) -> None:
        """Ended sessions, which have no process, are kept until somebody has seen it or their time is over."""
        own = sum(session.alive and session.tenant == tenant for session in self._sessions.values())
        bounds = (
            (self.live + self._coming + more, self._config.max_sessions, "sessions on this worker"),
            (own + more, self._config.max_sessions_per_tenant, "sessions of this tenant"),
            (self.memory_bytes >> 20, self._config.session_memory_mb, "MB used by sessions on this worker"),
            (
                sum(tree.memory_bytes for tree in self._trees(tenant)) >> 20,
                self._config.session_memory_per_tenant_mb,
                "MB used by sessions of this tenant",
            ),
        )
        for wanted, most, what in bounds:
            if wanted > most:
                raise Refusal("too_many_sessions", f"{wanted} {what}; {most} is the most", RETRY_AFTER_S)
        if not self._pool.free_places:
            raise Refusal("too_many_sessions", "no place is free on this worker", RETRY_AFTER_S)

    async def _fork(self, session: Session, order: ForkSession) -> Reply:
        fork = order.fork
        async with _Use(session):
            self._demand_alive(session)
            self._check_room(session.tenant, fork.n)
            self._coming += fork.n
            try:
                members = await session.member.tree.fork(session.member, fork.n)
            except NotForkable as error:
                self._demand_alive(session)
                raise Refusal("not_forkable", str(error)) from error
            except ZygoteLost:
                raise Refusal("session_lost", "the session's zygote died") from None
            finally:
                self._coming -= fork.n
        self.counts["forks"] += fork.n
        made = []
        for member in members:
            child = self._add(
                member,
                session.tenant,
                fork.tags or session.tags,
                session.profile,
                session.ttl_s,
                session.auto_checkpoint,
                session.priority,
            )
            child.parent, child.cells = session.id, session.cells
            made.append(child.info(self._worker))
        return Told(made)

    # -- using ----------------------------------------------------------------------------------------------------------------

    async def _run(self, session: Session, cell: Cell, claim: Claim, deadline: float) -> Result:
        if (known := session.recorded(cell)) is not None:
            session.used_at = time.monotonic()
            return await asyncio.shield(known)
        if session.lost:
            return _lost()
        future = session.record(cell)
        try:
            result = await self._run_once(session, cell, claim, deadline)
        except BaseException as error:
            session.forget(cell)
            if not future.done():
                future.set_exception(error)
                future.exception()  # perhaps nobody else waits
            raise
        if result.status == "expired":
            session.forget(cell)
        session.finish(cell, future, result)
        return result

    async def _run_once(self, session: Session, cell: Cell, claim: Claim, deadline: float) -> Result:
        try:
            async with asyncio.timeout(deadline - time.monotonic()) as patience, _Use(session):
                self._demand_alive(session)
                async with self._pool.slot_for_cell(claim, deadline - time.monotonic()):
                    patience.reschedule(None)  # from here on its wall time counts
                    self._demand_alive(session)  # it may have ended while the cell waited
                    return await self._run_now(session, cell, deadline - time.monotonic())
        except TimeoutError:
            return verdict("expired", error="the deadline passed before the cell was started", state_kept=session.alive)

    async def _run_now(self, session: Session, cell: Cell, remaining_s: float) -> Result:
        if session.auto_checkpoint:
            await self._make_checkpoint(session)
        wall_s = session.limits.wall_s if cell.wall_s is None else cell.wall_s
        session.cells += 1
        session.running = True
        try:
            with CellRun(session.member, cell.code, cell.stdin, session.cells, wall_s, remaining_s) as run:
                result = await run.run()
        finally:
            session.running = False
        result.sandbox = msgspec.structs.replace(self._pool.sandbox, profile=session.member.tree.link.profile)
        result.worker, result.id = self._worker, cell.id
        if not result.state_kept:
            session.why_ended = f"its process ended in cell {session.cells}: {session.member.broken or result.status}"
        return result

    async def _make_checkpoint(self, session: Session) -> None:
        """The last one goes: it is one deep. A session that cannot be forked has none."""
        old, session.checkpoint = session.checkpoint, None
        if old is not None and old.alive:
            old.kill()
        try:
            session.checkpoint, session.checkpoint_files = await session.member.tree.checkpoint(
                session.member, CHECKPOINT_BYTES
            )
        except NotForkable as error:
            log.info("no checkpoint of a session: %s", error)
        except ZygoteLost:
            pass  # the cell that follows says so
        else:
            self._watch(session, session.checkpoint)

    async def _roll_back(self, session: Session) -> Reply:
        if session.running:
            raise Refusal("session_busy", "interrupt it first, or wait")
        async with _Use(session):
            checkpoint, session.checkpoint = session.checkpoint, None
            if checkpoint is None or not checkpoint.alive:
                raise Refusal("no_checkpoint", "one is made before each cell if the session has auto_checkpoint")
            old, session.member = session.member, checkpoint
            try:
                if old.alive:
                    await old.tree.end(old)
                files = await checkpoint.tree.restore(checkpoint, session.checkpoint_files)
            except MemberEnded:
                raise Refusal("session_ended", "its checkpoint did not survive") from None
            session.why_ended = ""
            session.cells -= 1
            self.counts["rollbacks"] += 1
            return Told([session.info(self._worker, files)])

    def _interrupt(self, session: Session) -> Reply:
        session.used_at = time.monotonic()
        if session.running and session.alive:
            session.member.interrupt()
        return Did(session.running)

    async def _files(self, session: Session, put: dict[str, str], fetch: list[str]) -> Reply:
        async with _Use(session):
            self._demand_alive(session)
            try:
                words, found = await session.member.tree.files(session.member, put, fetch)
            except MemberEnded as error:
                raise Refusal("session_ended", str(error)) from error
        if words:
            raise Refusal("bad_field", words)
        return Got(found.files, found.missing)

    def _demand_alive(self, session: Session) -> None:
        if session.lost:
            raise Refusal("session_lost", "the session's zygote died")
        if not session.alive:
            hint = "roll it back, or make a new one" if session.can_roll_back else "make a new one"
            raise Refusal("session_ended", f"{session.why_ended or 'its process ended'}; {hint}")

    # -- ending ---------------------------------------------------------------------------------------------------------------

    def _watch(self, session: Session, member: Member) -> None:
        """When a process ends by itself and nobody of its sandbox is left, the rest of it goes too."""

        def ended(future: asyncio.Future[Say]) -> None:
            if future.cancelled():
                return
            if future.exception() is not None:
                session.lost = session.lost or member is session.member
                self.counts["lost"] += member is session.member
                return
            if member is session.member and not session.running and not session.why_ended:
                how = judge(Outcome(future.result(), 0, 0), session.limits, [])
                session.why_ended = f"its process ended while no cell ran: {member.broken or how.status}"
                blameless = future.result().oom_kills or not member.broken
                session.lost = how.blame == "infra" and bool(blameless)  # its runner died, or the machine ran out of memory
                self.counts["lost"] += session.lost
            if not member.tree.members:
                member.tree.link.kill(member.tree.number, member.tree.index)

        member.ended.add_done_callback(ended)

    async def _end(self, session: Session) -> None:
        del self._sessions[session.id]
        tree = session.member.tree
        mortal = [member for member in (session.member, session.checkpoint) if member is not None and member.alive]
        if mortal:
            await tree.end(*mortal)
        tree.drop_folder(session.member)

    async def _sweep_forever(self) -> NoReturn:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self._sweep()

    async def _sweep(self) -> None:
        now = time.monotonic()
        for session in [s for s in self._sessions.values() if not s.pending and now - s.used_at > s.ttl_s]:
            if session.id in self._sessions:
                self.counts["expired"] += 1
                await self._end(session)
        for tree in self._trees():
            self._look_at_idle(tree)

    def _look_at_idle(self, tree: Tree) -> None:
        """Slots limit what runs. Who keeps a CPU busy while none of its cells runs has found a way around them: it is ended."""
        own = [session for session in self._sessions.values() if session.member.tree is tree]
        used_s, idle = tree.cpu_s, not any(session.pending for session in own)
        grew_s, tree.cpu_seen_s = used_s - tree.cpu_seen_s, used_s
        tree.idle_cpu_s = max(0.0, tree.idle_cpu_s + grew_s * idle - IDLE_CPU_SHARE * SWEEP_S)
        if tree.idle_cpu_s > IDLE_CPU_S:
            for session in own:
                session.why_ended = "it kept a CPU busy while none of its cells ran"
            tree.link.kill(tree.number, tree.index)


class _Use:
    """Whoever asks something of a session: in turn, and its time starts anew."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def __aenter__(self) -> None:
        if self._session.pending >= MAX_QUEUED:
            words = f"{self._session.pending} requests of this session wait or run; wait for their answers"
            raise Refusal("session_queue_full", words, RETRY_AFTER_S)
        self._session.pending += 1
        try:
            await self._session.lock.acquire()
        except BaseException:
            self._session.pending -= 1
            raise

    async def __aexit__(self, *_: object) -> None:
        self._session.lock.release()
        self._session.pending -= 1
        self._session.used_at = time.monotonic()


def _lost() -> Result:
    return verdict("session_lost", error="the session's zygote died", state_kept=False)
