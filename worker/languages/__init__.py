"""The languages that a worker can run, one file each: name, command, flags.

Python runs in a fork of a warm interpreter. The others start by exec in the same sandbox, from the smallest zygote.
"""

from __future__ import annotations

from worker.languages.bash import BASH
from worker.languages.cpp import CPP
from worker.languages.javascript import JAVASCRIPT
from worker.languages.kinds import Compiled, Interpreted, Language
from worker.languages.python import PYTHON

LANGUAGES: dict[str, Language] = {language.name: language for language in (PYTHON, CPP, BASH, JAVASCRIPT)}


def installed() -> list[str]:
    """The languages that are installed on this machine."""
    return [name for name, language in LANGUAGES.items() if language.installed()]


def paths() -> dict[str, str]:
    """Installed language -> the command that starts or compiles its programs; empty for Python."""
    return {name: LANGUAGES[name].path() or "" for name in installed()}


__all__ = ["LANGUAGES", "Compiled", "Interpreted", "Language", "installed", "paths"]
