"""Chooses a program's profile: the smallest warm interpreter that has imported the modules that the program imports.

The check is cheap and may be wrong: a program in the wrong zygote still runs, it only imports by itself.
"""

import re

PROFILES: dict[str, list[str]] = {
    "bare": [],
    "numpy": ["numpy"],
    "sympy": ["sympy", "mpmath"],
    "math": ["numpy", "scipy", "sympy", "mpmath"],
    "data": ["numpy", "pandas", "matplotlib.pyplot"],
    "verify": ["math_verify"],
}
"""Name -> modules that its zygotes import, from small to large."""

_IMPORT = re.compile(r"(?:^|[;:])[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([^\n;#]+))", re.M)


class ProfileChoice:
    def __init__(self, profiles: dict[str, list[str]]) -> None:
        self._sets = {name: {module.split(".")[0] for module in imports} for name, imports in profiles.items()}
        self._warm = set[str]().union(*self._sets.values())

    def choose(self, code: str) -> str:
        wanted = imported(code) & self._warm
        fitting = [name for name, has in self._sets.items() if wanted <= has]
        if fitting:
            return min(fitting, key=lambda name: len(self._sets[name]))
        return max(self._sets, key=lambda name: len(self._sets[name] & wanted))


def imported(code: str) -> set[str]:
    """The top-level names that a program seems to import."""
    found = set()
    for package, names in _IMPORT.findall(code):
        for name in (package, *names.split(",")):
            found.update(name.replace(".", " ").split()[:1])
    return found
