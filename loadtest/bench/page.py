"""Results for people: a table on the terminal, a page and a picture beside the raw JSON."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import TextIO

from loadtest.results import Figures, Results, Spread
from worker.config import default_packages
from worker.sandbox.jail import interpreter

COLUMNS = ["mix", "arm", "calls/s", "low…high", "CPU ms/call", "low…high", "load's CPU", "x spawn", "low…high", "x by CPU"]
MISMATCHES_SHOWN = 10


def _rows(results: Results) -> list[list[str]]:
    return [_row(figures) for figures in results.figures]


def _row(figures: Figures) -> list[str]:
    return [
        figures.mix,
        figures.arm,
        f"{figures.calls_per_s.median:.1f}",
        _range(figures.calls_per_s, 0),
        f"{figures.cpu_ms.median:.2f}",
        _range(figures.cpu_ms, 1),
        f"{figures.load_cpu_ms.median:.2f}" if figures.load_cpu_ms.median else "",
        f"{figures.times_spawn.median:.1f}" if figures.times_spawn else "",
        _range(figures.times_spawn, 1) if figures.times_spawn else "",
        f"{figures.times_spawn_by_cpu.median:.1f}" if figures.times_spawn_by_cpu else "",
    ]


def _range(spread: Spread, digits: int) -> str:
    return f"{spread.low:.{digits}f}…{spread.high:.{digits}f}"


def print_table(results: Results, stream: TextIO) -> None:
    rows = _rows(results)
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    previous = ""
    for row in [COLUMNS, *rows]:
        if previous and row[0] != previous:
            print(file=stream)
        previous = row[0]
        cells = [
            cell.ljust(width) if at < 2 else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip(), file=stream)
    print(file=stream)
    for target in results.targets:
        print(f"  {_mark(target.met, stream)}  {target.words}: {target.found} (wanted {target.wanted})", file=stream)
    print(f"\n{_honesty(results)}", file=stream)
    for words in results.mismatches[:MISMATCHES_SHOWN]:
        print(f"  {words}", file=stream)


def _mark(met: bool, stream: TextIO) -> str:
    word = "met   " if met else "MISSED"
    return f"\033[{32 if met else 31}m{word}\033[0m" if stream.isatty() else word


def _honesty(results: Results) -> str:
    busiest = max((run.others_share for run in results.runs), default=0.0)
    wrong = f"{len(results.mismatches)} were WRONG" if results.mismatches else "all were right"
    starved = f", {results.starved} time-outs were blamed on the busy machine" if results.starved else ""
    return (
        f"{results.checked} outcomes compared with fresh plain interpreters: {wrong}{starved}. "
        f"Other processes used up to {100 * busiest:.0f} % of the machine during a run."
    )


PAGE = """# Speed

{honesty}

| {head} |
| {rule} |
{rows}

| target | wanted | found | |
| --- | --- | --- | --- |
{targets}

![Calls per second, CPU time per call, idle latency]({picture})

Median over {repeats} repeats in which the arms take turns, with the lowest and highest. `spawn`: a fresh interpreter per call.
`nsjail`: a fresh nsjail and interpreter per call. `zygote`: the worker's pool alone. `http`: the whole service through
`/v1/batch`, tier {tier}, {slots} slots. `redis`: the same, but gateway, Redis and worker in processes of their own. `run`,
`run_code`, `batch` and `long-batch`: plain requests to `/v1/run`, SandboxFusion's `/run_code`, `/v1/batch` and code-judge's
`/run/long-batch`. All arms run the same programs, `spawn`, `nsjail` and those of single routes a part of them with the same
composition. CPU time is that of all processes of an arm ({counted_by}), the load generator of what goes through HTTP apart.
When others use the machine at the same time, calls/s suffer, and the columns by CPU time are the ones to trust.

Every call really runs and every outcome is compared with that of a fresh plain interpreter in the same run: status, output,
and the last line of a traceback. Nothing is cached, and no interpreter is warmed up with these programs. Programs that never
end (2 % of `slow`) are stopped after one second.

| | |
| --- | --- |
{facts}
"""


def page_text(results: Results, picture: str) -> str:
    facts = {
        **results.machine,
        "commit": results.commit,
        "command": f"`{results.command}`",
        "started": results.started,
        "took": f"{results.duration_s:.0f} s",
        "workload": f"{results.workload}, seed {results.seed}",
        **{name: f"`{value}`" for name, value in results.settings.items()},
    }
    if results.idle:
        facts["idle print(1), p50 / p95"] = f"{results.idle.p50_ms:.1f} / {results.idle.p95_ms:.1f} ms"
        megabytes = [f"{size / 1e6:.0f}" for size in (results.idle.pss_bytes_at_start, results.idle.pss_bytes_after_load)]
        facts["idle memory (PSS), at start / after load"] = f"{' / '.join(megabytes)} MB"
    return PAGE.format(
        honesty=_honesty(results),
        head=" | ".join(COLUMNS),
        rule=" | ".join(["---"] * 2 + ["---:"] * (len(COLUMNS) - 2)),
        rows="\n".join(f"| {' | '.join(row)} |" for row in _rows(results)),
        targets="\n".join(
            f"| {t.words} | {t.wanted} | {t.found} | {'met' if t.met else '**missed**'} |" for t in results.targets
        ),
        picture=picture,
        repeats=results.repeats,
        tier=results.tier,
        slots=results.slots,
        counted_by=results.cpu_counted_by,
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
    )


def draw(json_file: Path, picture: Path) -> str:
    """The plot, by an interpreter that has matplotlib: the one for programs. Words if it did not work."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {"PATH": os.defpath, "PYTHONPATH": default_packages(), "MPLBACKEND": "Agg", "MPLCONFIGDIR": scratch}
        command = [interpreter(), str(Path(__file__).with_name("plot.py")), str(json_file), str(picture)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
