"""The languages a worker can run. One file each: what it is called, whether it is here, and how its program is started.

Python runs in a fork of a warm interpreter. The others are started by exec in the same sandbox, from the smallest zygote.
"""

from __future__ import annotations

from worker.languages.bash import BASH
from worker.languages.cpp import CPP
from worker.languages.javascript import JAVASCRIPT
from worker.languages.kinds import Compiled, Interpreted, Language
from worker.languages.python import PYTHON

LANGUAGES: dict[str, Language] = {language.name: language for language in (PYTHON, CPP, BASH, JAVASCRIPT)}


def installed() -> list[str]:
    """The languages whose programs can be run on this machine."""
    return [name for name, language in LANGUAGES.items() if language.installed()]


def paths() -> dict[str, str]:
    """Of each of them the command that starts or compiles its programs; nothing for Python, which needs none."""
    return {name: LANGUAGES[name].path() or "" for name in installed()}


__all__ = ["LANGUAGES", "Compiled", "Interpreted", "Language", "installed", "paths"]
