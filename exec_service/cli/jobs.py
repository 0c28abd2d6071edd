"""`exec-service jobs …`: bulk jobs of a running service, from a terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import httpx
import msgspec

from exec_wire.messages.calls import encode_json
from exec_wire.messages.jobs import ENDED, JobList, JobStatus
from exec_wire.problems import Problem

EXIT_FAILED, EXIT_USAGE, EXIT_UNAVAILABLE = 1, 2, 69
SEND_BYTES = 1 << 18
WATCH_S, PATIENCE_S = 0.5, 60.0  # a gateway that restarts is waited for
BAR = 30


class Failed(Exception):
    def __init__(self, words: str, exit_code: int) -> None:
        super().__init__(words)
        self.exit_code = exit_code


class Service:
    """A running service, asked by its address."""

    def __init__(self, url: str) -> None:
        key = os.environ.get("EXEC_API_KEY", "").strip()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._url = url
        self._http = httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S, trust_env=False)

    def submit(self, lines: Iterator[bytes], name: str) -> JobStatus:
        headers = {"content-type": "application/x-ndjson"}
        with self._translated():
            response = self._http.post("/v1/jobs", params={"name": name}, content=lines, headers=headers)
        return msgspec.json.decode(_checked(response).content, type=JobStatus)

    def status(self, job: str) -> JobStatus:
        return msgspec.json.decode(self._ask("GET", f"/v1/jobs/{job}"), type=JobStatus)

    def all(self) -> list[JobStatus]:
        return msgspec.json.decode(self._ask("GET", "/v1/jobs"), type=JobList).jobs

    def change(self, job: str, action: str) -> JobStatus:
        return msgspec.json.decode(self._ask("POST", f"/v1/jobs/{job}/{action}"), type=JobStatus)

    def remove(self, job: str) -> None:
        self._ask("DELETE", f"/v1/jobs/{job}")

    def results(self, job: str, follow: bool) -> Iterator[bytes]:
        path, query = f"/v1/jobs/{job}/results", {"follow": "true" if follow else "false"}
        with self._translated(), self._http.stream("GET", path, params=query) as response:
            if response.status_code != 200:
                response.read()
            _checked(response)
            yield from response.iter_bytes()

    def _ask(self, verb: str, path: str) -> bytes:
        with self._translated():
            return _checked(self._http.request(verb, path)).content

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.RequestError as error:
            raise Failed(
                f"{self._url}: {error or type(error).__name__}. Another service: --url URL", EXIT_UNAVAILABLE
            ) from error


def _checked(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    try:
        problem = msgspec.json.decode(response.content, type=Problem)
    except ValueError:
        raise Failed(f"{response.status_code} {response.text[:200]}", EXIT_UNAVAILABLE) from None
    where = f" ({problem.field})" if problem.field else ""
    words = f"{problem.code}: {problem.detail or problem.title}{where}"
    raise Failed(words, EXIT_UNAVAILABLE if response.status_code >= 500 else EXIT_USAGE)


def run(options: argparse.Namespace) -> int:
    service = Service(options.url)
    match options.action:
        case "submit":
            return submit(service, options)
        case "status":
            return show_status(service, options)
        case "watch":
            return watch(service, options.job)
        case "results":
            return fetch(service, options)
        case "remove":
            service.remove(options.job)
            return 0
        case action:
            print(line_of(service.change(options.job, action)))
            return 0


def submit(service: Service, options: argparse.Namespace) -> int:
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if options.file == "-" else Path(options.file).open("rb") as file:
            status = service.submit(pieces_of(file), options.name)
    except OSError as error:
        raise Failed(f"{options.file}: {error.strerror}", EXIT_USAGE) from None
    print(status.id, flush=True)
    print(f"{status.items} items in {status.chunks} chunks. Next: exec-service jobs watch {status.id}", file=sys.stderr)
    return watch(service, status.id) if options.watch else 0


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(SEND_BYTES):
        yield piece


def show_status(service: Service, options: argparse.Namespace) -> int:
    found = service.all() if options.job is None else [service.status(options.job)]
    for status in found:
        print(encode_json(status).decode() if options.json else line_of(status))
    return 0


def watch(service: Service, job: str) -> int:
    """0 if all of it is done, else 1."""
    live, answered_at = sys.stderr.isatty(), time.monotonic()
    shown = ""
    while True:
        try:
            status = service.status(job)
        except Failed as failed:
            if failed.exit_code != EXIT_UNAVAILABLE or time.monotonic() - answered_at > PATIENCE_S:
                raise
            time.sleep(WATCH_S)
            continue
        answered_at = time.monotonic()
        line = line_of(status)
        if live:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif line != shown:
            print(line, file=sys.stderr, flush=True)
        shown = line
        if status.state in ENDED:
            if live:
                print(file=sys.stderr)
            return 0 if status.state == "done" else EXIT_FAILED
        time.sleep(WATCH_S)


def fetch(service: Service, options: argparse.Namespace) -> int:
    lines = service.results(options.job, options.follow)
    if options.output is None:
        for piece in lines:
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return 0
    aside = options.output.with_name(f"{options.output.name}.part")  # half a file is not taken for a whole one
    try:
        with aside.open("wb") as file:
            file.writelines(lines)
        aside.rename(options.output)
    except OSError as error:
        raise Failed(f"{options.output}: {error.strerror}", EXIT_USAGE) from None
    return 0


def line_of(status: JobStatus) -> str:
    share = status.done / status.items
    bar = "█" * int(share * BAR) + "░" * (BAR - int(share * BAR))
    parts = [f"{status.id} {bar} {share:4.0%}", f"{status.done}/{status.items}", status.state]
    if status.items_per_s:
        parts.append(f"{status.items_per_s:.0f}/s")
    if status.eta_s is not None:
        parts.append(f"{duration(status.eta_s)} left")
    if status.outcomes:
        parts.append(" ".join(f"{name} {count}" for name, count in sorted(status.outcomes.items())))
    if status.name:
        parts.append(status.name)
    return "  ".join(parts) + (f"\n  {status.trouble}" if status.trouble else "")


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
