"""Bulk jobs over HTTP: submit items as a stream of lines, follow, pause, resume and cancel, fetch results as a stream of lines.

A bulk job belongs to the tenant whose key submitted it; others get 404. Limits of a tenant are counted in the folder, so they
hold for all gateways together, except for jobs that two gateways receive at the same moment.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
from fastapi import APIRouter, Request
from msgspec import Struct
from msgspec.structs import replace
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from exec_service.api.calls import NDJSON, account_of, check_content_type, json_response
from exec_service.api.judge import permit_judge, permit_verify
from exec_service.api.middleware import RequestFacts
from exec_service.api.responses import answers, query_parameters, schema_of
from exec_service.api.streaming import KEEP_ALIVE_S
from exec_service.api.validation import VERIFY, Validator, Warnings, check_strings, decode, read, read_query
from exec_service.config import GatewayConfig
from exec_service.dispatch.admission import ArrivingBody
from exec_service.dispatch.dispatch import Dispatch
from exec_service.jobs.scheduler import JobScheduler, items_done
from exec_service.jobs.store import Draft, JobMeta, JobStore, NewerJob, NoSuchJob
from exec_service.refusals import Overloaded, Refusal
from exec_service.tenants.accounts import Account
from exec_wire.messages.calls import Label
from exec_wire.messages.jobs import ENDED, JobItem, JobList, JobRemoved, JobState, JobStatus
from exec_wire.messages.unknown_fields import Reader, UnknownFields

P = ParamSpec("P")
T = TypeVar("T")
LINE_TYPES = (NDJSON, "application/jsonl", "application/x-jsonlines")  # a form of a foreign site can send none of these
CHUNK_BYTES = 16 << 20  # a jobs worker holds a whole chunk in memory
READ_BYTES = 1 << 20
FOLLOW_S = 0.5
ROOM_S = 0.2  # between two attempts to charge more of a job to admission
MOST_WARNINGS = 20  # of a job
SUBMIT_PROBLEMS = "bad_json bad_field too_many_calls jobs_full body_too_large wrong_content_type too_many_jobs draining"
LATER_S = 30.0  # Retry-After if there are too many jobs; when one ends is unknown


class SubmitQuery(Struct, frozen=True, kw_only=True):
    name: Label = ""


class ResultsQuery(Struct, frozen=True, kw_only=True):
    """`follow`: also later results, chunk by chunk, until the job has ended; else the results so far, in input order."""

    follow: bool = False


class _Item(Struct):
    """A line of the input; its parts are decoded later."""

    call: msgspec.Raw = msgspec.Raw()
    judge: msgspec.Raw = msgspec.Raw()
    verify: msgspec.Raw = msgspec.Raw()


_ITEM = Reader(_Item)


class BulkJobs:
    """The bulk jobs in the folder; `scheduler` is set once chunks can run."""

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self.scheduler: JobScheduler | None = None
        self._receiving: Counter[str] = Counter()  # jobs that are being received, by tenant
        self._finishing = asyncio.Lock()  # one at a time, so that each counts those before it

    def own(self, job: str, account: Account | None) -> JobMeta:
        """Raises `NoSuchJob`, also for the job of another tenant."""
        meta = self.store.meta(job)
        if account is not None and meta.tenant != account.tenant:
            raise NoSuchJob(job)
        return meta

    def status(self, meta: JobMeta) -> JobStatus:
        store, job = self.store, meta.id
        chunks = store.chunks_done(job)
        done = items_done(store, meta, chunks, store.running(job))
        state = store.state(meta, len(chunks))
        per_s = self.scheduler.per_s(job) if self.scheduler is not None and state == "running" else None
        return JobStatus(
            id=job,
            state=state,
            items=meta.items,
            done=done,
            chunks=len(meta.chunks),
            chunks_done=len(chunks),
            created=meta.created,
            items_per_s=round(per_s, 2) if per_s else None,
            eta_s=round((meta.items - done) / per_s, 1) if per_s else None,
            outcomes=store.outcomes(job, chunks),
            trouble=store.trouble(job) if state not in ENDED else "",
            name=meta.name,
        )

    def all(self, account: Account | None) -> JobList:
        """The newest first."""
        found = []
        for meta in self._metas(None if account is None else account.tenant):
            with suppress(NoSuchJob):  # removed meanwhile
                found.append(self.status(meta))
        return JobList(found[::-1])

    def kept(self, tenant: str) -> tuple[int, int]:
        """The number of a tenant's unfinished jobs, and the items of all its jobs."""
        metas = list(self._metas(tenant))
        return sum(self.store.state(meta) not in ENDED for meta in metas), sum(meta.items for meta in metas)

    def _metas(self, tenant: str | None) -> Iterator[JobMeta]:
        for job in self.store.ids():
            with suppress(NoSuchJob):  # removed meanwhile
                meta = self.store.meta(job)
                if tenant in (None, meta.tenant):
                    yield meta

    @contextmanager
    def receiving(self, tenant: str) -> Iterator[None]:
        self._receiving[tenant] += 1
        try:
            yield
        finally:
            self._receiving[tenant] -= 1

    async def check_room(self, tenant: str, config: GatewayConfig) -> None:
        """Refuse a job that cannot be stored before its first byte is read. Call it within `receiving`."""
        coming = self._receiving[tenant]  # read first: a job that finishes meanwhile counts twice rather than not at all
        live, items = await asyncio.to_thread(self.kept, tenant)
        if live + coming > config.jobs_max_live:
            detail = f"{live} bulk jobs have not ended, {coming - 1} are being received; at most {config.jobs_max_live} at once"
            raise Refusal("too_many_jobs", detail, retry_after_s=LATER_S)
        _check_items(items, 1, config)

    async def finish(self, draft: Draft, tenant: str, config: GatewayConfig) -> JobMeta:
        async with self._finishing:
            _, items = await asyncio.to_thread(self.kept, tenant)
            _check_items(items, draft.items, config)
            return await asyncio.to_thread(draft.finish)

    def change(self, meta: JobMeta, state: JobState) -> JobStatus:
        if (now := self.store.state(meta)) in ENDED:
            raise Refusal("job_ended", f"the job is {now}")
        self.store.set_state(meta.id, state)
        if state == "cancelled":
            self.store.revoke_token(meta.id)
        return self.status(meta)

    def remove(self, meta: JobMeta) -> JobRemoved:
        if self.store.state(meta) not in ENDED:
            raise Refusal("job_running", f"cancel it first: POST /v1/jobs/{meta.id}/cancel")
        self.store.remove(meta.id)
        return JobRemoved(meta.id)


