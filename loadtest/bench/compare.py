"""Any service that speaks code-judge's or SandboxFusion's protocol, beside ours and the usual ways: `make compare`.

    python -m loadtest.compare --target http://127.0.0.1:8088 --protocol code-judge

The same programs go to the target and, in turn, to what this project ships for comparison: `spawn`, a fresh interpreter per
call, and `nsjail`, a fresh nsjail with one per call; and to our own service (`http`). Every outcome is compared with that of a
fresh plain interpreter. The target gets what its clients send: code-judge one request with all programs, SandboxFusion one
request per program, a few at a time. Where it runs, and on how many cores, is for the reader to tell; nobody counts its CPU
time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import urllib.error
import urllib.request
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct

from loadtest import facts, meter
from loadtest.agent import Outcome
from loadtest.arms import Arm, ArmFailed, attach_arm, open_arm
from loadtest.bench import EXIT_MISMATCH, EXIT_UNAVAILABLE, STARVED, difference, shown_by
from loadtest.results import Spread, percentile
from loadtest.workload import MIXES, Program, calls, deal
from worker.config import usable_cores

PROTOCOLS = {"code-judge": "long-batch", "sandboxfusion": "run_code"}
BASELINES = ("spawn", "nsjail", "http")


class Turn(Struct, frozen=True):
    arm: str
    calls: int
    calls_per_s: float
    p50_s: float
    p95_s: float


class Comparison(Struct):
    started: str
    commit: str
    command: str
    machine: dict[str, str]
    protocol: str
    mix: str
    turns: list[Turn] = []
    checked: int = 0
    wrong: list[str] = []

    def of(self, arm: str) -> list[Turn]:
        return [turn for turn in self.turns if turn.arm == arm]


class Options(Struct, frozen=True):
    target: str
    protocol: str
    mix: str
    calls: int
    repeats: int
    arms: list[str]
    seed: int


async def compare(options: Options, command: str) -> Comparison:
    found = Comparison(facts.now(), facts.commit(), command, facts.machine(), options.protocol, options.mix, turns=[], wrong=[])
    parts = deal(_programs(options), options.repeats, options.seed)
    seen: list[tuple[str, Program, Outcome]] = []
    async with contextlib.AsyncExitStack() as stack:
        arms = [await stack.enter_async_context(open_arm(name)) for name in options.arms]
        if options.target:
            arms.append(await stack.enter_async_context(attach_arm("target", PROTOCOLS[options.protocol], options.target)))
        for part in parts:
            for arm in arms:
                seen += [(arm.name, *pair) for pair in await _turn(arm, part, found)]
        if "spawn" not in options.arms:
            plain = await stack.enter_async_context(open_arm("spawn"))
            outcomes = (await plain.run(parts[0], usable_cores())).outcomes
            seen += [("spawn", *pair) for pair in zip(parts[0], outcomes, strict=True)]
    _check(seen, PROTOCOLS.get(options.protocol, ""), found)
    return found


def _programs(options: Options) -> list[Program]:
    """What every arm can run: a program that never ends cannot be given its one second in code-judge's language."""
    programs = calls(options.calls * options.repeats, options.seed, options.mix)
    return [one for one in programs if one.kind != "endless" or options.protocol != "code-judge"]


async def _turn(arm: Arm, programs: list[Program], found: Comparison) -> list[tuple[Program, Outcome]]:
    run = await arm.run(programs, usable_cores())
    latencies_s = [outcome.latency_s for outcome in run.outcomes]
    p50_s, p95_s = (round(percentile(latencies_s, share), 4) for share in (0.5, 0.95))
    found.turns.append(Turn(arm.name, len(programs), round(run.calls_per_s, 2), p50_s, p95_s))
    print(f"compare: {arm.name}: {run.calls_per_s:.1f} calls/s", file=sys.stderr, flush=True)
    return list(zip(programs, run.outcomes, strict=True))


def _check(seen: list[tuple[str, Program, Outcome]], agent: str, found: Comparison) -> None:
    references = {(program.code, program.stdin): outcome for arm, program, outcome in seen if arm == "spawn"}
    for arm, program, outcome in seen:
        reference = references.get((program.code, program.stdin))
        if arm == "spawn" or reference is None or (reference.status == "timeout" and outcome.status == STARVED):
            continue
        found.checked += 1
        shown = shown_by(agent if arm == "target" else arm, reference, outcome)
        if words := difference(shown, outcome):
            found.wrong.append(f"{arm}: {program.kind} {program.name}: {words}")


def table(found: Comparison) -> str:
    rows = [["", "calls/s", "low…high", "call p50", "p95", "x spawn"], ["---", *["---:"] * 5]]
    spawn = found.of("spawn")
    for arm in dict.fromkeys(turn.arm for turn in found.turns):
        own = found.of(arm)
        spread = Spread.of([turn.calls_per_s for turn in own])
        times = f"{median(a.calls_per_s / b.calls_per_s for a, b in zip(own, spawn, strict=True)):.1f}" if spawn else ""
        p50_s, p95_s = median(turn.p50_s for turn in own), median(turn.p95_s for turn in own)
        name = f"target ({found.protocol})" if arm == "target" else arm
        rows.append(
            [name, f"{spread.median:.1f}", f"{spread.low:.1f}…{spread.high:.1f}", f"{p50_s:.3f} s", f"{p95_s:.3f} s", times]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def reachable(url: str) -> str:
    """Words if nobody answers there; a service that answers with any status is there."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return ""
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return f"{url} does not answer: {error}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="", metavar="URL", help="a service that runs; without it only our own are compared")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="sandboxfusion", help="that it speaks")
    parser.add_argument("--mix", choices=MIXES, default="rollout")
    parser.add_argument("--calls", type=int, default=40, help="of each arm in each repeat (default 40)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--arms", default=",".join(BASELINES), help="what to compare with (default: %(default)s); none: only the target"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the results")
    given = parser.parse_args(argv)
    given.arms = [name for name in given.arms.split(",") if name not in ("", "none")]
    if unknown := [name for name in given.arms if name not in BASELINES]:
        parser.error(f"--arms: {', '.join(unknown)} is not one of {', '.join(BASELINES)}")
    return given


def main(argv: list[str] | None = None) -> int:
    given = parse(argv)
    if given.target and (words := reachable(given.target)):
        print(f"compare: {words}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    meter.remove_leftovers()
    options = Options(given.target, given.protocol, given.mix, given.calls, given.repeats, given.arms, given.seed)
    what = f"--target URL --protocol {given.protocol} " if given.target else ""
    command = f"python -m loadtest.compare {what}--mix {given.mix} --calls {given.calls} --repeats {given.repeats}"
    try:
        found = asyncio.run(compare(options, command))
    except ArmFailed as error:
        print(f"compare: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    print(table(found))
    print(f"\n{found.checked} outcomes compared with fresh plain interpreters, {len(found.wrong)} wrong.")
    for words in found.wrong[:10]:
        print(f"  {words}")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return EXIT_MISMATCH if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
