"""Everything that can be set about a worker."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from worker.profiles import PROFILES
from worker.sandbox.uids import DEFAULT_BASE


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def default_packages() -> Path:
    """Beside the code, where `make` installs them."""
    return Path(__file__).parents[1] / ".sandbox-packages"


@dataclass(frozen=True)
class WorkerConfig:
    slots: int = field(default_factory=usable_cores, metadata={"help": "programs that run at the same time"})
    packages: Path = field(default_factory=default_packages, metadata={"help": "folder of the packages that programs may import"})
    profiles: dict[str, list[str]] = field(
        default_factory=lambda: dict(PROFILES), metadata={"help": "warm interpreters: name and what each has imported"}
    )
    uid_base: int = field(default=DEFAULT_BASE, metadata={"help": "first of the user ids that sandboxes run under"})
    runner_socket: Path | None = field(default=None, metadata={"help": "join the runner that listens here instead of starting one"})
    fault_injection: bool = field(default=False, metadata={"help": "for tests: let a call name the set-up step that fails"})
