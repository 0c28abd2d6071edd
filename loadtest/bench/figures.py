"""The results of a benchmark: its runs, the figures computed from them, the targets, a Markdown page and a plot."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from msgspec import Struct, field

from loadtest.bench.arms import Run
from loadtest.support.results import Spread, about_table, fill_page, markdown, percentile

TARGET = "target"  # the arm of a service that is not ours


class RunRecord(Struct, frozen=True):
    """One arm, one mix, one repeat."""

    mix: str
    arm: str
    repeat: int
    calls: int
    calls_per_s: float
    cpu_ms: float  # per call
    load_cpu_ms: float
    others_share: float
    latency_p50_s: float
    latency_p95_s: float


def record(mix: str, arm: str, repeat: int, run: Run) -> RunRecord:
    count, latencies_s = len(run.outcomes), [outcome.latency_s for outcome in run.outcomes]
    p50_s, p95_s = (percentile(latencies_s, share) for share in (0.5, 0.95))
    load_cpu_ms = 1000 * run.load_cpu_s / count
    return RunRecord(mix, arm, repeat, count, run.calls_per_s, run.cpu_ms, load_cpu_ms, run.others_share, p50_s, p95_s)


class Figures(Struct, frozen=True):
    """One arm with one mix, over all repeats. Ratios are taken within each repeat."""

    mix: str
    arm: str
    calls_per_s: Spread
    cpu_ms: Spread
    load_cpu_ms: Spread
    latency_p50_s: float  # the median of the repeats
    latency_p95_s: float
    times_spawn: Spread | None  # by calls/s
    times_spawn_by_cpu: Spread | None  # by CPU time per call, which other users of the machine hardly affect


class Idle(Struct, frozen=True):
    """The unloaded service: `print(1)` through /v1/run, one after the other; memory of all its processes."""

    latencies_ms: list[float]
    p50_ms: float
    p95_ms: float
    pss_bytes_at_start: int
    pss_bytes_after_load: int


class Target(Struct, frozen=True):
    words: str
    wanted: str
    found: str
    met: bool


class Results(Struct):
    about: dict[str, str]
    workload: str
    seed: int
    repeats: int
    settings: dict[str, str]  # EXEC_* of the environment
    cpu_counted_by: str = ""
    tier: str = ""
    slots: int = 0
    duration_s: float = 0.0
    checked: int = 0
    starved: int = 0  # time-outs of endless programs blamed on the machine, which other processes used
    mismatches: list[str] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    idle: Idle | None = None
    runs: list[RunRecord] = field(default_factory=list)

    def figures_of(self, mix: str, arm: str) -> Figures | None:
        return next((one for one in self.figures if one.mix == mix and one.arm == arm), None)


def summarise(runs: list[RunRecord]) -> list[Figures]:
    pairs = dict.fromkeys((run.mix, run.arm) for run in runs)
    return [_figures(mix, arm, runs) for mix, arm in pairs]


def _figures(mix: str, arm: str, runs: list[RunRecord]) -> Figures:
    own = _by_repeat(runs, mix, arm)
    spawn = _by_repeat(runs, mix, "spawn")
    over_spawn = [(run, spawn[repeat]) for repeat, run in own.items() if repeat in spawn]
    return Figures(
        mix,
        arm,
        Spread.of([run.calls_per_s for run in own.values()]),
        Spread.of([run.cpu_ms for run in own.values()]),
        Spread.of([run.load_cpu_ms for run in own.values()]),
        median(run.latency_p50_s for run in own.values()),
        median(run.latency_p95_s for run in own.values()),
        Spread.of([run.calls_per_s / base.calls_per_s for run, base in over_spawn]) if over_spawn else None,
        Spread.of([base.cpu_ms / run.cpu_ms for run, base in over_spawn]) if over_spawn else None,
    )


def _by_repeat(runs: list[RunRecord], mix: str, arm: str) -> dict[int, RunRecord]:
    return {run.repeat: run for run in runs if (run.mix, run.arm) == (mix, arm)}


TIMES_SPAWN = {"rollout": 45.0, "std": 9.0}
BESIDE = {  # arm -> the arm it is compared with, and the share of its calls/s that it must reach in each mix
    "http": ("zygote", {"rollout": 0.95, "std": 0.9}),
    "redis": ("http", {"rollout": 0.95, "std": 0.95}),
    "run_code": ("run", {"rollout": 0.8, "std": 0.8}),  # an adapter's endpoint beside our own endpoint of the same shape
    "long-batch": ("batch", {"rollout": 0.8, "std": 0.8}),
}
IDLE_P50_MS, IDLE_PSS_MB = 2.5, 600.0


def judge(results: Results) -> list[Target]:
    """The targets beside what was measured. What was not measured is not listed."""
    return [*_of_http(results), *_beside_others(results), *_idle(results)]


def _of_http(results: Results) -> Iterator[Target]:
    for mix, wanted in TIMES_SPAWN.items():
        http = results.figures_of(mix, "http")
        if http and http.times_spawn:
            found = http.times_spawn.median
            yield Target(f"{mix}: http against spawn, calls/s", f"≥ {wanted:g} x", f"{found:.1f} x", found >= wanted)


def _beside_others(results: Results) -> Iterator[Target]:
    for mix in TIMES_SPAWN:
        for arm, (other, shares_wanted) in BESIDE.items():
            wanted = shares_wanted[mix]
            mine, ours = _by_repeat(results.runs, mix, arm), _by_repeat(results.runs, mix, other)
            if shares := [run.calls_per_s / ours[repeat].calls_per_s for repeat, run in mine.items() if repeat in ours]:
                share = median(shares)
                yield Target(f"{mix}: {arm} against {other}, calls/s", f"≥ {wanted:g} x", f"{share:.2f} x", share >= wanted)


def _idle(results: Results) -> Iterator[Target]:
    if results.idle is None:
        return
    p50, pss_mb = results.idle.p50_ms, max(results.idle.pss_bytes_at_start, results.idle.pss_bytes_after_load) / 1e6
    yield Target("idle: print(1) through /v1/run, p50", f"≤ {IDLE_P50_MS:g} ms", f"{p50:.1f} ms", p50 <= IDLE_P50_MS)
    yield Target("idle: memory, PSS", f"≤ {IDLE_PSS_MB:g} MB", f"{pss_mb:.0f} MB", pss_mb <= IDLE_PSS_MB)
    yield Target("sandbox tier", "A", results.tier, results.tier == "A")


COLUMNS = [
    *("mix", "arm", "calls/s", "low…high", "CPU ms/call", "low…high", "load's CPU"),
    *("x spawn", "low…high", "x by CPU", "call p50", "call p95"),
]
MISMATCHES_SHOWN = 10


def _row(figures: Figures) -> list[str]:
    counted = figures.arm != TARGET  # nobody counts the CPU time of a target
    speed, cpu, load, times = figures.calls_per_s, figures.cpu_ms, figures.load_cpu_ms.median, figures.times_spawn
    cells = [figures.mix, figures.arm, f"{speed.median:.1f}", _range(speed, 0)]
    cells += [f"{cpu.median:.2f}", _range(cpu, 1)] if counted else ["", ""]
    cells += [f"{load:.2f}" if load else "", *([f"{times.median:.1f}", _range(times, 1)] if times else ["", ""])]
    cells.append(f"{figures.times_spawn_by_cpu.median:.1f}" if figures.times_spawn_by_cpu and counted else "")
    return [*cells, f"{figures.latency_p50_s:.3f} s", f"{figures.latency_p95_s:.3f} s"]


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


def page_text(results: Results, plot: str = "") -> str:
    about = {**results.about, "took": f"{results.duration_s:.0f} s", "workload": f"{results.workload}, seed {results.seed}"}
    about |= {name: f"`{value}`" for name, value in results.settings.items()}
    if results.idle:
        about["idle print(1), p50 / p95"] = f"{results.idle.p50_ms:.1f} / {results.idle.p95_ms:.1f} ms"
        megabytes = [f"{size / 1e6:.0f}" for size in (results.idle.pss_bytes_at_start, results.idle.pss_bytes_after_load)]
        about["idle memory (PSS), at start / after load"] = f"{' / '.join(megabytes)} MB"
    judged = [[one.words, one.wanted, one.found, "met" if one.met else "**missed**"] for one in results.targets]
    return fill_page(
        __file__,
        workload=results.workload,
        checks=_checks(results),
        table=markdown(COLUMNS, map(_row, results.figures), 2),
        targets=markdown(["target", "wanted", "found", ""], judged, 4),
        plot=f"![Calls per second and CPU time per call, by mix and arm]({plot})\n\n" if plot else "",
        repeats=results.repeats,
        tier=results.tier,
        slots=results.slots,
        counted_by=results.cpu_counted_by,
        about=about_table(about),
    )


def draw(results: Results, page: Path) -> str:
    """Plot calls/s and CPU time beside the page; the name of the file, empty without matplotlib (the extra `trainer`)."""
    if not importlib.util.find_spec("matplotlib"):
        return ""
    from matplotlib.figure import Figure

    counted = [one for one in results.figures if one.arm != TARGET]
    panels = {"calls/s": [one.calls_per_s for one in counted], "CPU ms per call": [one.cpu_ms for one in counted]}
    figure = Figure(figsize=(11, 1.2 + 0.3 * len(counted)), layout="constrained")
    for axis, (title, spreads) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        medians = [one.median for one in spreads]
        around = [one.median - one.low for one in spreads], [one.high - one.median for one in spreads]
        bars = axis.barh([f"{one.mix} {one.arm}" for one in counted], medians, xerr=around)
        axis.bar_label(bars, fmt="%.1f", padding=3)
        axis.set(title=title, xscale="log", xlim=(1, 3 * max(medians)))
    axis.invert_yaxis()
    file = page.with_suffix(".png")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    return file.name