class Intake:
    """Receives one bulk job: splits, checks and stores its lines."""

    def __init__(
        self, config: GatewayConfig, validator: Validator, facts: RequestFacts, draft: Draft, arriving: ArrivingBody
    ) -> None:
        self._config, self._validator, self._facts, self._draft, self._arriving = config, validator, facts, draft, arriving
        self._lines: list[bytes] = []
        self._bytes = 0  # in `_lines`
        self._items = 0
        self.warnings: list[str] = []  # the first ones

    async def take(self, pieces: AsyncIterator[bytes]) -> None:
        rest = bytearray()
        async for piece in pieces:
            self._facts.body_bytes += len(piece)
            if self._facts.body_bytes > self._config.jobs_max_bytes:
                raise Refusal("body_too_large", f"more than {self._config.jobs_max_bytes} bytes in one job")
            *whole, tail = piece.split(b"\n")
            for line in whole:
                await self._add(bytes(rest) + line)
                rest.clear()
            rest += tail
            self._check_size(len(rest))
            await self._hold(len(rest) + self._bytes)
        await self._add(bytes(rest))
        await self._flush()
        if not self._items:
            raise Refusal("bad_json", 'the body has no items; an item is a line such as {"call": {"code": "print(1)"}}')
        self._facts.calls = self._items

    async def _hold(self, bytes_: int) -> None:
        """Wait for room in admission rather than refuse a half-received job, which holds at most a chunk and a line."""
        give_up = time.monotonic() + self._config.body_s
        while True:
            try:
                return self._arriving.hold(bytes_)
            except Overloaded:
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(ROOM_S)

    async def _add(self, line: bytes) -> None:
        line = line.strip()
        if not line:
            return
        self._check_size(len(line))
        if self._items == self._config.jobs_max_items:
            raise Refusal("too_many_calls", f"more than {self._items} items in one job")
        try:
            self._check(line)
        except Refusal as refusal:
            raise self._wrong(refusal) from None
        self._items += 1
        self._lines.append(line)
        self._bytes += len(line)
        if len(self._lines) == self._config.jobs_chunk_items or self._bytes >= CHUNK_BYTES:
            await self._flush()

    def _check_size(self, bytes_: int) -> None:
        if bytes_ > self._config.max_body_bytes:
            raise self._wrong(Refusal("body_too_large", f"an item has more than {self._config.max_body_bytes} bytes"))

    async def _flush(self) -> None:
        if self._lines:
            await asyncio.to_thread(self._draft.add_chunk, self._lines)
            self._lines, self._bytes = [], 0

    def _check(self, line: bytes) -> None:
        """Check an item now as the gateway will when it runs it."""
        check_strings(line, self._config.max_strings_per_request)
        item, warned = decode(_ITEM.read, line)
        self._warn(UnknownFields().of(_Item, line) if warned else ())
        given = [name for name in item.__struct_fields__ if bytes(getattr(item, name))]
        if len(given) != 1:
            raise Refusal("bad_field", "an item has exactly one of call, judge and verify", field="$")
        [kind] = given
        try:
            self._check_part(kind, bytes(getattr(item, kind)))
        except Refusal as refusal:
            refusal.field = f"$.{kind}{refusal.field.removeprefix('$')}"
            raise

    def _check_part(self, kind: str, part: bytes) -> None:
        account, warnings = self._facts.origin.account, Warnings()
        if kind == "call":
            call = self._validator.read_call(part, warnings)
            if account is not None:
                account.permit(call)
        elif kind == "judge":
            judge = self._validator.read_judge(part, warnings)
            if account is not None:
                permit_judge(judge, account)
        else:
            permit_verify([read(VERIFY, part, warnings)], self._facts, "$")
        self._warn(f"{kind}.{warning}" for warning in warnings.get(0, []))

    def _warn(self, found: Iterable[str]) -> None:
        for warning in found:
            if len(self.warnings) < MOST_WARNINGS:
                self.warnings.append(f"[{self._items}].{warning}")

    def _wrong(self, refusal: Refusal) -> Refusal:
        """The refusal with the position of the item in the input."""
        where = f"line {self._items + 1} (without empty lines): {refusal.detail}"
        return Refusal(refusal.code, where, field=f"$[{self._items}]{refusal.field.removeprefix('$')}")


