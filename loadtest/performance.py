"""The report: `make report`, or `python -m loadtest.performance --help`. About 12 minutes on two idle cores; needs root.

Each section is measured by itself and kept as JSON in docs/results/performance; the page docs/results/performance.md and its
pictures are made from what is there. So a section can be measured again alone (`--only recovery`), and the page made anew
without measuring (`--render`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from loadtest import bench, burst, calibrate, experiments, facts, plan, redis_server, soak
from loadtest.burst import BurstResults
from loadtest.calibrate import Calibration, fitted_words, in_words, validation_table
from loadtest.experiments import Recovery, Scaling, Step
from loadtest.parts import end_in_order
from loadtest.plan import Plan, Planner
from loadtest.results import Results
from worker.config import default_packages, usable_cores
from worker.sandbox.jail import interpreter

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "results" / "performance"
PAGE = ROOT / "docs" / "results" / "performance.md"
PLOT = Path(__file__).with_name("performance_plot.py")
BURST_SIZES = (1000, 5000, 15_000, 45_000)
QUICK_BURST_SIZES = (500, 2000)
SANDBOX_BURST = 1000
EXIT_USAGE = 2

T = TypeVar("T", bound=Struct)
Say = Callable[[str], None]


# -- measuring ----------------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """How a section is measured."""

    command: str
    say: Say
    quick: bool
    folder: Path


def speed(run: Run) -> Results:
    words = ["--quick"] if run.quick else ["--repeats", "3"]
    run.say("every arm in turn, see below")
    found = asyncio.run(bench.measure(bench.parse([*words, "--arms", "spawn,nsjail,zygote,http,redis"])))
    found.command = run.command
    return found


def calibration(run: Run) -> Calibration:
    seconds = 3.0 if run.quick else calibrate.VALIDATE_S
    return calibrate.run("rollout", quick=run.quick, seconds=seconds, command=run.command, loads=calibrate.LOADS, say=run.say)


def planned(run: Run) -> Plan:
    """For the number that everybody asks about, with what was just calibrated."""
    calibrated = load(run.folder, "calibration", Calibration)
    if calibrated is None:
        raise SystemExit("report: plan needs the section calibration")
    calls = 2000 if run.quick else 45_000
    run.say(f"simulating {calls:,} calls")
    return Planner(calibrated, plan.Ask(calls, 0.3, calibrated.mix, 60.0, 6, 5.0, 16)).plan()


def bursts(run: Run) -> BurstResults:
    found = BurstResults(facts.now(), facts.commit(), run.command, facts.machine(), redis_server.version(), [])
    for size in QUICK_BURST_SIZES if run.quick else BURST_SIZES:
        for transport in burst.TRANSPORTS:
            run.say(f"{size:,} calls in flight over {transport}, the path alone")
            found.bursts.append(burst.burst(size, transport=transport, sandboxed=False))
    run.say(f"{SANDBOX_BURST:,} calls in flight, in sandboxes")
    found.bursts.append(burst.burst(SANDBOX_BURST, sandboxed=True))
    return found


def scaling(run: Run) -> Scaling:
    return experiments.scaling(run.command, run.say)


def recovery(run: Run) -> Recovery:
    return experiments.recovery(run.command, run.say)


SECTIONS: dict[str, Callable[[Run], Struct]] = {
    "speed": speed,
    "calibration": calibration,
    "plan": planned,
    "bursts": bursts,
    "scaling": scaling,
    "recovery": recovery,
}


class Progress:
    def __init__(self, names: list[str]) -> None:
        self._names, self._began = names, time.monotonic()

    def of(self, name: str) -> Say:
        place = f"{self._names.index(name) + 1}/{len(self._names)}"

        def say(words: str) -> None:
            print(f"report [{place} {name}, {time.monotonic() - self._began:.0f} s] {words}", file=sys.stderr, flush=True)

        return say


def measure(names: list[str], folder: Path, *, quick: bool) -> None:
    progress = Progress(names)
    for name in names:
        say, began = progress.of(name), time.monotonic()
        command = f"python -m loadtest.performance --only {name}{' --quick' if quick else ''}"
        found = SECTIONS[name](Run(command, say, quick, folder))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        say(f"done in {time.monotonic() - began:.0f} s")


# -- the page -----------------------------------------------------------------------------------------------------------------


def load(folder: Path, name: str, kind: type[T]) -> T | None:
    file = folder / f"{name}.json"
    return msgspec.json.decode(file.read_bytes(), type=kind) if file.exists() else None


def markdown(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def source(found: Results | Calibration | BurstResults | Scaling | Recovery) -> str:
    machine = found.machine
    words = ", ".join(
        f"{machine[name]}{unit}" for name, unit in (("cpu", ""), ("cores", " cores"), ("memory", ""), ("kernel", ""))
    )
    return f"`{found.command}` · {found.started} · commit {found.commit} · {words}"


def speed_words(found: Results) -> str:
    cores = int(found.machine["cores"])
    rows = []
    for one in found.figures:
        per_s, cpu = one.calls_per_s, one.cpu_ms
        times = one.times_spawn
        rows.append(
            [
                one.mix,
                one.arm,
                f"{per_s.median / cores:.1f}",
                f"{per_s.low / cores:.1f}…{per_s.high / cores:.1f}",
                f"{1000 / cpu.median:.1f}",
                f"{1000 / cpu.high:.1f}…{1000 / cpu.low:.1f}",
                f"{times.median:.1f}" if times else "",
                f"{times.low:.1f}…{times.high:.1f}" if times else "",
            ]
        )
    head = ["mix", "", "calls/s per core", "low…high", "calls per core-second of CPU", "low…high", "x spawn", "low…high"]
    idle = found.idle
    alone = f"A lonely `print(1)` takes {idle.p50_ms:.1f} ms at p50, {idle.p95_ms:.1f} ms at p95. " if idle else ""
    wrong = f"{len(found.mismatches)} WRONG" if found.mismatches else "none wrong"
    return f"""## Throughput per core

