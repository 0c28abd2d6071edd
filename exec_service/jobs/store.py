"""The folder of bulk jobs. It holds the whole state of every job: any process that can read it can continue a job.

    JOB/meta.json             the job's description, with the version of this layout; written once
    JOB/chunks/00001.jsonl    its items; written once
    JOB/results/00001.jsonl   its results; the chunk is done once this file exists
    JOB/outcomes/00001.jsonl  how many items ended in which way; written before the results
    JOB/partial/00001.jsonl   results of a chunk whose runner stopped before the end
    JOB/running/00001.jsonl   heartbeat of the chunk's runner, written every `HEARTBEAT_S`
    JOB/state                 `paused` or `cancelled`, if it is
    JOB/trouble               why a chunk could not continue
    JOB/token                 lets a jobs worker call as the job's tenant; removed when the job ends

A job appears when its complete folder is renamed. If two runners run the same chunk, both finish it and it counts once: its
results are one file. Clocks of two machines are never compared: a runner counts its heartbeats, and a watcher checks that the
count grows.
"""

import contextlib
import hmac
import os
import re
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from exec_service.config import ConfigError
from exec_wire.messages.calls import encode_json
from exec_wire.messages.jobs import JobResult, JobState, decode_job_result

FOLDERS = ("chunks", "results", "outcomes", "partial", "running")
FORMAT_VERSION = 1  # of a job's folder; a change that older gateways or jobs workers cannot read raises it
TOKEN_PREFIX = "exj_"
_ID = re.compile(r"[0-9]{14}-[0-9a-f]{12}")
DRAFT_S = 86400.0  # a draft without a change for this long was abandoned
_encode_lines = msgspec.json.Encoder().encode_lines


class JobMeta(Struct, frozen=True):
    id: str
    tenant: str
    created: str
    chunks: list[int]  # the number of items in each
    name: str = ""
    version: int = 1

    @property
    def items(self) -> int:
        return sum(self.chunks)


class Heartbeat(Struct, frozen=True):
    """How far a chunk is. `count` grows with every heartbeat, so that a watcher sees a stalled runner without a clock."""

    runner: str
    count: int
    done: int


class _Version(Struct):
    version: int = 1


class NoSuchJob(Exception):
    """There is no job of this id."""


class NewerJob(NoSuchJob):
    """A newer version of exec-service wrote the folder."""


_decode_version = msgspec.json.Decoder(_Version).decode
_decode_meta = msgspec.json.Decoder(JobMeta).decode
_decode_heartbeat = msgspec.json.Decoder(Heartbeat).decode
_decode_outcomes = msgspec.json.Decoder(dict[str, int]).decode


def read_meta(folder: Path) -> JobMeta:
    """Raises `NoSuchJob` or `NewerJob`; `ValueError` if the file is damaged."""
    try:
        content = (folder / "meta.json").read_bytes()
    except FileNotFoundError:
        raise NoSuchJob(folder.name) from None
    if (version := _decode_version(content).version) > FORMAT_VERSION:
        raise NewerJob(
            f"bulk job {folder.name} has folder format {version}, this process reads up to {FORMAT_VERSION}: "
            "upgrade this gateway or jobs worker"
        )
    return _decode_meta(content)


def outcome(result: JobResult) -> str:
    """One word for how an item ended."""
    if result.call is not None:
        return result.call.status
    if result.judge is not None:
        return result.judge.verdict
    if result.verify is not None:
        return {True: "equal", False: "unequal", None: result.verify.status}[result.verify.equal]
    return result.error.code if result.error is not None else "nothing"