async def in_thread(act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Raises a `Refusal` if the job is not there, or was removed meanwhile."""
    try:
        return await asyncio.to_thread(act, *args, **kwargs)
    except NewerJob as error:
        raise Refusal("no_such_job", str(error)) from None
    except NoSuchJob:
        raise Refusal("no_such_job", "job not found; GET /v1/jobs lists yours") from None


def _check_items(kept: int, more: int, config: GatewayConfig) -> None:
    most = config.jobs_max_kept_items
    if kept + more > most:
        raise Refusal(
            "jobs_full",
            f"your bulk jobs have {kept} items, with this one more than {most}; remove ended ones: DELETE /v1/jobs/ID",
        )


async def pieces_of(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionAbortedError
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def read_results(store: JobStore, meta: JobMeta, *, follow: bool) -> AsyncIterator[bytes]:
    sent: set[int] = set()
    silent_s = 0.0
    while True:
        state = await asyncio.to_thread(store.state, meta)
        live = follow and state not in ENDED
        done = await asyncio.to_thread(store.chunks_done, meta.id)
        # An incomplete chunk is sent only at the end of the stream, since it may still be completed.
        wanted = done if live else set(range(1, len(meta.chunks) + 1))
        for chunk in sorted(wanted - sent):
            path = await asyncio.to_thread(store.result_file, meta.id, chunk)
            if path is None:
                continue
            sent.add(chunk)
            silent_s = 0.0
            async for piece in read_file(path):
                yield piece
        if not live:
            return
        await asyncio.sleep(FOLLOW_S)
        silent_s += FOLLOW_S
        if silent_s >= KEEP_ALIVE_S:
            silent_s = 0.0
            yield b"\n"


async def read_file(path: Path) -> AsyncIterator[bytes]:
    try:
        file = await asyncio.to_thread(path.open, "rb")
    except FileNotFoundError:  # the job was removed, or the chunk was completed meanwhile
        return
    with file:
        while piece := await asyncio.to_thread(file.read, READ_BYTES):
            yield piece


class JobEndpoints:
    """The routes of bulk jobs. Without a folder (`jobs` is None) each of them is refused."""

    def __init__(self, config: GatewayConfig, dispatch: Dispatch, validator: Validator, jobs: BulkJobs | None) -> None:
        self._config, self._dispatch, self._validator, self._jobs = config, dispatch, validator, jobs

    @property
    def _there(self) -> BulkJobs:
        if self._jobs is None:
            raise Refusal("jobs_off", "bulk jobs are disabled; start the service with --jobs-dir DIR (EXEC_JOBS_DIR)")
        return self._jobs

    async def submit(self, request: Request) -> Response:
        facts: RequestFacts = request.scope["exec"]
        jobs, query = self._there, read_query(request.scope["query_string"], SubmitQuery)
        check_content_type(request.scope, *LINE_TYPES)
        if self._dispatch.draining:
            self._dispatch.check_open()
        tenant = facts.origin.account.tenant if facts.origin.account is not None else ""
        with jobs.receiving(tenant):
            await jobs.check_room(tenant, self._config)
            with await asyncio.to_thread(jobs.store.draft, tenant, query.name) as draft:
                arriving = ArrivingBody(self._dispatch.admission)
                intake = Intake(self._config, self._validator, facts, draft, arriving)
                try:
                    with arriving:
                        await intake.take(pieces_of(request.receive))
                except ConnectionAbortedError:
                    facts.client_gone = True
                    return Response(status_code=400)  # not sent: the caller disconnected
                meta = await jobs.finish(draft, tenant, self._config)
        return json_response(replace(await asyncio.to_thread(jobs.status, meta), warnings=intake.warnings), 201)

    async def jobs(self, request: Request) -> Response:
        return json_response(await asyncio.to_thread(self._there.all, account_of(request)))

    async def results(self, request: Request, job: str) -> Response:
        query = read_query(request.scope["query_string"], ResultsQuery)
        lines = read_results(self._there.store, await self._own(request, job), follow=query.follow)
        return StreamingResponse(lines, media_type=NDJSON, headers={"cache-control": "no-store", "x-accel-buffering": "no"})

    def on_job(self, act: Callable[[BulkJobs, JobMeta], Struct]) -> Callable[[Request, str], Awaitable[Response]]:
        """A route that does this to one of the caller's jobs."""

        async def endpoint(request: Request, job: str) -> Response:
            return json_response(await in_thread(act, self._there, await self._own(request, job)))

        return endpoint

    async def _own(self, request: Request, job: str) -> JobMeta:
        return await in_thread(self._there.own, job, account_of(request))


def job_routes(config: GatewayConfig, dispatch: Dispatch, validator: Validator, jobs: BulkJobs | None) -> APIRouter:
    router, to = APIRouter(), JobEndpoints(config, dispatch, validator, jobs)
    known = ("unauthenticated", "no_such_job", "jobs_off")
    created = answers(JobStatus, *known, *SUBMIT_PROBLEMS.split())
    created[201] = created.pop(200)
    lines = answers(JobStatus, *known, "bad_query") | {200: {"description": f"{NDJSON}: a JobResult per line"}}
    ended, removed = answers(JobStatus, *known, "job_ended"), answers(JobRemoved, *known, "job_running")
    body = {"requestBody": {"required": True, "content": {NDJSON: {"schema": schema_of(JobItem)}}}}
    router.post(
        "/v1/jobs",
        status_code=201,
        summary="Submit a bulk job: a call, judge or verify item per line",
        responses=created,
        openapi_extra=body | {"parameters": query_parameters(SubmitQuery)},
    )(to.submit)
    router.get("/v1/jobs", summary="The tenant's bulk jobs, newest first", responses=answers(JobList, *known))(to.jobs)
    router.get(
        "/v1/jobs/{job}/results",
        summary="The results of a bulk job so far, or with follow also later ones; a JobResult per line",
        responses=lines,
        openapi_extra={"parameters": query_parameters(ResultsQuery)},
    )(to.results)
    pause, resume, cancel = (partial(BulkJobs.change, state=state) for state in ("paused", "running", "cancelled"))
    for verb, name, path, summary, act, responses in (
        ("GET", "status", "", "The progress of a bulk job", BulkJobs.status, answers(JobStatus, *known)),
        ("POST", "pause", "/pause", "Start no more items of a bulk job", pause, ended),
        ("POST", "resume", "/resume", "Start items of a bulk job again", resume, ended),
        ("POST", "cancel", "/cancel", "End a bulk job; its results stay", cancel, ended),
        ("DELETE", "remove", "", "Remove an ended bulk job and its results", BulkJobs.remove, removed),
    ):
        options: dict[str, Any] = {"methods": [verb], "name": name, "summary": summary, "responses": responses}
        router.add_api_route(f"/v1/jobs/{{job}}{path}", to.on_job(act), **options)
    return router