`spawn`: a fresh interpreter per call, the usual way; `nsjail`: the same in a fresh nsjail; `zygote`: the worker's pool alone;
`http`: `exec-service up`, tier {found.tier}; `redis`: gateway, Redis and worker as processes of their own. Median of
{found.repeats} repeats in which they take turns. The first columns divide by the cores of the machine, the load's cost in it;
the next two count the CPU time of all processes of the arm. {alone}{found.checked} outcomes compared with plain
interpreters, {wrong}.

{markdown(head, rows, 2)}

![Calls per second and core by mix](performance/speed.png)

{source(found)}
"""


def calibration_words(found: Calibration) -> str:
    per_call = ", ".join(f"{name} {value:.2f}" for name, value in found.cpu_ms.items())
    good = all(point.good for point in found.validation)
    return f"""## Latency against load, and what the planner predicts

Open loop: calls of the `{found.mix}` mix come at random moments, one request each, whatever became of the others; latency
counts from when a call was due. 100 % is what the machine can do with every slot busy: {found.capacity_per_s:.1f} calls/s in
the calibration, and measured again before each run. The runs are short, the loads take turns, and the table has the median of
each. The load is made on the same {found.cores} cores. **predicted**: by a simulation ([load.md](../load.md)) that was
calibrated with the same programs, one at a time and with every slot busy. Of these runs it is told when calls come, and how
fast the machine was around each of them, by the CPU time that the other calls' programs took and that the host of this virtual
machine took from it; so waiting and sharing are tested here, not what other programs would cost. **blind**: told the machine's
speed before each run, and no more. \
{"All within 20 %." if good else "**Not all within 20 %.**"}

{validation_table(found.validation)}

