"""What a measurement found: raw runs, and the figures that are drawn from them."""

from __future__ import annotations

from statistics import median

from msgspec import Struct, field


class Spread(Struct, frozen=True):
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(round(median(values), 4), round(min(values), 4), round(max(values), 4))


class RunRecord(Struct, frozen=True):
    """One arm, one mix, one repeat. `latency` as in `loadtest.agent.Outcome`."""

    mix: str
    arm: str
    repeat: int
    calls: int
    wall_s: float
    cpu_s: float
    load_cpu_s: float
    others_share: float
    latency_p50_s: float
    latency_p95_s: float
    statuses: dict[str, int]

    @property
    def calls_per_s(self) -> float:
        return self.calls / self.wall_s

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_s / self.calls

    @property
    def load_cpu_ms(self) -> float:
        return 1000 * self.load_cpu_s / self.calls


class Figures(Struct, frozen=True):
    """One arm with one mix, over all repeats. Ratios are taken within each repeat."""

    mix: str
    arm: str
    calls_per_s: Spread
    cpu_ms: Spread
    load_cpu_ms: Spread
    times_spawn: Spread | None  # by calls/s
    times_spawn_by_cpu: Spread | None  # by CPU time per call, which other users of the machine hardly touch
    cpu_ms_over_zygote: Spread | None


class Idle(Struct, frozen=True):
    """The service with nothing else to do: `print(1)` through /v1/run, one after the other; memory of all its processes."""

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
    started: str
    commit: str
    command: str
    machine: dict[str, str]
    workload: str
    seed: int
    repeats: int
    cpu_counted_by: str
    tier: str
    slots: int
    settings: dict[str, str]  # EXEC_* of the environment
    duration_s: float = 0.0
    checked: int = 0
    starved: int = 0  # endless programs whose time-out was blamed on the machine, because others used it
    mismatches: list[str] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    idle: Idle | None = None
    runs: list[RunRecord] = field(default_factory=list)

    def figures_of(self, mix: str, arm: str) -> Figures | None:
        return next((one for one in self.figures if one.mix == mix and one.arm == arm), None)


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summarise(runs: list[RunRecord]) -> list[Figures]:
    pairs = dict.fromkeys((run.mix, run.arm) for run in runs)
    return [_figures(mix, arm, runs) for mix, arm in pairs]


def _figures(mix: str, arm: str, runs: list[RunRecord]) -> Figures:
    own = _by_repeat(runs, mix, arm)
    spawn, zygote = _by_repeat(runs, mix, "spawn"), _by_repeat(runs, mix, "zygote")
    over_spawn = [(run, spawn[repeat]) for repeat, run in own.items() if repeat in spawn]
    over_zygote = [run.cpu_ms - zygote[repeat].cpu_ms for repeat, run in own.items() if repeat in zygote and arm == "http"]
    return Figures(
        mix,
        arm,
        Spread.of([run.calls_per_s for run in own.values()]),
        Spread.of([run.cpu_ms for run in own.values()]),
        Spread.of([run.load_cpu_ms for run in own.values()]),
        Spread.of([run.calls_per_s / base.calls_per_s for run, base in over_spawn]) if over_spawn else None,
        Spread.of([base.cpu_ms / run.cpu_ms for run, base in over_spawn]) if over_spawn else None,
        Spread.of(over_zygote) if over_zygote else None,
    )


def _by_repeat(runs: list[RunRecord], mix: str, arm: str) -> dict[int, RunRecord]:
    return {run.repeat: run for run in runs if (run.mix, run.arm) == (mix, arm)}


TIMES_SPAWN = {"rollout": 30.0, "std": 6.0}
BESIDE = {  # an arm -> the one that it is compared with, and how much of its calls/s it must reach
    "redis": ("http", 0.9),
    "run_code": ("run", 0.8),  # a route for other clients, beside our own of the same shape
    "long-batch": ("batch", 0.8),
}
HTTP_OVER_ZYGOTE_MS, IDLE_P50_MS, IDLE_PSS_MB = 1.0, 10.0, 600.0


def judge(results: Results) -> list[Target]:
    """What was promised beside what was found. A part that was not measured is not listed."""
    targets = []
    for mix, wanted in TIMES_SPAWN.items():
        http = results.figures_of(mix, "http")
        if http and http.times_spawn:
            found = http.times_spawn.median
            targets.append(Target(f"{mix}: http against spawn, calls/s", f"≥ {wanted:g} x", f"{found:.1f} x", found >= wanted))
    for mix in TIMES_SPAWN:
        http = results.figures_of(mix, "http")
        if http and http.cpu_ms_over_zygote:
            over = http.cpu_ms_over_zygote.median
            words = f"{mix}: CPU per call, http minus zygote"
            targets.append(Target(words, f"≤ {HTTP_OVER_ZYGOTE_MS:g} ms", f"{over:+.2f} ms", over <= HTTP_OVER_ZYGOTE_MS))
    for mix in TIMES_SPAWN:
        for arm, (other, wanted) in BESIDE.items():
            mine, ours = _by_repeat(results.runs, mix, arm), _by_repeat(results.runs, mix, other)
            if shares := [run.calls_per_s / ours[repeat].calls_per_s for repeat, run in mine.items() if repeat in ours]:
                share = median(shares)
                words = f"{mix}: {arm} against {other}, calls/s"
                targets.append(Target(words, f"≥ {wanted:g} x", f"{share:.2f} x", share >= wanted))
    if results.idle:
        p50, pss_mb = results.idle.p50_ms, max(results.idle.pss_bytes_at_start, results.idle.pss_bytes_after_load) / 1e6
        targets.append(
            Target("idle: print(1) through /v1/run, p50", f"≤ {IDLE_P50_MS:g} ms", f"{p50:.1f} ms", p50 <= IDLE_P50_MS)
        )
        targets.append(Target("idle: memory, PSS", f"≤ {IDLE_PSS_MB:g} MB", f"{pss_mb:.0f} MB", pss_mb <= IDLE_PSS_MB))
        targets.append(Target("sandbox tier", "A", results.tier, results.tier == "A"))
    return targets
