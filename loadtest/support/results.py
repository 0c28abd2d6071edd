"""Where and when something was measured."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from worker.config import usable_cores

ROOT = Path(__file__).parents[1]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def machine() -> dict[str, str]:
    models = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    memory_kb = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": str(usable_cores()),
        "memory": f"{memory_kb / 1e6:.0f} GB",
        "kernel": platform.release(),
        "Python": platform.python_version(),
    }


def commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    try:
        changed = bool(git("status", "--porcelain", "--untracked-files=no"))
        return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")
    except FileNotFoundError:
        return "unknown"