CPU ms per call at saturation: {per_call}. On an idle machine a call costs: {in_words(found.cold)}.
{fitted_words(found)} Others used up to
{100 * max([found.others_share, *(point.others_share for point in found.validation)]):.0f} % of the machine.

![Latency against load](performance/calibration.png)

{source(found)}
"""


def plan_words(found: Plan) -> str:
    ask = found.ask
    command = (
        f"python -m loadtest.plan --calls-per-step {ask.calls_per_step} --mean-latency {ask.mean_latency_s:g} --mix {ask.mix}"
    )
    return f"""## What {ask.calls_per_step:,} calls need

```text
{plan.page(found)}
```

`{command}`, a simulation with the costs above
"""


def bursts_words(found: BurstResults) -> str:
    missed = [f"{one.transport} {one.calls}: {words}" for one in found.bursts for words in one.misses()]
    memory = [
        [
            " ".join(burst.row(one)[:2]),
            f"{one.in_flight:,}",
            f"{one.gateway_bytes / 1e6:.0f} MB",
            f"{one.redis_bytes / 1e6:.1f} MB",
            f"{one.books.right:,}",
            f"{one.calls_per_s:,.0f}",
        ]
        for one in found.bursts
    ]
    fairness = [
        [
            " ".join(burst.row(one)[:2]),
            f"{one.in_flight:,}",
            str(one.other_calls),
            f"{one.other_p50_ms:.0f} ms",
            f"{one.other_p99_ms:.0f} ms",
            f"{one.other_most_ms:.0f} ms",
            f"{one.call_p50_s:.2f} s",
            f"{one.call_p99_s:.2f} s",
        ]
        for one in found.bursts
    ]
    paths = [one for one in found.bursts if one.transport == "http" and not one.sandboxed]
    small, large = min(paths, key=lambda one: one.calls), max(paths, key=lambda one: one.calls)
    each_kb = (large.gateway_bytes - small.gateway_bytes) / max(1, large.calls - small.calls) / 1e3
    verdict = f"**Missed**: {'; '.join(missed)}." if missed else "Nothing missed."
    return f"""## Memory against calls in flight

All calls are inside the gateway, by its own gauge, before the first worker comes; three processes send them. `echo`: workers
that run nothing, so that this is the path alone; `sandbox`: real programs. Peaks. From the smallest to
the largest, a call costs the gateway {each_kb:.1f} kB. {verdict}

{markdown(["", "in flight", "gateway", "Redis", "right results", "calls/s"], memory)}

![Memory against calls in flight](performance/memory.png)

## Fairness under a burst

While one tenant's burst is served, a second one makes single calls, one after the other.

{markdown(["", "in flight", "second tenant's calls", "p50", "p99", "most", "the burst's p50", "p99"], fairness)}

