"""A benchmark as a Markdown page."""

from pathlib import Path

from loadtest.bench.figures import TARGET, Figures, Results
from loadtest.support.results import Spread, about_table, markdown

COLUMNS = [
    *("mix", "arm", "calls/s", "low…high", "CPU ms/call", "low…high", "load's CPU"),
    *("x spawn", "low…high", "x by CPU", "call p50", "call p95"),
]
MISMATCHES_SHOWN = 10


def _row(figures: Figures) -> list[str]:
    counted = figures.arm != TARGET  # nobody counts the CPU time of a target
    return [
        figures.mix,
        figures.arm,
        f"{figures.calls_per_s.median:.1f}",
        _range(figures.calls_per_s, 0),
        f"{figures.cpu_ms.median:.2f}" if counted else "",
        _range(figures.cpu_ms, 1) if counted else "",
        f"{figures.load_cpu_ms.median:.2f}" if figures.load_cpu_ms.median else "",
        f"{figures.times_spawn.median:.1f}" if figures.times_spawn else "",
        _range(figures.times_spawn, 1) if figures.times_spawn else "",
        f"{figures.times_spawn_by_cpu.median:.1f}" if figures.times_spawn_by_cpu and counted else "",
        f"{figures.latency_p50_s:.3f} s",
        f"{figures.latency_p95_s:.3f} s",
    ]


def _range(spread: Spread, digits: int) -> str:
    return f"{spread.low:.{digits}f}…{spread.high:.{digits}f}"


def _checks(results: Results) -> str:
    busiest = max((run.others_share for run in results.runs), default=0.0)
    wrong = f"{len(results.mismatches)} were WRONG" if results.mismatches else "all were right"
    starved = f", {results.starved} time-outs were blamed on the busy machine" if results.starved else ""
    return (
        f"{results.checked} outcomes compared with fresh plain interpreters: {wrong}{starved}. "
        f"Other processes used up to {100 * busiest:.0f} % of the machine during a run."
        + "".join(f"\n- {words}" for words in results.mismatches[:MISMATCHES_SHOWN])
    )


def page_text(results: Results) -> str:
    about = {**results.about, "took": f"{results.duration_s:.0f} s", "workload": f"{results.workload}, seed {results.seed}"}
    about |= {name: f"`{value}`" for name, value in results.settings.items()}
    if results.idle:
        about["idle print(1), p50 / p95"] = f"{results.idle.p50_ms:.1f} / {results.idle.p95_ms:.1f} ms"
        megabytes = [f"{size / 1e6:.0f}" for size in (results.idle.pss_bytes_at_start, results.idle.pss_bytes_after_load)]
        about["idle memory (PSS), at start / after load"] = f"{' / '.join(megabytes)} MB"
    judged = [[one.words, one.wanted, one.found, "met" if one.met else "**missed**"] for one in results.targets]
    return (
        Path(__file__)
        .with_name("page.txt")
        .read_text()
        .format(
            checks=_checks(results),
            table=markdown(COLUMNS, map(_row, results.figures), 2),
            targets=markdown(["target", "wanted", "found", ""], judged, 4),
            repeats=results.repeats,
            tier=results.tier,
            slots=results.slots,
            counted_by=results.cpu_counted_by,
            about=about_table(about),
        )
    )
