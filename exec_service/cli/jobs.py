"""`exec-service jobs`: submit and follow bulk jobs of a running service."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from exec_service.cli.common import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNAVAILABLE, EXIT_USAGE, Commands, fail
from exec_wire.messages.calls import encode_json
from exec_wire.messages.jobs import ENDED, JobList, JobRemoved, JobStatus
from exec_wire.problems import Problem

if TYPE_CHECKING:
    import httpx

SEND_BYTES = 1 << 18
WATCH_S, RETRY_S = 0.5, 60.0  # how long `watch` waits for a gateway that restarts
BAR = 30
T = TypeVar("T")


def add(commands: Commands) -> None:
    parser = commands.add_parser("jobs", help="submit, follow, pause and cancel bulk jobs, and fetch their results")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    service = argparse.ArgumentParser(add_help=False)
    service.add_argument("--url", default="http://127.0.0.1:8080", help="the service (default http://127.0.0.1:8080)")
    job = argparse.ArgumentParser(add_help=False, parents=[service])
    job.add_argument("job", help="the id that `submit` and `status` show")

    submit = actions.add_parser("submit", parents=[service], help="send a file of items and print the id of the job")
    submit.add_argument("file", help='a file, or - for standard input; a line is {"call": …}, {"judge": …} or {"verify": …}')
    submit.add_argument("--name", default="", help="a name for the job")
    submit.add_argument("--watch", action="store_true", help="wait until it has ended")
    status = actions.add_parser("status", parents=[service], help="show the progress of a job; without an id of all yours")
    status.add_argument("job", nargs="?")
    status.add_argument("--json", action="store_true", help="print it as JSON")
    actions.add_parser("watch", parents=[job], help="show a progress bar until the job has ended")
    results = actions.add_parser("results", parents=[job], help="print the results so far, one per line")
    results.add_argument("--follow", action="store_true", help="also print later results, until the job has ended")
    results.add_argument("-o", "--output", type=Path, help="write them to this file")
    for name, help in (("pause", "start no more items"), ("resume", "start items again"), ("cancel", "end it; results stay")):
        actions.add_parser(name, parents=[job], help=help)
    actions.add_parser("remove", parents=[job], help="remove a job that has ended, with its results")
    for name, action in actions.choices.items():
        action.set_defaults(run=run, act=ACTS.get(name, change), action=name)


def run(options: argparse.Namespace) -> int:
    try:
        return int(options.act(Service(options.url), options) or 0)
    except Failed as error:
        return fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


class Failed(Exception):
    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Service:
    """The bulk jobs of the service at `url`."""

    def __init__(self, url: str) -> None:
        import httpx  # slow to load

        key = os.environ.get("EXEC_API_KEY", "").strip()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._url = url
        self._http = httpx.Client(base_url=url, headers=headers, timeout=RETRY_S, trust_env=False)

    def ask(self, verb: str, path: str, answer: type[T], **sent: Any) -> T:
        with self._translated():
            response = self._http.request(verb, f"/v1/jobs{path}", **sent)
        return msgspec.json.decode(_checked(response).content, type=answer)

    def results(self, job: str, follow: bool) -> Iterator[bytes]:
        path, query = f"/v1/jobs/{job}/results", {"follow": "true" if follow else "false"}
        with self._translated(), self._http.stream("GET", path, params=query) as response:
            if response.status_code != 200:
                response.read()
            _checked(response)
            yield from response.iter_bytes()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.RequestError as error:
            message = f"{self._url}: {error or type(error).__name__}. Choose another service with --url URL"
            raise Failed(message, EXIT_UNAVAILABLE) from error


def _checked(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    try:
        problem = msgspec.json.decode(response.content, type=Problem)
    except ValueError:
        raise Failed(f"{response.status_code} {response.text[:200]}", EXIT_UNAVAILABLE) from None
    where = f" ({problem.field})" if problem.field else ""
    message = f"{problem.code}: {problem.detail or problem.title}{where}"
    raise Failed(message, EXIT_UNAVAILABLE if response.status_code >= 500 else EXIT_USAGE)


def submit(service: Service, options: argparse.Namespace) -> int:
    sent = {"params": {"name": options.name}, "headers": {"content-type": "application/x-ndjson"}}
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if options.file == "-" else Path(options.file).open("rb") as file:
            status = service.ask("POST", "", JobStatus, content=iter(lambda: file.read(SEND_BYTES), b""), **sent)
    except OSError as error:
        raise Failed(f"{options.file}: {error.strerror}", EXIT_USAGE) from None
    print(status.id, flush=True)
    print(f"{status.items} items in {status.chunks} chunks. Next: exec-service jobs watch {status.id}", file=sys.stderr)
    options.job = status.id
    return watch(service, options) if options.watch else 0


def show_status(service: Service, options: argparse.Namespace) -> None:
    one = options.job is not None
    found = [service.ask("GET", f"/{options.job}", JobStatus)] if one else service.ask("GET", "", JobList).jobs
    for status in found:
        print(encode_json(status).decode() if options.json else line_of(status))


def change(service: Service, options: argparse.Namespace) -> None:
    print(line_of(service.ask("POST", f"/{options.job}/{options.action}", JobStatus)))


def remove(service: Service, options: argparse.Namespace) -> None:
    service.ask("DELETE", f"/{options.job}", JobRemoved)


def watch(service: Service, options: argparse.Namespace) -> int:
    """Show progress until the job has ended; 0 if it is done, else 1."""
    live, answered_at = sys.stderr.isatty(), time.monotonic()
    shown = ""
    while True:
        try:
            status = service.ask("GET", f"/{options.job}", JobStatus)
        except Failed as failed:
            if failed.exit_code != EXIT_UNAVAILABLE or time.monotonic() - answered_at > RETRY_S:
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


def fetch(service: Service, options: argparse.Namespace) -> None:
    lines = service.results(options.job, options.follow)
    if options.output is None:
        for piece in lines:
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return
    part = options.output.with_name(f"{options.output.name}.part")  # the name changes when the file is complete
    try:
        with part.open("wb") as file:
            file.writelines(lines)
        part.rename(options.output)
    except OSError as error:
        raise Failed(f"{options.output}: {error.strerror}", EXIT_USAGE) from None


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


ACTS = {"submit": submit, "status": show_status, "watch": watch, "results": fetch, "remove": remove}