![The second tenant's latency](performance/fairness.png)

{source(found)}
"""


def scaling_words(found: Scaling) -> str:
    def rows(steps: list[Step]) -> list[list[str]]:
        return [
            [
                str(one.count),
                f"{one.spread.median:,.0f}",
                f"{one.spread.low:,.0f}…{one.spread.high:,.0f}",
                f"{one.ideal_per_s:,.0f}",
                f"{100 * one.spread.median / one.ideal_per_s:.0f} %",
            ]
            for one in steps
        ]

    return f"""## Scaling with workers

Workers that take {experiments.SLEEP_MS:g} ms for a call and no CPU, {experiments.SLEEP_SLOTS} slots each: what the path does
with more workers, as if they were on other machines. Gateway, Redis, the workers' own processes and the load share this one,
so this is a lower bound.

{markdown(["workers", "calls/s", "low…high", "ideal", ""], rows(found.sleeping))}

Real sandboxes, `rollout` mix, one worker; ideal is so many times one slot. The load, gateway and Redis share the cores.

{markdown(["slots", "calls/s", "low…high", "ideal", ""], rows(found.sandboxed))}

![Scaling](performance/scaling.png)

{source(found)}
"""


def recovery_words(found: Recovery) -> str:
    rows = [
        [
            f"{one.per_s:.1f}",
            str(len(one.due_s)),
            str(one.wrong),
            str(one.slow),
            f"{1000 * one.p50_before_s:.0f} ms",
            f"{1000 * one.p99_before_s:.0f} ms",
            f"{one.most_s:.1f} s",
            f"{one.usual_again_s:.1f} s",
        ]
        for one in found.runs
    ]
    head = ["calls/s", "calls", "our fault", "delayed by the kill", "p50 before", "p99 before", "longest", "usual again after"]
    return f"""## Recovery after a killed worker

Two workers with one slot each under an open-loop load of {100 * experiments.RECOVERY_LOAD:.0f} % of their capacity; one is
killed with SIGKILL, and replaced {experiments.REPLACE_AT_S - experiments.KILL_AT_S:g} s later. What it had is given to the
other when its lease has lapsed, after 6 s. Nothing is lost: calls that had no result would be in the column of our fault.

{markdown(head, rows, 0)}

![Latency of every call around the kill](performance/recovery.png)

{source(found)}
"""


HEAD = """# Performance

How to measure and read this: [load.md](../load.md). Every section names its command; its raw figures are in
[performance](performance). `make report` measures all of it, `python -m loadtest.performance --render` only writes this page.
"""


def page(folder: Path, results: Path) -> str:
    parts = [HEAD]
    if (found := load(folder, "speed", Results)) is not None:
        parts.append(speed_words(found))
    if (calibrated := load(folder, "calibration", Calibration)) is not None:
        parts.append(calibration_words(calibrated))
    if (answered := load(folder, "plan", Plan)) is not None:
        parts.append(plan_words(answered))
    if (burst_found := load(folder, "bursts", BurstResults)) is not None:
        parts.append(bursts_words(burst_found))
    if (scaled := load(folder, "scaling", Scaling)) is not None:
        parts.append(scaling_words(scaled))
    if (recovered := load(folder, "recovery", Recovery)) is not None:
        parts.append(recovery_words(recovered))
    if (results / "burst.json").exists():
        whole = msgspec.json.decode((results / "burst.json").read_bytes(), type=BurstResults)
        parts.append(f"## The burst\n\n[burst.md](burst.md) has more.\n\n{burst.table(whole.bursts)}\n\n{source(whole)}\n")
    if (soaked := load(results, "soak", soak.Soak)) is not None:
        parts.append(soak.words(soaked))
    return "\n".join(parts)


def draw(folder: Path) -> None:
    """By the interpreter for programs, which has matplotlib."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {"PATH": os.defpath, "PYTHONPATH": default_packages(), "MPLBACKEND": "Agg", "MPLCONFIGDIR": scratch}
        subprocess.run([interpreter(), str(PLOT), str(folder)], env=environment, check=True)


def render(folder: Path, page_file: Path) -> None:
    draw(folder)
    page_file.write_text(page(folder, page_file.parent))
    print(f"written: {page_file}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="SECTIONS", help=f"of {','.join(SECTIONS)} (default: all)")
    parser.add_argument("--render", action="store_true", help="measure nothing, make the page from what is there")
    parser.add_argument("--quick", action="store_true", help="a look, not a measurement")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the raw figures and pictures; the page goes beside it")
    given = parser.parse_args(argv)
    names = given.only.split(",") if given.only else list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"--only: {', '.join(unknown)} is not one of {', '.join(SECTIONS)}")
    if not given.render:
        if os.geteuid() != 0:
            print("report: these figures are for tier A, which needs root", file=sys.stderr)
            return EXIT_USAGE
        print(f"report: {', '.join(names)} on {usable_cores()} cores", file=sys.stderr)
        measure(names, given.folder, quick=given.quick)
    render(given.folder, given.folder.parent / PAGE.name)
    return 0


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
