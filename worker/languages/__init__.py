"""The languages that a worker can run: name, command, flags. To add one, add it to `LANGUAGES`.

Python runs in a fork of a warm interpreter. The others start by exec in the same sandbox, from the smallest zygote.
"""

import functools
import shutil
from dataclasses import dataclass, field

from exec_wire import Limits

_VISIBLE = ("/usr/", "/bin/")  # in the jail; an interpreter elsewhere cannot start there


@dataclass(frozen=True)
class Language:
    """Runs in the zygote's own interpreter."""

    name: str

    def path(self) -> str | None:
        """The command that starts or compiles its programs; None if it is not installed, empty if it needs none."""
        return ""


@dataclass(frozen=True)
class Interpreted(Language):
    """`command source arguments…`"""

    command: str
    source: str  # the name of the program's file

    def path(self) -> str | None:
        return find(self.command)


@dataclass(frozen=True)
class Compiled(Language):
    """`compiler flags -o output source` in a sandboxed call of its own; then its output runs, passed as a sealed file."""

    compiler: str
    flags: tuple[str, ...]
    source: str
    limits: Limits = field(default_factory=Limits)  # of the compiler

    def path(self) -> str | None:
        return find(self.compiler)


@functools.cache
def find(command: str) -> str | None:
    """Cached: a worker announces its languages with every heartbeat."""
    path = shutil.which(command, path="/usr/local/bin:/usr/bin:/bin")
    return path if path is not None and path.startswith(_VISIBLE) else None


# A template bomb is stopped by these limits.
CPP_LIMITS = Limits(wall_s=30.0, memory_mb=1024, output_kb=256, file_mb=64)
CPP = Compiled("cpp", compiler="g++", flags=("-O2", "-std=c++17"), source="main.cpp", limits=CPP_LIMITS)

LANGUAGES: dict[str, Language] = {
    language.name: language
    for language in (
        Language("python"),
        CPP,
        Interpreted("bash", command="bash", source="main.sh"),
        Interpreted("javascript", command="node", source="main.js"),
    )
}


def paths() -> dict[str, str]:
    """Installed language -> the command that starts or compiles its programs; empty for Python."""
    return {name: path for name, language in LANGUAGES.items() if (path := language.path()) is not None}
