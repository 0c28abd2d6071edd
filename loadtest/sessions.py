"""How fast sessions are: `python -m loadtest.sessions`, as root, against a service that it starts itself.

    cell      a cell `x += 1` in a live session, over HTTP, one after the other
    fork      a fork of a session that holds 200 MB of numpy arrays, over HTTP, until it could run its first cell
    rollout   20 turns through a session, and by replaying the whole history at each turn
    idle      idle `math` sessions: what all of their processes take, each shared page divided by those who share it (PSS)

The rollout's turns are what a model writes when it works on data: one loads and fits, the others look at it. Both ways have to
print the same at each turn; a difference makes the exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from exec_client import AsyncClient, Limits
from loadtest import facts
from loadtest.results import percentile

ROOT = Path(__file__).parents[1]
DEFAULT_JSON = ROOT / "docs" / "results" / "sessions.json"
TURNS = 20
ARRAYS_MB = 200
SETUP = """
import numpy as np
rng = np.random.default_rng(7)
x = rng.normal(size=(4000, 40))
y = x @ np.arange(40) + rng.normal(size=4000)
"""
TURN = """
for k in range(6):
    weights = np.linalg.lstsq(x[: 3000 + 40 * {turn}], y[: 3000 + 40 * {turn}], rcond=None)[0]
    residual = y - x @ weights
