"""The three kinds of languages: how their programs start."""

from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass, field

from exec_wire import Limits

# Folders that are visible in the jail; an interpreter elsewhere cannot start there.
_VISIBLE = ("/usr/", "/bin/")


@dataclass(frozen=True)
class Language:
    """Runs in the zygote's own interpreter."""

    name: str

    def path(self) -> str | None:
        return None

    def installed(self) -> bool:
        return True


@dataclass(frozen=True)
class Interpreted(Language):
    """`command source arguments…`"""

    command: str
    source: str  # the name of the program's file

    def path(self) -> str | None:
        return find(self.command)

    def installed(self) -> bool:
        return self.path() is not None


@dataclass(frozen=True)
class Compiled(Language):
    """`compiler flags -o output source` in a sandboxed call of its own; then its output runs, passed as a sealed file."""

    compiler: str
    flags: tuple[str, ...]
    source: str
    limits: Limits = field(default_factory=Limits)  # of the compiler

    def path(self) -> str | None:
        return find(self.compiler)

    def installed(self) -> bool:
        return self.path() is not None


@functools.cache
def find(command: str) -> str | None:
    """Cached: a worker announces its languages with every heartbeat."""
    path = shutil.which(command, path="/usr/local/bin:/usr/bin:/bin")
    return path if path is not None and path.startswith(_VISIBLE) else None
