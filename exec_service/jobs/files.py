"""Files and messages in the folder of a bulk job: how they are written and read. `store` says which ones there are."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from exec_wire.messages.calls import encode_json
from exec_wire.messages.jobs import JobResult

FOLDERS = ("chunks", "results", "outcomes", "partial", "running")
FORMAT_VERSION = 1  # of a job's folder; a change that older gateways or jobs workers cannot read raises it


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

    def __enter__(self) -> Draft:
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
