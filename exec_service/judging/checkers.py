"""Compares an output with the expected one: every checker but `program`, which runs in a sandbox.

Long texts are compared piece by piece, so that the event loop is never blocked for long. A message says where the texts differ,
never what is expected: messages end up in prompts.
"""

import asyncio
import math
import re
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

from exec_wire.messages.judging import Checker

PAIRS_PER_TURN = 2000  # per turn of the event loop; about 2 ms
LONGEST_NUMBER = 400  # characters; parsing a number takes more than linear time
_TOKEN = re.compile(r"\S+")
_NUMBER = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf|infinity|nan)", re.I | re.A)


async def difference(checker: Checker, output: str, expected: str) -> str:
    """Where the two differ; empty if they are equal."""
    if output == expected:
        return ""
    if checker.kind == "exact":
        return "the output differs"
    if checker.kind == "lines":
        return await first_difference("line", lines(output), lines(expected), str.__eq__)
    same = _close_tokens(checker) if checker.kind == "float" else str.__eq__
    return await first_difference("token", tokens(output), tokens(expected), same)


async def first_difference(unit: str, got: Iterator[str], wanted: Iterator[str], same: Callable[[str, str], bool]) -> str:
    for place, (mine, theirs) in enumerate(zip_longest(got, wanted), 1):
        if mine is None:
            return f"the output ends before {unit} {place}"
        if theirs is None:
            return f"the output goes on after {unit} {place - 1}"
        if not same(mine, theirs):
            return f"{unit} {place} differs"
        if place % PAIRS_PER_TURN == 0:
            await asyncio.sleep(0)
    return ""


def tokens(text: str) -> Iterator[str]:
    return (match[0] for match in _TOKEN.finditer(text))


def lines(text: str) -> Iterator[str]:
    """Without trailing white space of each line, and without empty lines at the end."""
    text, start = text.rstrip(), 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end].rstrip()
        start = end + 1


def number(token: str) -> float | None:
    """Decimal notation, inf and nan. None if it is no number, or too large for a float."""
    if len(token) > LONGEST_NUMBER or not _NUMBER.fullmatch(token):
        return None
    value = float(token)
    return None if math.isinf(value) and "inf" not in token.lower() else value


def close(got: float, wanted: float, abs_tol: float = 0.0, rel_tol: float = 0.0) -> bool:
    if got == wanted or (got != got and wanted != wanted):  # exact for integers beyond 2^53 too; or both nan
        return True
    if not (abs_tol or rel_tol):
        return False
    try:
        got, wanted = float(got), float(wanted)
    except OverflowError:
        return False
    return math.isfinite(got) and math.isfinite(wanted) and abs(got - wanted) <= max(abs_tol, rel_tol * abs(wanted))


def _close_tokens(checker: Checker) -> Callable[[str, str], bool]:
    def same(got: str, wanted: str) -> bool:
        if got == wanted:
            return True
        a, b = number(got), number(wanted)
        return a is not None and b is not None and close(a, b, checker.abs_tol, checker.rel_tol)

    return same


async def same_value(checker: Checker, got: Any, wanted: Any) -> bool:
    """Equal as JSON: 1 equals 1.0 but not true, in any order of keys. A `float` checker compares numbers with its tolerance."""
    abs_tol, rel_tol = (checker.abs_tol, checker.rel_tol) if checker.kind == "float" else (0.0, 0.0)
    pairs, seen = [(got, wanted)], 0
    while pairs:
        a, b = pairs.pop()
        if _is_number(a) and _is_number(b):
            if not close(a, b, abs_tol, rel_tol):
                return False
        elif type(a) is not type(b):
            return False
        elif isinstance(a, list):
            if len(a) != len(b):
                return False
            pairs.extend(zip(a, b, strict=True))
        elif isinstance(a, dict):
            if a.keys() != b.keys():
                return False
            pairs.extend((value, b[key]) for key, value in a.items())
        elif a != b:
            return False
        seen += 1
        if seen % PAIRS_PER_TURN == 0:
            await asyncio.sleep(0)
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
