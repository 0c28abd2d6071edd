"""The speed of the service beside the usual ways to run programs: `make bench`; beside another service: `make compare`.

    python -m loadtest.bench --quick
    python -m loadtest.bench --arms spawn,nsjail,http --mix rollout --target http://127.0.0.1:8088 --protocol code-judge

The arms take turns (A B C D, A B C D, …), so that other activity of the machine affects all of them. Each outcome is compared
with that of the `spawn` arm, a fresh plain interpreter; a difference is shown and makes the exit code 1. A target gets what its
own clients send: code-judge one request with all programs, SandboxFusion one request per program. Its CPU time is not counted;
give it as many cores as this machine has.
"""

import argparse
import contextlib
import os
import random
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadtest.bench.agent import STARVED, Outcome, as_shown, difference
from loadtest.bench.arms import ARMS, ENDPOINTS, Arm, ArmFailed, attach_arm, info, open_arm
from loadtest.bench.figures import TARGET, Idle, Results, draw, judge, page_text, record, summarise
from loadtest.support import meter, results, steady_load
from loadtest.support.results import EXIT_FAILED, EXIT_UNAVAILABLE, EXIT_USAGE, percentile, some_of
from loadtest.support.workload import MIXES, Program, Workload, deal
from worker.config import default_slots

MODULE = "loadtest.bench"
PAGE = "docs/results/bench.md"
SLOW_ARMS = ("spawn", "nsjail")
PROTOCOLS = {"code-judge": "long-batch", "sandboxfusion": "run_code"}  # and the agent that speaks it
IDLE_PAUSE_S = (0.005, 0.03)


class Size(NamedTuple):
    """Calls in one repeat: a slow arm runs one part of the programs, a fast one all parts, `rounds` times."""

    part: int
    rounds: int


FULL = {"rollout": Size(60, 2), "std": Size(120, 2), "slow": Size(50, 1)}
QUICK = {"rollout": Size(20, 2), "std": Size(30, 2), "slow": Size(25, 1)}


