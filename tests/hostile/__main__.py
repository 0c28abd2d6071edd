"""The whole corpus: every program alone and as 8 copies beside a canary, and the machine's state after each.

    python tests/hostile [--tier-mask userns,...] [--only REGEX] [--alone]

Prints a line per program; ends with 1 if anything is not as expected. `--tier-mask uid` makes tier C, `userns` tier D; as a
plain user it runs in the best tier that there is.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "worker"))
sys.path.append(str(Path(__file__).parents[2]))

from cage import COPIES, Cage, Node, caged
from corpus import Program, got_words, load

from worker.sandbox.runner_link import SandboxUnavailable

SLOTS = COPIES + 1  # one for the canary


class Report:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.mismatches: list[str] = []

    def line(self, program: str, expected: str, alone: str, crowd: str, ok: str) -> None:
        print(f"{program:<42} | {expected[:30]:<30} | {alone[:30]:<30} | {crowd[:50]:<50} | {ok}", flush=True)

    def add(self, program: Program, expected: str, alone: str, crowd: str, wrong: list[str]) -> None:
        self.counts["mismatch" if wrong else "ok"] += 1
        self.line(program.name, expected, alone, crowd, "NO" if wrong else "yes")
        for words in dict.fromkeys(wrong):
            print(f"{'':<42}   {words}", flush=True)
        self.mismatches += [f"{program.name}: {words}" for words in dict.fromkeys(wrong)]

    def skip(self, program: Program, why: str) -> None:
        self.counts["skipped"] += 1
        self.line(program.name, program.expect.words, "-", f"skipped: {why}", "-")


async def run_all(options: argparse.Namespace) -> int:
    programs = load()
    began = time.monotonic()
    mask = [layer for layer in options.tier_mask.split(",") if layer]
    async with caged(programs, SLOTS, mask) as cage:
        missing = "; ".join(f"{layer}: {why}" for layer, why in cage.pool.missing.items())
        print(f"tier {cage.sandbox.tier}, {SLOTS} slots{f', missing {missing}' if missing else ''}\n")
        report = Report()
        report.line("program", "expected", "alone", f"{COPIES} copies", "ok")
        before = cage.look()
        for name, program in programs.items():
            if name in cage.partners or not re.search(options.only, name):
                continue
            before = await run_one(cage, program, before, report, options.alone)
    return conclude(cage, report, time.monotonic() - began)


async def run_one(cage: Cage, program: Program, before: Node, report: Report, alone_only: bool) -> Node:
    """What the machine must look like after the next one: as now, if this one changed it."""
    if why := cage.lacking(program):
        report.skip(program, why)
        return before
    wrong, result = await cage.run_alone(program)
    wrong = [f"alone: {words}" for words in wrong]
    crowd = ""
    if not alone_only:
        crowd_wrong, results = await cage.run_crowd(program)
        wrong += [f"copies: {words}" for words in crowd_wrong]
        crowd = ", ".join(f"{count} x {words}" for words, count in Counter(map(got_words, results)).most_common())
    changed = await cage.differences(before)
    wrong += [f"afterwards: {words}" for words in (*changed, *await cage.leftovers())]
    report.add(program, program.expectation(cage.sandbox).words, got_words(result), crowd, wrong)
    return cage.look() if changed else before


def conclude(cage: Cage, report: Report, seconds: float) -> int:
    canary, counts = cage.canary, report.counts
    print(f"\n{counts['ok']} as expected, {counts['mismatch']} not, {counts['skipped']} skipped; {seconds:.0f} s")
    if canary.latencies_s:
        print(f"canary: {len(canary.latencies_s)} runs, {len(canary.wrong)} wrong; latency {canary.words}")
    print(f"zygotes that had to be replaced: {cage.pool.zygote_restarts}")
    for words in (*report.mismatches, *(f"canary: {words}" for words in canary.wrong)):
        print(f"  {words}")
    return 1 if report.mismatches or canary.wrong or cage.pool.zygote_restarts else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/hostile", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tier-mask", default="", help="layers to act without, separated by commas")
    parser.add_argument("--only", default="", help="only programs whose file name matches this expression")
    parser.add_argument("--alone", action="store_true", help="no copies")
    try:
        return asyncio.run(run_all(parser.parse_args()))
    except SandboxUnavailable as error:
        print(f"no sandbox in which hostile programs may be run: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
