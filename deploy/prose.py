"""Checks the prose: documentation, help texts, messages and docstrings. Part of `make lint`; alone: python deploy/prose.py

codespell finds misspellings; deploy/prose-words.txt has the words that it accepts. deploy/prose-rules.txt has our own rules,
`PATTERN -> ADVICE` on a line: archaic words, and words of the glossary. Code is not looked at: no blocks and no `words` of a
page, no names, and no strings without a space.
"""

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGES = ("*.md", "docs/*.md", "docs/move/*.md", "helm/**/*.md")
MODULES = [
    *(f"{name}/**/*.py" for name in "exec_wire exec_client exec_service worker loadtest grpo_roc".split()),
    "examples/*.py",
]


def prose_of_page(text: str) -> str:
    """The page with its code blanked out, line by line."""
    text = re.sub(r"^```.*?^```$", lambda match: "\n" * match[0].count("\n"), text, flags=re.M | re.S)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", lambda match: "_" + "\n" * match[0].count("\n"), text)


def prose_of_module(text: str) -> str:
    """Its docstrings and the strings with a space, on the lines where they are."""
    lines = [""] * (text.count("\n") + 1)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for number, line in enumerate(re.sub(r"`[^`]*`", "_", node.value).splitlines()):
                place = min(node.lineno - 1 + number, len(lines) - 1)
                lines[place] = f"{lines[place]} {line}"
    return "\n".join(lines)


def prose() -> Iterator[tuple[Path, str]]:
    for patterns, extract in ((PAGES, prose_of_page), (MODULES, prose_of_module)):
        for pattern in patterns:
            for path in sorted(ROOT.glob(pattern)):
                yield path.relative_to(ROOT), extract(path.read_text())


def rules() -> list[tuple[re.Pattern[str], str]]:
    lines = [line for line in (HERE / "prose-rules.txt").read_text().splitlines() if line and not line.startswith("#")]
    return [(re.compile(rf"\b(?:{pattern})\b", re.I), advice) for pattern, advice in (line.split(" -> ") for line in lines)]


def house_style(texts: dict[Path, str]) -> Iterator[str]:
    known = rules()
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            for pattern, advice in known:
                for found in pattern.finditer(line):
                    yield f"{path}:{number}: {found[0]!r}: {advice}"


def misspellings(texts: dict[Path, str]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        for path, text in texts.items():
            copy = Path(folder, path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)
        words = str(HERE / "prose-words.txt")
        command = [sys.executable, "-m", "codespell_lib", "--builtin", "clear,rare", "--ignore-words", words, "."]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        return (done.stdout + done.stderr).splitlines()


def main() -> int:
    texts = dict(prose())
    found = [*misspellings(texts), *house_style(texts)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