def main(argv: list[str] | None = None) -> int:
    try:
        options = parse(argv)
    except (OSError, ImportError, SyntaxError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return EXIT_USAGE
    if problem := unavailable(options):
        print(f"bench: {problem}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    try:
        found = measure(options)
    except (ArmFailed, steady_load.WrongResult) as error:
        print(f"\nbench: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    results.write_page(page_text(found, draw(found, options.page) if options.page else ""), options.page)
    results.write_json(found, options.json)
    return EXIT_FAILED if found.mismatches else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = results.parser(MODULE, __doc__)
    parser.add_argument("--quick", action="store_true", help="few calls, two repeats, no `slow` mix")
    parser.add_argument("--repeats", type=int, help="turns of each arm (default 5, with --quick 2)")
    parser.add_argument("--calls", type=int, help="of a slow arm in each repeat (default: by mix)")
    parser.add_argument("--mix", type=some_of(MIXES), help=f"of {','.join(MIXES)} (default: all)")
    parser.add_argument("--arms", type=some_of(ARMS), default=list(ARMS), help=f"of {','.join(ARMS)} (default: all)")
    parser.add_argument("--target", default="", metavar="URL", help="a running service to measure too")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="sandboxfusion", help="of the target (default %(default)s)")
    parser.add_argument("--workload", type=Path, metavar="PATH", help="another module with calls(n, seed, mix)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures as JSON")
    parser.add_argument(
        "--page", type=Path, metavar="PATH", help=f"for a Markdown page and a plot (default for a full run: {PAGE})"
    )
    given = parser.parse_args(argv)
    given.repeats = given.repeats or (2 if given.quick else 5)
    given.mix = given.mix or (["rollout", "std"] if given.quick else list(MIXES))
    given.sizes = QUICK if given.quick else FULL
    if given.calls:
        given.sizes = {mix: Size(given.calls, size.rounds) for mix, size in given.sizes.items()}
    if not (given.page or given.quick or given.calls or given.target or given.workload):
        given.page = results.ROOT / PAGE
    given.workload = Workload.from_file(given.workload) if given.workload else Workload.own()
    given.idle_calls = 40 if given.quick else 200
    given.about = results.about(MODULE, argv)
    return given


def unavailable(options: argparse.Namespace) -> str:
    """Why this cannot be measured here; empty if it can."""
    if os.geteuid() != 0 and set(options.arms) - {"spawn"}:
        return "needs root: these figures are for sandbox tier A; --arms spawn needs no root"
    if options.target:
        try:
            with urllib.request.urlopen(options.target, timeout=5):
                pass
        except urllib.error.HTTPError:
            pass  # any status is an answer
        except (OSError, ValueError) as error:
            return f"{options.target} does not answer: {error}"
    return ""


def say(words: str) -> None:
    print(f"bench: {words}", file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> Results:
    meter.remove_leftovers()
    started = time.monotonic()
    settings = {name: value for name, value in os.environ.items() if name.startswith("EXEC_")}
    found = Results(options.about, options.workload.name, options.seed, options.repeats, settings)
    names = [*options.arms, *([TARGET] if options.target else [])]
    steps = [(mix, name) for mix in options.mix for name in names if takes(agent_of(options, name), mix)]
    bench = Bench(options, found)
    with contextlib.ExitStack() as stack:
        say("starting the arms")
        for name in options.arms:
            shared = next((arm for arm in bench.arms.values() if arm.service), None) if name in ENDPOINTS else None
            bench.arms[name] = stack.enter_context(open_arm(name, shared))
        if options.target:
            bench.arms[TARGET] = stack.enter_context(attach_arm(TARGET, agent_of(options, TARGET), options.target))
        bench.look_at_idle_service()
        for repeat in range(options.repeats):
            for mix, name in steps:
                bench.turn(bench.arms[name], mix, repeat)
        bench.look_at_used_service()
        if "spawn" not in options.arms:
            bench.make_references(stack.enter_context(open_arm("spawn")))
        say("closing the arms")
    bench.compare_all()
    found.figures = summarise(found.runs)
    found.targets = judge(found)
    found.duration_s = round(time.monotonic() - started, 1)
    return found


def agent_of(options: argparse.Namespace, arm: str) -> str:
    return PROTOCOLS[options.protocol] if arm == TARGET else arm


def takes(agent: str, mix: str) -> bool:
    """code-judge's protocol has no time limit for an endless program, so single endpoints skip `slow`."""
    return not (agent in ENDPOINTS and mix == "slow")


class Bench:
    def __init__(self, options: argparse.Namespace, found: Results) -> None:
        self._options, self._results = options, found
        self.arms: dict[str, Arm] = {}
        self._parts = {mix: self._programs(mix) for mix in options.mix}
        self._references: dict[tuple[str, str], Outcome] = {}
        self._outcomes: list[tuple[str, Program, Outcome]] = []

    def _programs(self, mix: str) -> list[list[Program]]:
        """One part for each repeat; a fast arm runs all of them in every repeat."""
        options = self._options
        programs = options.workload.calls(options.sizes[mix].part * options.repeats, options.seed, mix)
        return deal(programs, options.repeats, options.seed)

    def _share(self, arm: Arm, mix: str, repeat: int) -> list[Program]:
        parts = self._parts[mix]
        if arm.name in (*SLOW_ARMS, TARGET):
            return parts[repeat]
        chosen = parts[repeat : repeat + 1] if arm.name in ENDPOINTS else parts
        everything: list[Program] = [program for part in chosen for program in part] * self._options.sizes[mix].rounds
        random.Random(f"{mix} {repeat}").shuffle(everything)
        return everything

    def turn(self, arm: Arm, mix: str, repeat: int) -> None:
        programs = self._share(arm, mix, repeat)
        run = arm.run(programs, default_slots())
        self._results.cpu_counted_by = arm.counted_by
        self._results.runs.append(record(mix, arm.name, repeat, run))
        self._keep(arm.name, programs, run.outcomes)
        words = f"{mix} {arm.name}: {run.calls_per_s:.1f} calls/s, {run.cpu_ms:.2f} ms of CPU per call"
        say(f"repeat {repeat + 1} of {self._options.repeats}, {words}")

    def _keep(self, arm: str, programs: list[Program], outcomes: list[Outcome]) -> None:
        pairs = zip(programs, outcomes, strict=True)
        if arm == "spawn":
            self._references |= {(program.code, program.stdin): outcome for program, outcome in pairs}
        else:
            self._outcomes += [(arm, program, outcome) for program, outcome in pairs]

    def make_references(self, spawn: Arm) -> None:
        for mix, parts in self._parts.items():
            say(f"reference outcomes of {mix}")
            programs = [program for part in parts for program in part]
            self._keep("spawn", programs, spawn.run(programs, default_slots()).outcomes)

    def compare_all(self) -> None:
        for arm, program, outcome in self._outcomes:
            reference = self._references[program.code, program.stdin]
            if reference.status == "timeout" and outcome.status == STARVED:
                self._results.starved += 1
            elif words := difference(as_shown(agent_of(self._options, arm), reference, outcome), outcome):
                self._results.mismatches.append(f"{arm}: {program.kind} {program.name}: {words}")
        self._results.checked = len(self._outcomes)

    def look_at_idle_service(self) -> None:
        if "http" not in self.arms:
            return
        service = self.arms["http"]
        about = info(service.url)
        self._results.tier, self._results.slots = about["tier"], about["slots"]
        time.sleep(1.0)
        pss_bytes = meter.pss_bytes(service.service_pid)
        say(f"{self._options.idle_calls} times print(1) through /v1/run")
        latencies_ms = time_idle_calls(service.url, self._options.idle_calls)
        p50_ms, p95_ms = (round(percentile(latencies_ms, share), 3) for share in (0.5, 0.95))
        self._results.idle = Idle([round(one, 3) for one in latencies_ms], p50_ms, p95_ms, pss_bytes, 0)

    def look_at_used_service(self) -> None:
        if self._results.idle:
            time.sleep(1.0)
            pss_bytes = meter.pss_bytes(self.arms["http"].service_pid)
            self._results.idle = msgspec.structs.replace(self._results.idle, pss_bytes_after_load=pss_bytes)


def time_idle_calls(url: str, count: int) -> list[float]:
    """Milliseconds of `print(1)`, one after the other with short pauses."""
    pauses, latencies_ms = random.Random(0), []
    with contextlib.closing(steady_load.time_single_calls(url, steady_load.Program("print(1)", "1\n"))) as calls:
        for _ in range(count):
            time.sleep(pauses.uniform(*IDLE_PAUSE_S))
            latencies_ms.append(next(calls))
    return latencies_ms


if __name__ == "__main__":
    sys.exit(main())
