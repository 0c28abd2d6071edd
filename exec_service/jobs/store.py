"""The folder of bulk jobs. All that is known of a job is in its files; whoever can read the folder can go on with it.

    JOB/meta.json             what it is; written once
    JOB/chunks/00001.jsonl    its items; written once
    JOB/results/00001.jsonl   the proof that the chunk is done: written aside, then renamed
    JOB/tallies/00001.jsonl   how its items ended; there before its results are
    JOB/partial/00001.jsonl   results of a chunk that was left before its end
    JOB/running/00001.jsonl   whoever works on the chunk writes here how far it is, every `HEARTBEAT_S`
    JOB/state                 `paused` or `cancelled`, if it is
    JOB/trouble               why a chunk could not go on
    JOB/token                lets whoever runs the chunks call as the job's tenant; gone when the job has ended

A job appears by the renaming of its whole folder. A chunk that two work on at once is finished by both and counts once: its
results are one file. Nobody compares the clocks of two machines: who works on a chunk counts, and who watches sees whether
the count changes.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from exec_service.config import ConfigError
from exec_wire.messages.calls import encode_json
from exec_wire.messages.jobs import JobResult, JobState, decode_job_result

TOKEN_PREFIX = "exj_"
_ID = re.compile(r"[0-9]{14}-[0-9a-f]{12}")
DRAFT_S = 86400.0  # what nobody has added to for so long is not being received any more
_FOLDERS = ("chunks", "results", "tallies", "partial", "running")
_encode_lines = msgspec.json.Encoder().encode_lines


class JobMeta(Struct, frozen=True):
    id: str
    tenant: str
    created: str
    chunks: list[int]  # the number of items in each
    name: str = ""

    @property
    def items(self) -> int:
        return sum(self.chunks)


class Heartbeat(Struct, frozen=True):
    """How far a chunk is. `count` changes with every heartbeat, so that a standstill can be seen without a clock."""

    runner: str
    count: int
    done: int


class NoSuchJob(Exception):
    """There is none of this name."""


_decode_meta = msgspec.json.Decoder(JobMeta).decode
_decode_heartbeat = msgspec.json.Decoder(Heartbeat).decode
_decode_tally = msgspec.json.Decoder(dict[str, int]).decode


class JobStore:
    """The folder; every method is one small act on files, so use a thread where an event loop must not wait."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"the folder of bulk jobs, {folder}: {error.strerror}") from None
        self._counted: dict[str, tuple[set[int], Counter[str]]] = {}  # chunks by job, and how their items ended
        self._counting = threading.Lock()  # each caller of `outcomes` is a thread of its own

    # -- jobs -------------------------------------------------------------------------------------------------------------

    def draft(self, tenant: str, name: str = "") -> Draft:
        return Draft(self, f"{datetime.now(UTC):%Y%m%d%H%M%S}-{secrets.token_hex(6)}", tenant, name)

    def ids(self) -> list[str]:
        """The oldest first."""
        return sorted(entry.name for entry in os.scandir(self.folder) if _ID.fullmatch(entry.name))

    def path(self, job: str) -> Path:
        if not _ID.fullmatch(job):
            raise NoSuchJob(job)
        return self.folder / job

    def meta(self, job: str) -> JobMeta:
        try:
            return _decode_meta((self.path(job) / "meta.json").read_bytes())
        except FileNotFoundError:
            raise NoSuchJob(job) from None

    def state(self, meta: JobMeta, done: int | None = None) -> JobState:
        text = _text(self.path(meta.id) / "state")
        if text == "cancelled":
            return "cancelled"
        if (len(self.chunks_done(meta.id)) if done is None else done) == len(meta.chunks):
            return "done"
        return "paused" if text == "paused" else "running"

    def set_state(self, job: str, state: JobState) -> None:
        """`running` takes a pause back."""
        path = self.path(job) / "state"
        if state == "running":
            path.unlink(missing_ok=True)
        else:
            write(path, state.encode())

    def is_to_run(self, job: str) -> bool:
        """False if it was paused, cancelled or removed."""
        path = self.path(job)
        return path.exists() and not (path / "state").exists()

    def trouble(self, job: str) -> str:
        return _text(self.path(job) / "trouble")

    def set_trouble(self, job: str, words: str) -> None:
        """Empty words: there is none any more. Of a job that was removed meanwhile nobody wants to know."""
        path = self.path(job) / "trouble"
        with contextlib.suppress(FileNotFoundError):
            if words:
                write(path, words.encode())
            else:
                path.unlink()

    def remove(self, job: str) -> None:
        """Out of sight first: half a job is never seen."""
        aside = self.folder / f".gone-{job}"
        with contextlib.suppress(FileNotFoundError):
            self.path(job).rename(aside)
        with self._counting:  # after the renaming: see `outcomes`
            self._counted.pop(job, None)
        shutil.rmtree(aside, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what was left by gateways that died while they received or removed a job."""
        for entry in os.scandir(self.folder):
            if entry.name.startswith((".new-", ".gone-")) and _idle_s(Path(entry), "chunks") > DRAFT_S:
                shutil.rmtree(entry, ignore_errors=True)

    def idle_s(self, job: str) -> float:
        """Since its last chunk was finished, or its state was changed."""
        return _idle_s(self.path(job), "results")

    # -- token ----------------------------------------------------------------------------------------------------------

    def token(self, job: str) -> str:
        secret = _text(self.path(job) / "token")
        return f"{TOKEN_PREFIX}{job}.{secret}" if secret else ""

    def tenant_of(self, token: str) -> str | None:
        """Whose job it is that this token belongs to; None if it is none, or the job has ended."""
        job = token.removeprefix(TOKEN_PREFIX).partition(".")[0]
        with contextlib.suppress(NoSuchJob):
            known = self.token(job)
            if known and hmac.compare_digest(known.encode(), token.encode("utf-8", "surrogatepass")):
                return self.meta(job).tenant
        return None

    def retire(self, job: str) -> None:
        """It has ended: nobody needs to call in its name any more."""
        (self.path(job) / "token").unlink(missing_ok=True)

    # -- chunks -----------------------------------------------------------------------------------------------------------

    def chunks_done(self, job: str) -> set[int]:
        return _numbers(self.path(job) / "results")

    def is_done(self, job: str, chunk: int) -> bool:
        return self._file(job, "results", chunk).exists()

    def items(self, job: str, chunk: int) -> list[bytes]:
        return _lines(self._file(job, "chunks", chunk))

    def save(self, job: str, chunk: int, results: Iterable[JobResult]) -> None:
        """The chunk is done, unless somebody else was faster."""
        ordered = sorted(results, key=lambda result: result.item)
        if self.is_done(job, chunk):
            return
        write(self._file(job, "tallies", chunk), encode_json(Counter(map(outcome, ordered))))
        write(self._file(job, "results", chunk), _encode_lines(ordered))
        self._file(job, "partial", chunk).unlink(missing_ok=True)

    def save_partial(self, job: str, chunk: int, results: Iterable[JobResult]) -> None:
        write(self._file(job, "partial", chunk), _encode_lines(sorted(results, key=lambda result: result.item)))

    def partial(self, job: str, chunk: int) -> list[JobResult]:
        try:
            return [decode_job_result(line) for line in _lines(self._file(job, "partial", chunk))]
        except FileNotFoundError:
            return []

    def left(self, job: str) -> dict[int, int]:
        """Chunks that were left before their end, and how many items of each are done."""
        folder = self.path(job) / "partial"
        found = {}
        for chunk in _numbers(folder):
            with contextlib.suppress(FileNotFoundError):  # finished meanwhile
                found[chunk] = self._file(job, "partial", chunk).read_bytes().count(b"\n")
        return found

    def outcomes(self, job: str, done: set[int]) -> dict[str, int]:
        """How the items of these finished chunks ended. A finished chunk never changes: it is read once and counted once."""
        with self._counting:
            counted, outcomes = self._counted.setdefault(job, (set(), Counter()))
            for chunk in done - counted:
                with contextlib.suppress(FileNotFoundError):  # the job was removed meanwhile
                    outcomes.update(_decode_tally(self._file(job, "tallies", chunk).read_bytes()))
                    counted.add(chunk)
            if not self.path(job).exists():
                del self._counted[job]
                raise NoSuchJob(job)
            return dict(outcomes)

    def forget_outcomes_except(self, jobs: Iterable[str]) -> None:
        """Other jobs were removed, perhaps by another gateway."""
        with self._counting:
            for job in self._counted.keys() - set(jobs):
                del self._counted[job]

    def result_file(self, job: str, chunk: int) -> Path | None:
        """Where its results are: all of them, or what there is of a chunk that was left."""
        whole, part = self._file(job, "results", chunk), self._file(job, "partial", chunk)
        return whole if whole.exists() else part if part.exists() else None

    # -- who works on what ------------------------------------------------------------------------------------------------

    def begin(self, job: str, chunk: int, heartbeat: Heartbeat) -> bool:
        """False if somebody works on it already."""
        try:
            with open(self._file(job, "running", chunk), "xb") as file:
                file.write(encode_json(heartbeat))
        except FileExistsError:
            return False
        return True

    def heartbeat(self, job: str, chunk: int, heartbeat: Heartbeat) -> None:
        with contextlib.suppress(FileNotFoundError):  # of a job that was removed; `is_to_run` says so too
            write(self._file(job, "running", chunk), encode_json(heartbeat), lasting=False)

    def end(self, job: str, chunk: int) -> None:
        self._file(job, "running", chunk).unlink(missing_ok=True)

    def running(self, job: str) -> dict[int, Heartbeat]:
        heartbeats = {}
        for chunk in _numbers(self.path(job) / "running"):
            try:
                heartbeats[chunk] = _decode_heartbeat(self._file(job, "running", chunk).read_bytes())
            except FileNotFoundError:  # ended meanwhile
                continue
            except msgspec.DecodeError:  # just being begun, or whoever began it died in that moment
                heartbeats[chunk] = Heartbeat("", 0, 0)
        return heartbeats

    def _file(self, job: str, folder: str, chunk: int) -> Path:
        return self.path(job) / folder / f"{chunk:05}.jsonl"


class Draft:
    """A job that is being received; seen by nobody before `finish`. Use as a context manager."""

    def __init__(self, store: JobStore, id: str, tenant: str, name: str) -> None:
        self._store, self.id, self._tenant, self._name = store, id, tenant, name
        self._path = store.folder / f".new-{id}"
        self._sizes: list[int] = []
        for folder in _FOLDERS:
            (self._path / folder).mkdir(parents=True, mode=0o700)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)

    @property
    def items(self) -> int:
        return sum(self._sizes)

    def add_chunk(self, lines: list[bytes]) -> None:
        self._sizes.append(len(lines))
        write(self._path / "chunks" / f"{len(self._sizes):05}.jsonl", b"\n".join(lines) + b"\n")

    def finish(self) -> JobMeta:
        created = datetime.now(UTC).isoformat(timespec="seconds")
        meta = JobMeta(self.id, self._tenant, created, self._sizes, self._name)
        write(self._path / "token", secrets.token_hex(32).encode())
        write(self._path / "meta.json", encode_json(meta))
        self._path.rename(self._store.path(self.id))
        return meta


def outcome(result: JobResult) -> str:
    """One word for how an item ended."""
    if result.call is not None:
        return result.call.status
    if result.judge is not None:
        return result.judge.verdict
    if result.verify is not None:
        return {True: "equal", False: "unequal", None: result.verify.status}[result.verify.equal]
    return result.error.code if result.error is not None else "nothing"


def write(path: Path, content: bytes, *, lasting: bool = True) -> None:
    """Aside, to the disk, then renamed: whoever sees the file sees all of it; if `lasting` also after the power went."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _idle_s(folder: Path, *inside: str) -> float:
    """Since anything in the folder, or in these folders of it, came or went."""
    times = []
    for name in (".", *inside):
        with contextlib.suppress(FileNotFoundError):
            times.append((folder / name).stat().st_mtime)
    return time.time() - max(times, default=0.0)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def _lines(path: Path) -> list[bytes]:
    """Split at newlines only: a carriage return may stand between two words of JSON."""
    return [line for line in path.read_bytes().split(b"\n") if line]


def _numbers(folder: Path) -> set[int]:
    try:
        return set(_names(folder))
    except FileNotFoundError:
        return set()


def _names(folder: Path) -> Iterator[int]:
    for entry in os.scandir(folder):
        stem = entry.name.partition(".")[0]
        if stem.isdigit():  # else it is being written
            yield int(stem)
