"""Bulk jobs over HTTP: submit as a stream of lines, look, pause, go on, cancel, fetch the results as a stream of lines.

A job belongs to the tenant whose key submitted it; for everybody else it is not there. How many jobs and items a tenant has is
counted in the folder, so the bounds hold for all gateways together, but for jobs that two of them receive in the same moment.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import Struct
from msgspec.structs import replace
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from exec_service.api.calls import NDJSON, account_of, header
from exec_service.api.judge import permit_judge, permit_verify
from exec_service.api.middleware import RequestFacts
from exec_service.api.responses import answers, query_parameters, schema_of
from exec_service.api.streaming import KEEP_ALIVE_S
from exec_service.api.validation import VERIFY, Validator, Warnings, check_strings, decode, read, read_query
from exec_service.config import GatewayConfig
from exec_service.dispatch.admission import Arriving
from exec_service.dispatch.dispatch import Dispatch
from exec_service.jobs.keeper import Keeper, progress_of
from exec_service.jobs.store import Draft, JobMeta, JobStore, NoSuchJob
from exec_service.refusals import Draining, Overloaded, Refusal
from exec_service.tenants.accounts import Account
from exec_wire.messages.calls import Label, encode_json
from exec_wire.messages.jobs import ENDED, JobItem, JobList, JobRemoved, JobState, JobStatus
from exec_wire.messages.unknown_fields import Reader, UnknownFields

LINE_TYPES = (NDJSON, "application/jsonl", "application/x-jsonlines")  # none that a foreign site's form can send
CHUNK_BYTES = 16 << 20  # a chunk of large items has fewer of them: whoever runs it holds all of it
READ_BYTES = 1 << 20
FOLLOW_S = 0.5
ROOM_S = 0.2  # between two looks whether there is room for more of a job
MOST_WARNINGS = 20  # of a job
LATER_S = 30.0  # when to come again if there are too many jobs; nobody knows when one ends


class SubmitQuery(Struct, frozen=True, kw_only=True):
    name: Label = ""


class ResultsQuery(Struct, frozen=True, kw_only=True):
    """`follow`: until the job has ended, each chunk as it is finished; else what is there now, in the order of the input."""

    follow: bool = False


class _Item(Struct):
    """A line as it comes; its parts are read by those who know them."""

    call: msgspec.Raw = msgspec.Raw()
    judge: msgspec.Raw = msgspec.Raw()
    verify: msgspec.Raw = msgspec.Raw()


_ITEM = Reader(_Item)


class JobDesk:
    """What the routes need of the folder; `keeper` is there once chunks can be run."""

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self.keeper: Keeper | None = None
        self._receiving: Counter[str] = Counter()  # jobs on their way in, by tenant
        self._finishing = asyncio.Lock()  # one after the other, so that each counts those before

    def own(self, job: str, account: Account | None) -> JobMeta:
        try:
            meta = self.store.meta(job)
        except NoSuchJob:
            meta = None
        if meta is None or (account is not None and meta.tenant != account.tenant):
            raise _no_such_job()
        return meta

    def status(self, meta: JobMeta) -> JobStatus:
        """A `Refusal` if it was removed meanwhile."""
        try:
            return self._status(meta)
        except NoSuchJob:
            raise _no_such_job() from None

    def _status(self, meta: JobMeta) -> JobStatus:
        store, job = self.store, meta.id
        done = store.chunks_done(job)
        progress = progress_of(store, meta, done, store.running(job))
        state = store.state(meta, len(done))
        per_s = self.keeper.per_s(job) if self.keeper is not None and state == "running" else None
        return JobStatus(
            id=job,
            state=state,
            items=meta.items,
            done=progress.done,
            chunks=len(meta.chunks),
            chunks_done=progress.chunks_done,
            created=meta.created,
            items_per_s=round(per_s, 2) if per_s else None,
            eta_s=round((meta.items - progress.done) / per_s, 1) if per_s else None,
            outcomes=store.outcomes(job, done),
            trouble=store.trouble(job) if state not in ENDED else "",
            name=meta.name,
        )

    def all(self, account: Account | None) -> JobList:
        found = []
        for job in reversed(self.store.ids()):
            with suppress(NoSuchJob):  # removed meanwhile
                meta = self.store.meta(job)
                if account is None or meta.tenant == account.tenant:
                    found.append(self._status(meta))
        return JobList(found)

    def kept(self, tenant: str) -> tuple[int, int]:
        """Of one tenant: jobs that have not ended, and items of all."""
        live = items = 0
        for job in self.store.ids():
            try:
                meta = self.store.meta(job)
            except NoSuchJob:  # removed meanwhile
                continue
            if meta.tenant == tenant:
                live += self.store.state(meta) not in ENDED
                items += meta.items
        return live, items

    @contextmanager
    def receiving(self, tenant: str) -> Iterator[None]:
        self._receiving[tenant] += 1
        try:
            yield
        finally:
            self._receiving[tenant] -= 1

    async def check_room(self, tenant: str, config: GatewayConfig) -> None:
        """Within `receiving`, before the first byte is read: what cannot be kept need not be sent."""
        coming = self._receiving[tenant]  # first: one that is finished while we count is counted twice rather than not at all
        live, items = await asyncio.to_thread(self.kept, tenant)
        if live + coming > config.jobs_max_live:
            words = f"{live} bulk jobs have not ended, {coming - 1} are being received; at most {config.jobs_max_live} at once"
            raise Refusal("too_many_jobs", words, retry_after_s=LATER_S)
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
            self.store.retire(meta.id)
        return self.status(meta)

    def remove(self, meta: JobMeta) -> JobRemoved:
        if self.store.state(meta) not in ENDED:
            raise Refusal("job_running", f"cancel it first: POST /v1/jobs/{meta.id}/cancel")
        self.store.remove(meta.id)
        return JobRemoved(meta.id)


class Intake:
    """One job on its way in."""

    def __init__(
        self, config: GatewayConfig, validator: Validator, facts: RequestFacts, draft: Draft, arriving: Arriving
    ) -> None:
        self._config, self._validator, self._facts, self._draft, self._arriving = config, validator, facts, draft, arriving
        self._lines: list[bytes] = []
        self._bytes = 0  # of `_lines`
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
        """A job that is half here waits for room rather than being sent again; it holds no more than a chunk and a line."""
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
        """As the gateway will, when the item's turn comes; better said now."""
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
                account.permit(call, 0)
        elif kind == "judge":
            judge = self._validator.read_judge(part, warnings)
            if account is not None:
                permit_judge(judge, account)
        else:
            permit_verify([read(VERIFY, part, warnings)], self._facts, "$")
        self._warn(f"{kind}.{words}" for words in warnings.get(0, []))

    def _warn(self, found: Iterable[str]) -> None:
        for words in found:
            if len(self.warnings) < MOST_WARNINGS:
                self.warnings.append(f"[{self._items}].{words}")

    def _wrong(self, refusal: Refusal) -> Refusal:
        """The refusal with the item's place in the input."""
        where = f"line {self._items + 1} (without empty lines): {refusal.detail}"
        return Refusal(refusal.code, where, field=f"$[{self._items}]{refusal.field.removeprefix('$')}")


