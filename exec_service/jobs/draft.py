"""A bulk job that is being received."""

from __future__ import annotations

import secrets
import shutil
from datetime import UTC, datetime
from pathlib import Path

from exec_service.jobs.files import FORMAT_VERSION, JobMeta, write_file
from exec_wire.messages.calls import encode_json

FOLDERS = ("chunks", "results", "outcomes", "partial", "running")


class Draft:
    """No reader sees the job before `finish`. A context manager: leaving it without `finish` removes the files."""

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
