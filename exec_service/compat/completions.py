"""SandboxFusion's generic judge: finds the program in a completion and compares outputs."""

import base64
import re
from typing import Literal

from exec_service.judging.checkers import first_difference, number

Found = Literal["fenced", "incomplete_fenced", "heuristic", "empty"]

REL_TOL = 1e-5
TAGS = {
    "python": {"python", "py", "python3"},
    "cpp": {"cpp", "c++", "cc"},
    "javascript": {"javascript", "js", "nodejs", "node"},
    "bash": {"bash", "sh", "shell"},
}
_FENCE = re.compile(r"^[ \t]*```[ \t]*([^\s`]*)[^\n`]*$", re.M)
# The first line of a program without a fence.
_BEGINS = re.compile(r"^(?:import |from \S+ import |def |class |@|#include|using namespace|#!/)", re.M)


def extract(completion: str, language: str) -> tuple[str, Found]:
    """The first fenced block of the language, else one without a language, else an unclosed one, else a guess."""
    tags = TAGS.get(language, {language.lower()})
    blocks, open_block = _blocks(completion)
    for wanted in (tags, {""}):
        for tag, code in blocks:
            if tag in wanted:
                return code, "fenced"
    if open_block is not None and open_block[0] in tags | {""}:
        return open_block[1], "incomplete_fenced"
    if not completion.strip():
        return "", "empty"
    begins = _BEGINS.search(completion)
    return (completion[begins.start() :] if begins else completion).strip("\n"), "heuristic"


def _blocks(text: str) -> tuple[list[tuple[str, str]], tuple[str, str] | None]:
    """(tag, code) of every fenced block, and of the last one if its fence is not closed."""
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif not fence[1]:
            blocks.append((opened[1].lower(), text[opened.end() + 1 : fence.start()]))
            opened = None
    return blocks, (opened[1].lower(), text[opened.end() + 1 :]) if opened else None


async def same_output(output: str, expected: str) -> bool:
    """Compare line by line, ignoring case; numbers may differ by `REL_TOL`."""
    got, wanted = (iter(text.strip().split("\n")) for text in (output, expected))
    return not await first_difference("line", got, wanted, _same_line)


def _same_line(mine: str, theirs: str) -> bool:
    mine, theirs = mine.strip().casefold(), theirs.strip().casefold()
    if mine == theirs:
        return True
    a, b = number(mine), number(theirs)
    return a is not None and b is not None and abs(a - b) <= REL_TOL * max(abs(a), abs(b))


def base64_of(text: str) -> str:
    return base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def text_of(encoded: str) -> str:
    return base64.b64decode(encoded).decode("utf-8", "replace")