def _no_such_job() -> Refusal:
    return Refusal("no_such_job", "there is no such job here; GET /v1/jobs lists yours")


def _check_items(kept: int, more: int, config: GatewayConfig) -> None:
    most = config.jobs_max_kept_items
    if kept + more > most:
        raise Refusal(
            "jobs_full",
            f"your bulk jobs have {kept} items, with this one more than {most}; remove some that ended: DELETE /v1/jobs/ID",
        )


async def pieces_of(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionAbortedError
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def read_results(desk: JobDesk, meta: JobMeta, *, follow: bool) -> AsyncIterator[bytes]:
    sent: set[int] = set()
    silent_s = 0.0
    while True:
        state = await asyncio.to_thread(desk.store.state, meta)
        live = follow and state not in ENDED
        done = await asyncio.to_thread(desk.store.chunks_done, meta.id)
        # What is left of a chunk is sent only if the stream ends with it: the chunk may still be finished.
        wanted = done if live else set(range(1, len(meta.chunks) + 1))
        for chunk in sorted(wanted - sent):
            path = await asyncio.to_thread(desk.store.result_file, meta.id, chunk)
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
    except FileNotFoundError:  # the job was removed, or the chunk finished after it was left
        return
    with file:
        while piece := await asyncio.to_thread(file.read, READ_BYTES):
            yield piece


def job_routes(config: GatewayConfig, dispatch: Dispatch, validator: Validator, desk: JobDesk | None) -> APIRouter:
    router = APIRouter()
    known = ("unauthenticated", "no_such_job", "jobs_off")

    def there() -> JobDesk:
        if desk is None:
            raise Refusal("jobs_off", "start the service with --jobs-dir DIR (EXEC_JOBS_DIR) to have bulk jobs")
        return desk

    @router.post(
        "/v1/jobs",
        status_code=201,
        summary="Submit a bulk job: a call, judge or verify item per line",
        responses=_created(
            *known,
            "bad_json",
            "bad_field",
            "too_many_calls",
            "jobs_full",
            "body_too_large",
            "wrong_content_type",
            "too_many_jobs",
            "draining",
        ),
        openapi_extra={
            "parameters": query_parameters(SubmitQuery),
            "requestBody": {"required": True, "content": {NDJSON: {"schema": schema_of(JobItem)}}},
        },
    )
    async def submit(request: Request) -> Response:
        facts: RequestFacts = request.scope["exec"]
        desk, query = there(), read_query(request.scope["query_string"], SubmitQuery)
        check_line_type(request)
        if dispatch.draining:
            raise Draining
        tenant = facts.origin.account.tenant if facts.origin.account is not None else ""
        with desk.receiving(tenant):
            await desk.check_room(tenant, config)
            with await asyncio.to_thread(desk.store.draft, tenant, query.name) as draft:
                arriving = Arriving(dispatch.admission)
                intake = Intake(config, validator, facts, draft, arriving)
                try:
                    with arriving:
                        await intake.take(pieces_of(request.receive))
                except ConnectionAbortedError:
                    facts.client_gone = True
                    return Response(status_code=400)  # nobody reads it
                meta = await desk.finish(draft, tenant, config)
        return _json(replace(await asyncio.to_thread(desk.status, meta), warnings=intake.warnings), 201)

    @router.get("/v1/jobs", summary="The tenant's bulk jobs, the newest first", responses=answers(JobList, *known))
    async def jobs(request: Request) -> Response:
        return _json(await asyncio.to_thread(there().all, account_of(request)))

    @router.get("/v1/jobs/{job}", summary="How far a bulk job is", responses=answers(JobStatus, *known))
    async def status(request: Request, job: str) -> Response:
        return _json(await asyncio.to_thread(lambda: there().status(there().own(job, account_of(request)))))

    @router.get(
        "/v1/jobs/{job}/results",
        summary="The results of a bulk job that are there, or with follow each as it comes; a JobResult per line",
        responses=answers(JobStatus, *known, "bad_query") | {200: {"description": f"{NDJSON}: a JobResult per line"}},
        openapi_extra={"parameters": query_parameters(ResultsQuery)},
    )
    async def results(request: Request, job: str) -> Response:
        query = read_query(request.scope["query_string"], ResultsQuery)
        meta = await asyncio.to_thread(there().own, job, account_of(request))
        lines = read_results(there(), meta, follow=query.follow)
        return StreamingResponse(lines, media_type=NDJSON, headers={"cache-control": "no-store", "x-accel-buffering": "no"})

    async def change(request: Request, job: str, state: JobState) -> Response:
        meta = await asyncio.to_thread(there().own, job, account_of(request))
        return _json(await asyncio.to_thread(there().change, meta, state))

    ended = answers(JobStatus, *known, "job_ended")

    @router.post("/v1/jobs/{job}/pause", summary="Begin no more items of a bulk job", responses=ended)
    async def pause(request: Request, job: str) -> Response:
        return await change(request, job, "paused")

    @router.post("/v1/jobs/{job}/resume", summary="Go on with a bulk job", responses=ended)
    async def resume(request: Request, job: str) -> Response:
        return await change(request, job, "running")

    @router.post("/v1/jobs/{job}/cancel", summary="End a bulk job; what is done can be fetched", responses=ended)
    async def cancel(request: Request, job: str) -> Response:
        return await change(request, job, "cancelled")

    @router.delete(
        "/v1/jobs/{job}",
        summary="Remove a bulk job that has ended, with its results",
        responses=answers(JobRemoved, *known, "job_running"),
    )
    async def remove(request: Request, job: str) -> Response:
        return _json(await asyncio.to_thread(lambda: there().remove(there().own(job, account_of(request)))))

    return router


def check_line_type(request: Request) -> None:
    media_type = header(request.scope, b"content-type").split(";")[0].strip().lower()
    if media_type not in LINE_TYPES:
        raise Refusal("wrong_content_type", f"the body of a job must be {NDJSON}, not {media_type[:80] or 'unnamed'!r}")
    if header(request.scope, b"content-encoding").strip().lower() not in ("", "identity"):
        raise Refusal("wrong_content_type", "the body must not be compressed")


def _created(*codes: str) -> dict[int | str, dict[str, Any]]:
    described = answers(JobStatus, *codes)
    return {201: described.pop(200)} | described


def _json(message: Struct, status: int = 200) -> Response:
    return Response(encode_json(message), status, media_type="application/json")