history = [*globals().get("history", []), float(np.round((residual ** 2).mean(), 6))]
print({turn}, history[-1])
"""


def turns() -> list[str]:
    return [SETUP + TURN.format(turn=0), *(TURN.format(turn=turn) for turn in range(1, TURNS))]


async def measure_cells(client: AsyncClient, count: int) -> dict[str, float]:
    async with client.session() as session:
        await session.run("x = 0")
        took = []
        for _ in range(count):
            began = time.perf_counter()
            await session.run("x += 1")
            took.append(1000 * (time.perf_counter() - began))
        assert (await session.run("x")).value == str(count)
    return in_ms(took)


async def measure_forks(client: AsyncClient, count: int) -> dict[str, float]:
    async with client.session(profile="numpy", limits=Limits(memory_mb=1024)) as session:
        await session.run(f"import numpy as np\na = [np.ones(1 << 17) for _ in range({ARRAYS_MB})]")
        took, first = [], []
        for _ in range(count):
            began = time.perf_counter()
            (fork,) = await session.fork()
            took.append(1000 * (time.perf_counter() - began))
            assert (await fork.run("len(a)")).value == str(ARRAYS_MB)
            first.append(1000 * (time.perf_counter() - began))
            await fork.close()
    return in_ms(took) | {"with_first_cell_p50_ms": round(median(first), 3)}


async def measure_rollouts(client: AsyncClient, count: int) -> dict[str, Any]:
    """They take turns, so that whatever else happens on the machine happens to both."""
    by_session, by_replay, same = [], [], True
    for _ in range(count):
        began = time.perf_counter()
        async with client.session(profile="numpy") as session:
            printed = [(await session.run(code)).stdout for code in turns()]
        by_session.append(time.perf_counter() - began)
        began = time.perf_counter()
        replayed = []
        for turn in range(TURNS):
            result = await client.run("".join(turns()[: turn + 1]), limits=Limits(wall_s=60))
            replayed.append(result.stdout.splitlines(keepends=True)[-1])
        by_replay.append(time.perf_counter() - began)
        same = same and printed == replayed
    return {
        "turns": TURNS,
        "session_s": round(median(by_session), 4),
        "replay_s": round(median(by_replay), 4),
        "times_faster": round(median(r / s for r, s in zip(by_replay, by_session, strict=True)), 2),
        "same_output": same,
    }


async def measure_idle(client: AsyncClient, count: int, service_pid: int) -> dict[str, float]:
    before = pss_bytes(tree_of(service_pid))
    sessions = []
    try:
        began = time.perf_counter()
        for _ in range(count):
            sessions.append(await client.session(profile="math").start())
            await sessions[-1].run("import sympy\nx = sympy.symbols('x')\nsympy.integrate(x ** 2, x)")
        seconds = time.perf_counter() - began
        pids = tree_of(service_pid)
        everything = pss_bytes(pids)
        return {
            "sessions": count,
            "pss_gb": round(everything / 1e9, 3),
            "of_these_before_gb": round(before / 1e9, 3),
            "mb_per_session": round((everything - before) / 1e6 / count, 2),
            "processes": len(pids),
            "start_and_first_cell_ms": round(1000 * seconds / count, 1),
        }
    finally:
        await asyncio.gather(*(session.close() for session in sessions))


def in_ms(took: Iterable[float]) -> dict[str, float]:
    values = sorted(took)
    return {
        "count": len(values),
        "p50_ms": round(median(values), 3),
        "p95_ms": round(percentile(values, 0.95), 3),
        "low_ms": round(values[0], 3),
        "high_ms": round(values[-1], 3),
    }


def tree_of(pid: int) -> list[int]:
    try:
        children = [
            int(text) for task in Path(f"/proc/{pid}/task").iterdir() for text in (task / "children").read_text().split()
        ]
    except OSError:
        return [pid]
    return [pid, *(below for child in children for below in tree_of(child))]


def is_init_stub(pid: int) -> bool:
    """PID 1 of a program's namespace: it runs in the zygote's own memory (CLONE_VM), which would be counted twice."""
    pids = Path(f"/proc/{pid}/status").read_text().partition("\nNSpid:")[2].split("\n", 1)[0].split()
    return len(pids) > 2 and pids[-1] == "1"


def pss_bytes(pids: Iterable[int]) -> int:
    total = 0
    for pid in pids:
        try:
            if is_init_stub(pid):
                continue
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += 1024 * int(text.partition("\nPss:")[2].split()[0])
    return total


async def start_service(sessions: int) -> tuple[asyncio.subprocess.Process, str]:
    profiles = {"bare": [], "numpy": ["numpy"], "math": ["numpy", "scipy", "sympy", "mpmath"]}
    settings = {
        "EXEC_MAX_SESSIONS": str(sessions + 16),
        "EXEC_MAX_SESSIONS_PER_TENANT": str(sessions + 16),
        "EXEC_PROFILES": msgspec.json.encode(profiles).decode(),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "exec_service", "up", "--port", "0"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | settings,
    )
    assert process.stderr is not None
    async for line in process.stderr:
        if b"ready on " in line:
            return process, line.split(b"ready on ")[1].split()[0].decode()
    raise SystemExit("the service did not start")


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    process, url = await start_service(options.idle)
    try:
        async with AsyncClient(url) as client:
            tier = (await client.info()).tier
            found = {
                "cell": await measure_cells(client, options.cells),
                "fork": {"arrays_mb": ARRAYS_MB} | await measure_forks(client, options.forks),
                "rollout": await measure_rollouts(client, options.rollouts),
                "idle": await measure_idle(client, options.idle, process.pid),
            }
    finally:
        process.terminate()
        await process.communicate()
    about = {
        "at": facts.now(),
        "machine": facts.machine(),
        "tier": tier,
        "load_average_1min": round(os.getloadavg()[0], 2),
        "command": "python -m loadtest.sessions " + " ".join(sys.argv[1:]),
    }
    return {"about": about, **found}


def main() -> int:
    parser = argparse.ArgumentParser(prog="sessions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=500)
    parser.add_argument("--forks", type=int, default=40)
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--idle", type=int, default=300, help="sessions that idle at the same time")
    parser.add_argument("--json", type=Path, metavar="PATH", help=f"where to write the figures, such as {DEFAULT_JSON}")
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    text = msgspec.json.format(msgspec.json.encode(found)).decode()
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0 if found["rollout"]["same_output"] else 1


if __name__ == "__main__":
    sys.exit(main())
