"""The settings of a worker."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from worker.profiles import PROFILES
from worker.sandbox import memory
from worker.sandbox.uids import BLOCK_SIZE, DEFAULT_BASE, MAX_BASE, MIN_UID

UIDS = BLOCK_SIZE - 1
MAX_SESSIONS = 128


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


# Between two programs a slot waits for the kernel to clean up, and its core is idle. Three slots per core keep the cores busy;
# the time that a program starves meanwhile does not count (native/cpu_meter.c). docs/results/slots.md has the figures.
def default_slots() -> int:
    """Three for every core."""
    return min(3 * usable_cores(), UIDS - MAX_SESSIONS)


def half_of_memory_mb() -> int:
    """Half of what the machine has, or of what the control groups above allow."""
    return memory.usable().bytes // (2 << 20)


def default_log_format() -> Literal["json", "text"]:
    """Text on a terminal, else json."""
    return "text" if sys.stderr.isatty() else "json"


def default_packages() -> str:
    """Beside the code, where `make` installs them."""
    return str(Path(__file__).parents[1] / ".sandbox-packages")


class WorkerConfig(Struct, frozen=True, kw_only=True):
    slots: Annotated[
        int, Meta(ge=1, le=1023, description="Programs that run at the same time; three for every core if not set")
    ] = field(default_factory=default_slots)
    redis: Annotated[
        str, Meta(description="URL of the Redis or Valkey server between gateways and workers: redis://, rediss:// or unix://")
    ] = ""
    metrics_host: Annotated[str, Meta(description="Address of the port for metrics and health, in a cluster")] = "127.0.0.1"
    metrics_port: Annotated[int, Meta(ge=0, le=65535, description="That port; 0 takes a free one")] = 0
    drain_s: Annotated[
        float, Meta(ge=0, description="How long a shutdown waits for running calls before it hands them back")
    ] = 30.0
    runtime: Annotated[
        Literal["sandbox", "echo"],
        Meta(description="echo: run nothing and answer at once, to measure the path to a worker; only with --insecure"),
    ] = "sandbox"
    echo_ms: Annotated[float, Meta(ge=0, description="How long a call takes with the runtime echo; for load tests")] = 0.0
    packages: Annotated[str, Meta(description="Folder of the packages that programs may import")] = field(
        default_factory=default_packages
    )
    profiles: Annotated[
        dict[str, list[str]], Meta(description="Warm interpreters: name and imported modules of each (JSON)")
    ] = field(default_factory=lambda: dict(PROFILES))
    uid_base: Annotated[
        int,
        Meta(ge=MIN_UID, le=MAX_BASE, description="First user id that sandboxes run under; only for the worker's own runner"),
    ] = DEFAULT_BASE
    runner_socket: Annotated[
        str, Meta(description="Join the runner that listens here instead of starting one; its command line limits this worker")
    ] = ""
    compile_cache_bytes: Annotated[int, Meta(ge=0, description="Bytes of compiled programs kept in memory")] = 256 << 20
    max_result_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            le=1 << 30,
            description="Bytes of one result's output and files (as base64); files that do not fit are named in files_missing",
        ),
    ] = 32 << 20
    results_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="Bytes of all large results that are being made or sent; a program whose result does not "
            "fit keeps its slot until it does",
        ),
    ] = 256 << 20
    max_sessions: Annotated[
        int, Meta(ge=0, le=1000, description="Sessions and forks of sessions that this worker holds; beyond it 429")
    ] = MAX_SESSIONS
    max_sessions_per_tenant: Annotated[int, Meta(ge=0, description="Of these, by one tenant")] = 128
    session_memory_mb: Annotated[
        int, Meta(ge=0, description="Memory in use by all sessions above which no session is added")
    ] = field(default_factory=half_of_memory_mb)
    session_memory_per_tenant_mb: Annotated[int, Meta(ge=0, description="Of this, by one tenant")] = field(
        default_factory=half_of_memory_mb
    )
    strict_memory: Annotated[
        bool,
        Meta(
            description="Run nothing if programs in all slots, each with the default of limits.memory_mb, need more memory "
            "than the machine or pod has; else only a warning is logged"
        ),
    ] = False
    min_tier: Annotated[
        Literal["A", "B", "C", "D", "E"],
        Meta(description="Refuse to run programs in a weaker sandbox than this (A is strongest)"),
    ] = "B"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Lowest level of log lines that are written, see docs/operations.md"),
    ] = "warning"
    log_format: Annotated[
        Literal["json", "text"], Meta(description="Format of every log line; text on a terminal, else json, if not set")
    ] = field(default_factory=default_log_format)
    mask_layers: Annotated[
        list[str],
        Meta(
            description="For tests, with the worker's own runner: act as if these layers did not work (JSON); landlock=2: as "
            "if Landlock had ABI 2"
        ),
    ] = field(default_factory=list)
    fault_injection: Annotated[
        bool, Meta(description="For tests, with the worker's own runner: a call may name a set-up step that fails")
    ] = False

    def __post_init__(self) -> None:
        if self.slots + self.max_sessions > UIDS:
            raise ValueError(f"slots and max_sessions together are more than {UIDS}, the number of user ids of a worker")
