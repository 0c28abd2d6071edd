"""Extracts the answer from a model's text, and compares answers where no sandbox is needed.

Everything here takes linear time at most, whatever the text is.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from exec_service.judging.checkers import LONGEST_NUMBER, close
from exec_wire.messages.judging import Verify

BOX_CHARS, BOX_TRIES = 10_000, 8  # the longest content of a box; how many boxes are tried, from the last
TEXT_CHARS = 10_000  # at the end of a text, in which a number or a letter is searched
DEFAULT_TOLERANCE = 1e-6

# No pattern can match the same text in two ways, so that none takes more than linear time.
_BRACE = re.compile(r"\\.|[{}]", re.S)
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|operatorname) ?\{([^{}]*)\}")
_NOISE = re.compile(r"\\[,;!: ]|\\left|\\right|\\?[$%]|\\[()\[\]]|[£€¥]")
_FRACTION = re.compile(r"\\[dt]?frac(?:\{([^{}]*)\}\{([^{}]*)\}|(\d)(\d))", re.A)
_POWER_OF_TEN = re.compile(r" ?(?:\\times|\\cdot|\u00d7|\*) ?10 ?\^ ?\{?([+-]?\d+)\}?", re.A)
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
_NUMBER = re.compile(rf"[+-]? ?{_DECIMAL}(?: ?/ ?[+-]?{_DECIMAL})?", re.A)
_MARKED = re.compile(r"\$|\\[(\[]|\\boxed")
_PLAIN_NUMBER = re.compile(r"[-+\d./%*^()\s]*|\s*[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?\s*", re.A)
_COMMAND = re.compile(r"\\[A-Za-z]+(?:\{[A-Za-z ]*\})?")
_WORD = re.compile(r"[^\W\d_]{4}")
_CHOICES = re.compile(r"[\s(\[{]*([A-J](?:(?:[\s,&]|and)*[A-J])*|[a-j])[\s)\]}.:]*")
_SAID_CHOICE = re.compile(r"(?i:answer|choice|option)\b(?:[\s*:(\[]|is\b)*([A-J])\b")
_ANY_CHOICE = re.compile(r"\(([A-J])\)|(?:^|\s)\**([A-J])\**[.):]?\s*$", re.M)


class Extracted(NamedTuple):
    text: str
    boxed: bool = False


def extract(answer: str, how: str) -> Extracted | None:
    """The answer in a text; None if the text has none of the requested form."""
    finders: dict[str, list[Callable[[str], Extracted | None]]] = {
        "auto": [last_box, last_answer, Extracted],
        "boxed": [last_box],
        "answer": [last_answer],
        "none": [Extracted],
    }
    return next((found for find in finders[how] if (found := find(answer)) is not None), None)


def last_box(text: str) -> Extracted | None:
    """The content of the last `\\boxed{…}` whose braces are balanced; `\\{` and `\\}` are not braces."""
    end = len(text)
    for _ in range(BOX_TRIES):
        start = text.rfind("\\boxed{", 0, end)
        if start < 0:
            return None
        inside = start + len("\\boxed{")
        if (close_at := _closing_brace(text, inside)) is not None:
            return Extracted(text[inside:close_at].strip(), boxed=True)
        end = start
    return None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for match in _BRACE.finditer(text, start, min(len(text), start + BOX_CHARS)):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None


def last_answer(text: str) -> Extracted | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return Extracted(text[start + len("<answer>") : end].strip()) if start >= 0 else None


def as_latex(text: str) -> str:
    """Put an expression that has no LaTeX marks into a box.

    Math-Verify looks for $…$, \\boxed{…} and numbers; in a bare `\\sqrt 2` it finds 2. Numbers and prose are left to it.
    """
    if _MARKED.search(text) or _PLAIN_NUMBER.fullmatch(text) or _WORD.search(_COMMAND.sub(" ", text)):
        return text
    return f"\\boxed{{{text}}}"


class NotComparable(ValueError):
    """The truth is not of the requested kind; the message is for the caller."""


def equal(item: Verify, answer: str) -> bool:
    if item.kind == "exact":
        return answer.strip() == item.truth.strip()
    return equal_numbers(answer, item) if item.kind == "numeric" else equal_choices(answer, item.truth)


def equal_numbers(answer: str, item: Verify) -> bool:
    wanted, got = read_number(item.truth), read_number(answer)
    if wanted is None:
        raise NotComparable("there is no number in the truth")
    if got is None:
        return False
    whole = isinstance(got, int) and isinstance(wanted, int)
    tolerance = DEFAULT_TOLERANCE if item.abs_tol is None and item.rel_tol is None and not whole else 0.0
    return close(got, wanted, item.abs_tol or tolerance, item.rel_tol or tolerance)


def read_number(text: str) -> float | None:
    """The last number of a text. Understands commas of thousands, `a/b`, `\\frac`, `\\times 10^n`; ignores $ and %."""
    text = " ".join(text[-TEXT_CHARS:].replace("−", "-").split())  # noqa: RUF001
    text = _FRACTION.sub(lambda match: f" {match[1] or match[3]}/{match[2] or match[4]} ", _WRAPPED.sub(r"\1", text))
    text = _NOISE.sub("", _POWER_OF_TEN.sub(r"e\1", text))
    found = _last(_NUMBER, text)
    number = "" if found is None else found[0].replace(",", "").replace(" ", "")
    if not number or len(number) > LONGEST_NUMBER:
        return None
    try:
        if number.lstrip("+-").isdigit():
            return int(number)
        over, _, under = number.partition("/")
        value = float(over) / float(under) if under else float(number)
    except (ZeroDivisionError, ValueError):
        return None
    return value if math.isfinite(value) else None


def equal_choices(answer: str, truth: str) -> bool:
    wanted = _only_choices(truth)
    if not wanted:
        raise NotComparable("the truth is not a letter from A to J, nor several")
    return read_choices(answer) == wanted


def read_choices(text: str) -> set[str]:
    """The text as letters; else the last letter named as the answer; else the last letter that looks like a choice."""
    text = text[-TEXT_CHARS:]
    if only := _only_choices(text):
        return only
    said = _last(_SAID_CHOICE, text) or _last(_ANY_CHOICE, text)
    return set() if said is None else {letter for letter in said.groups() if letter}


def _only_choices(text: str) -> set[str]:
    match = _CHOICES.fullmatch(_NOISE.sub("", _WRAPPED.sub(r"\1", text)).strip("* \n"))
    return set() if match is None else set(match[1].replace("and", "").upper()) - set(" \t\n,&")


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for match in pattern.finditer(text):
        last = match
    return last