def write_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write beside it and rename: a reader sees the whole file or none. `durable`: it survives a power failure."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def read_text(path: Path) -> str:
    """Empty if there is no such file."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def read_lines(path: Path) -> list[bytes]:
    """Split at newlines only: JSON allows a carriage return as white space."""
    return [line for line in path.read_bytes().split(b"\n") if line]


def chunk_numbers(folder: Path) -> set[int]:
    """Of the files in a folder, without those that are being written."""
    try:
        return {int(stem) for entry in os.scandir(folder) if (stem := entry.name.partition(".")[0]).isdigit()}
    except FileNotFoundError:
        return set()


def idle_s(folder: Path, *inside: str) -> float:
    """Seconds since a file was added to or removed from the folder, or these folders inside it."""
    times = []
    for name in (".", *inside):
        with contextlib.suppress(FileNotFoundError):
            times.append((folder / name).stat().st_mtime)
    return time.time() - max(times, default=0.0)


class Draft:
    """A bulk job that is being received. No reader sees it before `finish`; leaving without `finish` removes the files."""

    def __init__(self, folder: Path, tenant: str, name: str) -> None:
        self.id = f"{datetime.now(UTC):%Y%m%d%H%M%S}-{secrets.token_hex(6)}"
        self._folder, self._path, self._tenant, self._name = folder, folder / f".new-{self.id}", tenant, name
        self._sizes: list[int] = []
        for inside in FOLDERS:
            (self._path / inside).mkdir(parents=True, mode=0o700)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)

    @property
    def items(self) -> int:
        return sum(self._sizes)

    def add_chunk(self, lines: list[bytes]) -> None:
        self._sizes.append(len(lines))
        write_file(self._path / "chunks" / f"{len(self._sizes):05}.jsonl", b"\n".join(lines) + b"\n")

    def finish(self) -> JobMeta:
        created = datetime.now(UTC).isoformat(timespec="seconds")
        meta = JobMeta(self.id, self._tenant, created, self._sizes, self._name, FORMAT_VERSION)
        write_file(self._path / "token", secrets.token_hex(32).encode())
        write_file(self._path / "meta.json", encode_json(meta))
        self._path.rename(self._folder / self.id)
        return meta


class JobStore:
    """Every method does one small operation on files; call it in a thread where an event loop must not block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"cannot create the folder of bulk jobs, {folder}: {error.strerror}") from None
        self._counted: dict[str, tuple[set[int], Counter[str]]] = {}  # by job: chunks, and how their items ended
        self._counting = threading.Lock()  # each caller of `outcomes` is a thread of its own

    def draft(self, tenant: str, name: str = "") -> Draft:
        return Draft(self.folder, tenant, name)

    def ids(self) -> list[str]:
        """The oldest first."""
        return sorted(entry.name for entry in os.scandir(self.folder) if _ID.fullmatch(entry.name))

    def path(self, job: str) -> Path:
        if not _ID.fullmatch(job):
            raise NoSuchJob(job)
        return self.folder / job

    def _file(self, job: str, folder: str, chunk: int) -> Path:
        return self.path(job) / folder / f"{chunk:05}.jsonl"

    def meta(self, job: str) -> JobMeta:
        return read_meta(self.path(job))

    def state(self, meta: JobMeta, done: int | None = None) -> JobState:
        text = read_text(self.path(meta.id) / "state")
        if text == "cancelled":
            return "cancelled"
        if (len(self.chunks_done(meta.id)) if done is None else done) == len(meta.chunks):
            return "done"
        return "paused" if text == "paused" else "running"

    def set_state(self, job: str, state: JobState) -> None:
        """`running` ends a pause."""
        path = self.path(job) / "state"
        if state == "running":
            path.unlink(missing_ok=True)
        else:
            write_file(path, state.encode())

    def is_to_run(self, job: str) -> bool:
        """False if it was paused, cancelled or removed."""
        path = self.path(job)
        return path.exists() and not (path / "state").exists()

    def trouble(self, job: str) -> str:
        return read_text(self.path(job) / "trouble")

    def set_trouble(self, job: str, reason: str) -> None:
        path = self.path(job) / "trouble"
        with contextlib.suppress(FileNotFoundError):  # the job was removed, or has no trouble
            if reason:
                write_file(path, reason.encode())
            else:
                path.unlink()

    def remove(self, job: str) -> None:
        """Rename first, then delete: no reader sees half a job."""
        aside = self.folder / f".gone-{job}"
        with contextlib.suppress(FileNotFoundError):
            self.path(job).rename(aside)
        with self._counting:  # after the rename: see `outcomes`
            self._counted.pop(job, None)
        shutil.rmtree(aside, ignore_errors=True)

    def sweep(self) -> None:
        """Remove the remains of gateways that died while they received or removed a job."""
        for entry in os.scandir(self.folder):
            if entry.name.startswith((".new-", ".gone-")) and idle_s(Path(entry), "chunks") > DRAFT_S:
                shutil.rmtree(entry, ignore_errors=True)

    def idle_s(self, job: str) -> float:
        """Since a chunk was finished or the state changed."""
        return idle_s(self.path(job), "results")

    # -- token ------------------------------------------------------------------------------------------------------------

    def token(self, job: str) -> str:
        secret = read_text(self.path(job) / "token")
        return f"{TOKEN_PREFIX}{job}.{secret}" if secret else ""

    def tenant_of(self, token: str) -> str | None:
        """The tenant of the job that this token belongs to; None if the token is unknown or the job has ended."""
        job = token.removeprefix(TOKEN_PREFIX).partition(".")[0]
        with contextlib.suppress(NoSuchJob):
            known = self.token(job)
            if known and hmac.compare_digest(known.encode(), token.encode("utf-8", "surrogatepass")):
                return self.meta(job).tenant
        return None

    def revoke_token(self, job: str) -> None:
        (self.path(job) / "token").unlink(missing_ok=True)

    # -- chunks -----------------------------------------------------------------------------------------------------------

    def chunks_done(self, job: str) -> set[int]:
        return chunk_numbers(self.path(job) / "results")

    def is_done(self, job: str, chunk: int) -> bool:
        return self._file(job, "results", chunk).exists()

    def items(self, job: str, chunk: int) -> list[bytes]:
        return read_lines(self._file(job, "chunks", chunk))

    def save(self, job: str, chunk: int, results: Iterable[JobResult]) -> None:
        """The chunk is done, unless another runner was faster."""
        ordered = sorted(results, key=lambda result: result.item)
        if self.is_done(job, chunk):
            return
        write_file(self._file(job, "outcomes", chunk), encode_json(Counter(map(outcome, ordered))))
        write_file(self._file(job, "results", chunk), _encode_lines(ordered))
        self._file(job, "partial", chunk).unlink(missing_ok=True)

    def save_partial(self, job: str, chunk: int, results: Iterable[JobResult]) -> None:
        write_file(self._file(job, "partial", chunk), _encode_lines(sorted(results, key=lambda result: result.item)))

    def partial(self, job: str, chunk: int) -> list[JobResult]:
        try:
            return [decode_job_result(line) for line in read_lines(self._file(job, "partial", chunk))]
        except FileNotFoundError:
            return []

    def partly_done(self, job: str) -> dict[int, int]:
        """Chunks whose runner stopped before the end, and how many items of each are done."""
        found = {}
        for chunk in chunk_numbers(self.path(job) / "partial"):
            with contextlib.suppress(FileNotFoundError):  # finished in the meantime
                found[chunk] = self._file(job, "partial", chunk).read_bytes().count(b"\n")
        return found

    def outcomes(self, job: str, done: set[int]) -> dict[str, int]:
        """How the items of these finished chunks ended. A finished chunk never changes: it is read and counted once."""
        with self._counting:
            counted, outcomes = self._counted.setdefault(job, (set(), Counter()))
            for chunk in done - counted:
                with contextlib.suppress(FileNotFoundError):  # the job was removed in the meantime
                    outcomes.update(_decode_outcomes(self._file(job, "outcomes", chunk).read_bytes()))
                    counted.add(chunk)
            if not self.path(job).exists():
                del self._counted[job]
                raise NoSuchJob(job)
            return dict(outcomes)

    def forget_outcomes_except(self, jobs: Iterable[str]) -> None:
        """The others were removed, perhaps by another gateway."""
        with self._counting:
            for job in self._counted.keys() - set(jobs):
                del self._counted[job]

    def result_file(self, job: str, chunk: int) -> Path | None:
        """The file with all results of the chunk, or else with its partial results."""
        paths = (self._file(job, folder, chunk) for folder in ("results", "partial"))
        return next((path for path in paths if path.exists()), None)

    # -- heartbeats -------------------------------------------------------------------------------------------------------

    def begin(self, job: str, chunk: int, heartbeat: Heartbeat) -> bool:
        """False if another runner has the chunk."""
        try:
            with open(self._file(job, "running", chunk), "xb") as file:
                file.write(encode_json(heartbeat))
        except FileExistsError:
            return False
        return True

    def heartbeat(self, job: str, chunk: int, heartbeat: Heartbeat) -> None:
        with contextlib.suppress(FileNotFoundError):  # the job was removed; `is_to_run` tells the runner
            write_file(self._file(job, "running", chunk), encode_json(heartbeat), durable=False)

    def end(self, job: str, chunk: int) -> None:
        self._file(job, "running", chunk).unlink(missing_ok=True)

    def running(self, job: str) -> dict[int, Heartbeat]:
        heartbeats = {}
        for chunk in chunk_numbers(self.path(job) / "running"):
            try:
                heartbeats[chunk] = _decode_heartbeat(self._file(job, "running", chunk).read_bytes())
            except FileNotFoundError:  # ended in the meantime
                continue
            except msgspec.DecodeError:  # `begin` has not written yet, or its process died there
                heartbeats[chunk] = Heartbeat("", 0, 0)
        return heartbeats
