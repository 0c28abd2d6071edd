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
    """Without a command it runs in the zygote's own interpreter."""

    name: str
    command: str = ""  # starts or compiles its programs
    source: str = ""  # the name of the program's file

    def path(self) -> str | None:
        """The path of the command; None if it is not installed, empty if there is none."""
        return find(self.command) if self.command else ""


@dataclass(frozen=True)
class Interpreted(Language):
    """`command source arguments…`"""


@dataclass(frozen=True)
class Compiled(Language):
    """`command flags -o output source` in a sandboxed call of its own; then its output runs, passed as a sealed file."""

    flags: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)  # of the compiler


@functools.cache
def find(command: str) -> str | None:
    """Cached: a worker announces its languages with every heartbeat."""
    path = shutil.which(command, path="/usr/local/bin:/usr/bin:/bin")
    return path if path is not None and path.startswith(_VISIBLE) else None


# A template bomb is stopped by these limits.
CPP_LIMITS = Limits(wall_s=30.0, memory_mb=1024, output_kb=256, file_mb=64)
CPP = Compiled("cpp", command="g++", flags=("-O2", "-std=c++17"), source="main.cpp", limits=CPP_LIMITS)

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
