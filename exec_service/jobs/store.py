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
import shutil
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from exec_service.config import ConfigError
from exec_service.jobs import files
from exec_wire.messages.calls import encode_json
from exec_wire.messages.jobs import JobResult, JobState, decode_job_result

TOKEN_PREFIX = "exj_"
_ID = re.compile(r"[0-9]{14}-[0-9a-f]{12}")
DRAFT_S = 86400.0  # a draft without a change for this long was abandoned
_encode_lines = msgspec.json.Encoder().encode_lines
_decode_heartbeat = msgspec.json.Decoder(files.Heartbeat).decode
_decode_outcomes = msgspec.json.Decoder(dict[str, int]).decode


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

    def draft(self, tenant: str, name: str = "") -> files.Draft:
        return files.Draft(self.folder, tenant, name)

    def ids(self) -> list[str]:
        """The oldest first."""
        return sorted(entry.name for entry in os.scandir(self.folder) if _ID.fullmatch(entry.name))

    def path(self, job: str) -> Path:
        if not _ID.fullmatch(job):
            raise files.NoSuchJob(job)
        return self.folder / job

    def _file(self, job: str, folder: str, chunk: int) -> Path:
        return self.path(job) / folder / f"{chunk:05}.jsonl"

    def meta(self, job: str) -> files.JobMeta:
        return files.read_meta(self.path(job))

    def state(self, meta: files.JobMeta, done: int | None = None) -> JobState:
        text = files.read_text(self.path(meta.id) / "state")
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
            files.write_file(path, state.encode())

    def is_to_run(self, job: str) -> bool:
        """False if it was paused, cancelled or removed."""
        path = self.path(job)
        return path.exists() and not (path / "state").exists()

    def trouble(self, job: str) -> str:
        return files.read_text(self.path(job) / "trouble")

    def set_trouble(self, job: str, reason: str) -> None:
        path = self.path(job) / "trouble"
        with contextlib.suppress(FileNotFoundError):  # the job was removed, or has no trouble
            if reason:
                files.write_file(path, reason.encode())
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
            if entry.name.startswith((".new-", ".gone-")) and files.idle_s(Path(entry), "chunks") > DRAFT_S:
                shutil.rmtree(entry, ignore_errors=True)

    def idle_s(self, job: str) -> float:
        """Since a chunk was finished or the state changed."""
        return files.idle_s(self.path(job), "results")

    # -- token ------------------------------------------------------------------------------------------------------------

    def token(self, job: str) -> str:
        secret = files.read_text(self.path(job) / "token")
        return f"{TOKEN_PREFIX}{job}.{secret}" if secret else ""

    def tenant_of(self, token: str) -> str | None:
        """The tenant of the job that this token belongs to; None if the token is unknown or the job has ended."""
        job = token.removeprefix(TOKEN_PREFIX).partition(".")[0]
        with contextlib.suppress(files.NoSuchJob):
            known = self.token(job)
            if known and hmac.compare_digest(known.encode(), token.encode("utf-8", "surrogatepass")):
                return self.meta(job).tenant
        return None

    def revoke_token(self, job: str) -> None:
        (self.path(job) / "token").unlink(missing_ok=True)

    # -- chunks -----------------------------------------------------------------------------------------------------------

    def chunks_done(self, job: str) -> set[int]:
        return files.chunk_numbers(self.path(job) / "results")

    def is_done(self, job: str, chunk: int) -> bool:
        return self._file(job, "results", chunk).exists()

    def items(self, job: str, chunk: int) -> list[bytes]:
        return files.read_lines(self._file(job, "chunks", chunk))

    def save(self, job: str, chunk: int, results: Iterable[JobResult]) -> None:
        """The chunk is done, unless another runner was faster."""
        ordered = sorted(results, key=lambda result: result.item)
        if self.is_done(job, chunk):
            return
        files.write_file(self._file(job, "outcomes", chunk), encode_json(Counter(map(files.outcome, ordered))))
        files.write_file(self._file(job, "results", chunk), _encode_lines(ordered))
        self._file(job, "partial", chunk).unlink(missing_ok=True)

    def save_partial(self, job: str, chunk: int, results: Iterable[JobResult]) -> None:
        files.write_file(self._file(job, "partial", chunk), _encode_lines(sorted(results, key=lambda result: result.item)))

    def partial(self, job: str, chunk: int) -> list[JobResult]:
        try:
            return [decode_job_result(line) for line in files.read_lines(self._file(job, "partial", chunk))]
        except FileNotFoundError:
            return []

    def partly_done(self, job: str) -> dict[int, int]:
        """Chunks whose runner stopped before the end, and how many items of each are done."""
        found = {}
        for chunk in files.chunk_numbers(self.path(job) / "partial"):
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
                raise files.NoSuchJob(job)
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

    def begin(self, job: str, chunk: int, heartbeat: files.Heartbeat) -> bool:
        """False if another runner has the chunk."""
        try:
            with open(self._file(job, "running", chunk), "xb") as file:
                file.write(encode_json(heartbeat))
        except FileExistsError:
            return False
        return True

    def heartbeat(self, job: str, chunk: int, heartbeat: files.Heartbeat) -> None:
        with contextlib.suppress(FileNotFoundError):  # the job was removed; `is_to_run` tells the runner
            files.write_file(self._file(job, "running", chunk), encode_json(heartbeat), durable=False)

    def end(self, job: str, chunk: int) -> None:
        self._file(job, "running", chunk).unlink(missing_ok=True)

    def running(self, job: str) -> dict[int, files.Heartbeat]:
        heartbeats = {}
        for chunk in files.chunk_numbers(self.path(job) / "running"):
            try:
                heartbeats[chunk] = _decode_heartbeat(self._file(job, "running", chunk).read_bytes())
            except FileNotFoundError:  # ended in the meantime
                continue
            except msgspec.DecodeError:  # `begin` has not written yet, or its process died there
                heartbeats[chunk] = files.Heartbeat("", 0, 0)
        return heartbeats
