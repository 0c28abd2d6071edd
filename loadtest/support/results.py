"""Results of every tool: where they were measured, their statistics, Markdown tables, and JSON for scripts."""

import argparse
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Self

import msgspec
from msgspec import Struct

from exec_service.config import read_environment
from worker.config import WorkerConfig, usable_cores
from worker.sandbox import interpreter

ROOT = Path(__file__).parents[2]
EXIT_FAILED, EXIT_USAGE, EXIT_UNAVAILABLE = 1, 2, 69


class Spread(Struct, frozen=True):
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Self:
        return cls(round(median(values), 4), round(min(values), 4), round(max(values), 4))


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def about(module: str, argv: Sequence[str] | None = None, **other: str) -> dict[str, str]:
    """The machine, the commit, the time and the command of a measurement."""
    models = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    memory_kb = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": str(usable_cores()),
        "memory": f"{memory_kb / 1e6:.0f} GB",
        "kernel": platform.release(),
        "Python": program_python(),
        **other,
        "commit": commit(),
        "started": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command(module, sys.argv[1:] if argv is None else argv),
    }


def program_python() -> str:
    """Versions of the service's Python and of the one that runs programs."""
    config = read_environment(WorkerConfig, os.environ)
    own, other = platform.python_version(), interpreter.find(config.program_python, Path(config.packages)).version
    return own if own == other else f"{own} for the service, {other} for programs"


def commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    try:
        changed = bool(git("status", "--porcelain", "--untracked-files=no"))
        return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")
    except FileNotFoundError:
        return "unknown"


def command(module: str, arguments: Sequence[str]) -> str:
    """The command line without folders and addresses of this machine."""
    words = ("URL" if "://" in word else Path(word).name if "/" in word else word for word in arguments)
    return f"`{shlex.join(['python', '-m', module, *words])}`"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table whose first `left` columns are aligned to the left."""
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def about_table(facts: dict[str, str]) -> str:
    return markdown(["", ""], [[name, value] for name, value in facts.items()], 2)


def write_json(found: Struct, file: Path | None) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def fill_page(module: str, **fields: object) -> str:
    """The page.txt beside a module, with these fields."""
    return Path(module).with_name("page.txt").read_text().format(**fields)


def write_page(text: str, file: Path | None) -> None:
    print(text)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.rstrip() + "\n")


def parser(module: str, description: str | None, *, page: bool = False) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if page:
        made.add_argument("--page", type=Path, metavar="PATH", help="write the page there too")
    return made


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Reads an option that is a list of known names, separated by commas."""
    names = list(known)

    def read(text: str) -> list[str]:
        wanted = text.split(",")
        if unknown := [name for name in wanted if name not in names]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(names)}")
        return [name for name in names if name in wanted]

    return read


def is_root(tool: str) -> bool:
    if os.geteuid() == 0:
        return True
    print(f"{tool}: needs root: these figures are for sandbox tier A", file=sys.stderr)
    return False
