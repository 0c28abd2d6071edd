"""A gateway with a folder of jobs whose chunks are run in a thread beside it, and its worker without a sandbox."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from gateway_harness import Service, running

from exec_service.jobs.chunks import ChunkOptions
from exec_service.jobs.scheduler import LocalChunkQueue
from exec_service.jobs.store import JobStore
from exec_wire.messages.jobs import JobResult, JobStatus

LINES = {"content-type": "application/x-ndjson"}


def calls(*codes: str) -> list[dict[str, Any]]:
    return [{"call": {"code": code}} for code in codes]


def body(items: Iterable[object]) -> bytes:
    return b"".join(msgspec.json.encode(item) + b"\n" for item in items)


class Jobs:
    def __init__(self, service: Service, headers: dict[str, str] | None = None) -> None:
        self.service, self._headers = service, headers or {}

    @property
    def store(self) -> JobStore:
        desk = self.service.gateway.jobs
        assert desk is not None
        return desk.store

    async def post(self, content: object, **query: str) -> httpx.Response:
        headers = LINES | self._headers
        return await self.service.client.post("/v1/jobs", content=content, params=query, headers=headers)  # type: ignore[arg-type]

    async def submit(self, items: Iterable[object], **query: str) -> JobStatus:
        response = await self.post(body(items), **query)
        assert response.status_code == 201, response.text
        return msgspec.json.decode(response.content, type=JobStatus)

    async def ask(self, verb: str, path: str) -> httpx.Response:
        return await self.service.client.request(verb, f"/v1/jobs{path}", headers=self._headers)

    async def status(self, job: str) -> JobStatus:
        return msgspec.json.decode((await self.ask("GET", f"/{job}")).content, type=JobStatus)

    async def results(self, job: str, query: str = "") -> list[JobResult]:
        response = await self.ask("GET", f"/{job}/results{query}")
        assert response.status_code == 200, response.text
        return msgspec.json.Decoder(JobResult).decode_lines(response.content)

    async def until(self, job: str, state: str, timeout_s: float = 120) -> JobStatus:
        async with asyncio.timeout(timeout_s):
            while (status := await self.status(job)).state != state:  # noqa: ASYNC110 - the service decides
                await asyncio.sleep(0.05)
        return status


@asynccontextmanager
async def jobs_running(folder: Path, *, at_once: int = 8, run: bool = True, **settings: object) -> AsyncIterator[Jobs]:
    """`run=False`: jobs are taken, and nobody runs their chunks."""
    async with running(jobs_dir=str(folder / "jobs"), **settings) as service:
        jobs = Jobs(service)
        if run:
            service.gateway.keep_jobs(LocalChunkQueue(jobs.store, ChunkOptions(service.url, at_once)))
        yield jobs
