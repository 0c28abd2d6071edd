"""How fast the service is, beside the usual ways to do the same: `make bench`, or `python -m loadtest.bench --help`.

The arms take turns (A B C D, A B C D, …), so that whatever else happens on the machine happens to all of them. Each outcome is
compared with that of the `spawn` arm, which is a fresh plain interpreter; a difference is shown and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import os
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadtest import facts, meter, report
from loadtest.agent import CUT, SHOWN_CHARS, Outcome
from loadtest.arms import ARMS, ROUTES, Arm, ArmFailed, Run, info, open_arm
from loadtest.results import Idle, Results, RunRecord, judge, percentile, summarise
from loadtest.workload import MIXES, Program, Workload, deal
from worker.config import default_slots as programs_at_a_time

ROOT = Path(__file__).parents[1]
DEFAULT_JSON = ROOT / "docs" / "results" / "bench.json"
SLOW_ARMS = ("spawn", "nsjail")
EXIT_MISMATCH, EXIT_USAGE, EXIT_UNAVAILABLE = 1, 2, 69

STARVED = "timeout (infra)"  # a time-out during which the machine had no CPU to give; right on a busy machine, and counted
IDLE_CALLS, IDLE_PAUSE_S = 200, (0.005, 0.03)


class Size(NamedTuple):
    """Calls in one repeat: a slow arm runs one part of the programs, a fast one all parts, `rounds` times."""

    part: int
    rounds: int


FULL = {"rollout": Size(60, 2), "std": Size(120, 2), "slow": Size(50, 1)}
QUICK = {"rollout": Size(20, 2), "std": Size(30, 2), "slow": Size(25, 1)}


class Options(NamedTuple):
    repeats: int
    mixes: list[str]
    arms: list[str]
    sizes: dict[str, Size]
    workload: Workload
    seed: int
    json_file: Path | None
    idle_calls: int
    command: str


def main(argv: list[str] | None = None) -> int:
    try:
        options = parse(argv)
    except (OSError, ImportError, SyntaxError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return EXIT_USAGE
    if os.geteuid() != 0 and set(options.arms) - {"spawn"}:
        print("bench: these figures are for tier A, which needs root; --arms spawn needs none", file=sys.stderr)
        return EXIT_UNAVAILABLE
    try:
        results = asyncio.run(measure(options))
    except ArmFailed as error:
        print(f"\nbench: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    report.print_table(results, sys.stdout)
    if options.json_file:
        write(results, options.json_file)
    return EXIT_MISMATCH if results.mismatches else 0


def parse(argv: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few calls, two repeats, no `slow` mix; a look, not a measurement")
    parser.add_argument("--repeats", type=int, help="how often each arm has its turn (default 5, with --quick 2)")
    parser.add_argument("--mix", type=_some_of(MIXES), help=f"of {','.join(MIXES)} (default: all)")
    parser.add_argument("--arms", type=_some_of(ARMS), default=list(ARMS), help=f"of {','.join(ARMS)} (default: all)")
    parser.add_argument("--workload", type=Path, metavar="PATH", help="another module with calls(n, seed, mix)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write results, a page and a picture beside them")
    given = parser.parse_args(argv)
    whole = not (given.quick or given.workload or given.mix or given.arms != list(ARMS))
    return Options(
        repeats=given.repeats or (2 if given.quick else 5),
        mixes=given.mix or (["rollout", "std"] if given.quick else list(MIXES)),
        arms=given.arms,
        sizes=QUICK if given.quick else FULL,
        workload=Workload.from_file(given.workload) if given.workload else Workload.own(),
        seed=given.seed,
        json_file=given.json or (DEFAULT_JSON if whole else None),
        idle_calls=40 if given.quick else IDLE_CALLS,
        command=_command(sys.argv[1:] if argv is None else argv),
    )


def _some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    names = list(known)

    def read(text: str) -> list[str]:
        wanted = text.split(",")
        if unknown := [name for name in wanted if name not in names]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(names)}")
        return [name for name in names if name in wanted]

    return read


def _command(arguments: list[str]) -> str:
    """As it was given, without the folders of this machine."""
    return shlex.join(["python", "-m", "loadtest.bench", *(Path(word).name if "/" in word else word for word in arguments)])


class Progress:
    """Where we are: one line that changes on a terminal, a line per run elsewhere."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._live = sys.stderr.isatty()
        self._started = time.monotonic()

    def __call__(self, words: str, *, step: bool = False) -> None:
        self._done += step
        line = f"[{self._done}/{self._total} {time.monotonic() - self._started:.0f} s] {words}"
        print(f"\r\033[K{line}" if self._live else line, end="" if self._live else "\n", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


async def measure(options: Options) -> Results:
    meter.remove_leftovers()
    started = time.monotonic()
    turns = sum(takes(arm, mix) for arm in options.arms for mix in options.mixes)
    progress = Progress(options.repeats * turns)
    results = _blank(options)
    bench = Bench(options, results, progress)
    async with contextlib.AsyncExitStack() as stack:
        progress("starting the arms")
        for name in options.arms:
            shared = next((arm.service for arm in bench.arms.values() if arm.service), None) if name in ROUTES else None
            bench.arms[name] = await stack.enter_async_context(open_arm(name, shared))
        await bench.look_at_idle_service()
        for repeat in range(options.repeats):
            for mix in options.mixes:
                for arm in bench.arms.values():
                    if takes(arm.name, mix):
                        await bench.turn(arm, mix, repeat)
        await bench.look_at_used_service()
        if "spawn" not in options.arms:
            await bench.make_references(await stack.enter_async_context(open_arm("spawn")))
        progress("closing the arms")
    progress.clear()
    bench.compare_all()
    results.figures = summarise(results.runs)
    results.targets = judge(results)
    results.duration_s = round(time.monotonic() - started, 1)
    return results


class Bench:
    def __init__(self, options: Options, results: Results, progress: Progress) -> None:
        self._options, self._results, self._progress = options, results, progress
        self.arms: dict[str, Arm] = {}
        self._parts = {mix: self._programs(mix) for mix in options.mixes}
        self._references: dict[tuple[str, str], Outcome] = {}
        self._outcomes: list[tuple[str, Program, Outcome]] = []

    def _programs(self, mix: str) -> list[list[Program]]:
        """One part for each repeat; together they are what a fast arm runs every time."""
        options = self._options
        programs = options.workload.calls(options.sizes[mix].part * options.repeats, options.seed, mix)
        return deal(programs, options.repeats, options.seed)

    def _share(self, arm: Arm, mix: str, repeat: int) -> list[Program]:
        parts = self._parts[mix]
        if arm.name in SLOW_ARMS:
            return parts[repeat]
        chosen = parts[repeat : repeat + 1] if arm.name in ROUTES else parts
        everything = [program for part in chosen for program in part] * self._options.sizes[mix].rounds
        random.Random(f"{mix} {repeat}").shuffle(everything)
        return everything

    async def turn(self, arm: Arm, mix: str, repeat: int) -> None:
        programs = self._share(arm, mix, repeat)
        self._progress(f"repeat {repeat + 1}, {mix}: {arm.name}, {len(programs)} calls")
        run = await arm.run(programs, programs_at_a_time())
        self._results.cpu_counted_by = arm.counted_by
        self._results.runs.append(_record(mix, arm.name, repeat, run))
        self._keep(arm.name, programs, run.outcomes)
        words = f"{mix} {arm.name}: {run.calls_per_s:.1f} calls/s, {run.cpu_ms:.2f} ms of CPU a call"
        self._progress(f"repeat {repeat + 1}, {words}", step=True)

    def _keep(self, arm: str, programs: list[Program], outcomes: list[Outcome]) -> None:
        pairs = zip(programs, outcomes, strict=True)
        if arm == "spawn":
            self._references |= {(program.code, program.stdin): outcome for program, outcome in pairs}
        else:
            self._outcomes += [(arm, program, outcome) for program, outcome in pairs]

    async def make_references(self, spawn: Arm) -> None:
        for mix, parts in self._parts.items():
            self._progress(f"reference outcomes of {mix}")
            programs = [program for part in parts for program in part]
            self._keep("spawn", programs, (await spawn.run(programs, programs_at_a_time())).outcomes)

    def compare_all(self) -> None:
        for arm, program, outcome in self._outcomes:
            reference = self._references[program.code, program.stdin]
            if reference.status == "timeout" and outcome.status == STARVED:
                self._results.starved += 1
            elif words := difference(shown_by(arm, reference, outcome), outcome):
                self._results.mismatches.append(f"{arm}: {program.kind} {program.name}: {words}")
        self._results.checked = len(self._outcomes)

    async def look_at_idle_service(self) -> None:
        if "http" not in self.arms:
            return
        service = self.arms["http"]
        about = await info(service.url)
        self._results.tier, self._results.slots = about["tier"], about["slots"]
        await asyncio.sleep(1.0)
        pss_bytes = meter.pss_bytes(service.service_pid)
        self._progress(f"{self._options.idle_calls} times print(1) through /v1/run")
        latencies_ms = await asyncio.to_thread(time_idle_calls, service.url, self._options.idle_calls)
        p50_ms, p95_ms = (round(percentile(latencies_ms, share), 3) for share in (0.5, 0.95))
        self._results.idle = Idle([round(one, 3) for one in latencies_ms], p50_ms, p95_ms, pss_bytes, 0)

    async def look_at_used_service(self) -> None:
        if self._results.idle:
            await asyncio.sleep(1.0)
            pss_bytes = meter.pss_bytes(self.arms["http"].service_pid)
            self._results.idle = msgspec.structs.replace(self._results.idle, pss_bytes_after_load=pss_bytes)


def time_idle_calls(url: str, count: int) -> list[float]:
    """Milliseconds of `print(1)` through /v1/run, one after the other with small pauses."""
    pauses = random.Random(0)
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    latencies_ms = []
    with contextlib.closing(connection):
        for _ in range(count):
            time.sleep(pauses.uniform(*IDLE_PAUSE_S))
            started = time.perf_counter()
            connection.request("POST", "/v1/run", b'{"code": "print(1)"}', {"content-type": "application/json"})
            answer = connection.getresponse().read()
            latencies_ms.append(1000 * (time.perf_counter() - started))
            if msgspec.json.decode(answer).get("stdout") != "1\n":
                raise ArmFailed(f"print(1) was answered with {answer[:500]!r}")
    return latencies_ms


def takes(arm: str, mix: str) -> bool:
    """Through code-judge's route an endless program cannot be given its one second."""
    return not (arm in ROUTES and mix == "slow")


def shown_by(arm: str, reference: Outcome, outcome: Outcome) -> Outcome:
    """What the arm can show of it: code-judge cuts each stream."""
    if arm != "long-batch":
        return reference
    last_line = CUT if outcome.last_line == CUT else reference.last_line
    return msgspec.structs.replace(reference, stdout=reference.stdout[:SHOWN_CHARS], last_line=last_line)


def difference(reference: Outcome, outcome: Outcome) -> str:
    """In words, if a program did not do what it does in a plain interpreter."""
    if outcome.status != reference.status:
        return f"status {outcome.status!r} instead of {reference.status!r} ({outcome.last_line[:100]!r})"
    if reference.status == "timeout":  # a plain interpreter loses what was not flushed; how far the rest got is chance
        return "" if outcome.stdout.startswith(reference.stdout) else f"stdout {outcome.stdout[:100]!r} before the time-out"
    if outcome.stdout != reference.stdout:
        return f"stdout {outcome.stdout[:100]!r} instead of {reference.stdout[:100]!r}"
    if reference.status == "error" and outcome.last_line != reference.last_line:
        return f"traceback ends in {outcome.last_line[:100]!r} instead of {reference.last_line[:100]!r}"
    return ""


def _record(mix: str, arm: str, repeat: int, run: Run) -> RunRecord:
    latencies_s = [outcome.latency_s for outcome in run.outcomes]
    return RunRecord(
        mix,
        arm,
        repeat,
        len(run.outcomes),
        round(run.wall_s, 4),
        round(run.cpu_s, 4),
        round(run.load_cpu_s, 4),
        round(run.others_share, 3),
        round(percentile(latencies_s, 0.5), 5),
        round(percentile(latencies_s, 0.95), 5),
        dict(Counter(outcome.status for outcome in run.outcomes)),
    )


def _blank(options: Options) -> Results:
    return Results(
        started=facts.now(),
        commit=facts.commit(),
        command=options.command,
        machine=facts.machine(),
        workload=options.workload.name,
        seed=options.seed,
        repeats=options.repeats,
        cpu_counted_by="",
        tier="",
        slots=0,
        settings={name: value for name, value in os.environ.items() if name.startswith("EXEC_")},
    )


def write(results: Results, json_file: Path) -> None:
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    picture, page = json_file.with_suffix(".png"), json_file.with_suffix(".md")
    if words := report.draw(json_file, picture):
        print(f"bench: no picture: {words}", file=sys.stderr)
    page.write_text(report.page_text(results, picture.name))
    print(f"written: {', '.join(path.name for path in (json_file, page, picture))} in {json_file.parent}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
