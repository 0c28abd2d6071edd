"""The whole corpus: every program alone and as 8 copies beside a canary, and the machine's state after each.

    python tests/hostile [--cells] [--tier-mask userns,...] [--only REGEX] [--alone] [--slow-machine]

Prints a line per program; ends with 1 if anything is not as expected. `--cells` runs each Python program as a cell of a session
of its own, and the copies beside a session that must keep its state. `--tier-mask uid` makes tier C, `userns` tier D; as a
plain user it runs in the best tier that there is.
"""

import argparse
import asyncio
import re
import sys
import time
from collections import Counter
from pathlib import Path

sys.path += [str(Path(__file__).parents[up] / folder) for up, folder in ((1, "worker"), (1, ""), (2, ""))]

from cage import COPIES, Cage, Node, caged
from corpus import Program, got_words, load

from worker.sandbox.runner_client import SandboxUnavailable

SLOTS, SLOTS_FOR_CELLS = COPIES + 1, COPIES + 2  # one for each canary


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
    slots = SLOTS_FOR_CELLS if options.cells else SLOTS
    async with caged(programs, slots, mask) as cage:
        missing = "; ".join(f"{layer}: {why}" for layer, why in cage.pool.missing.items())
        kind = "cells of sessions" if options.cells else "calls"
        print(f"as {kind}, tier {cage.sandbox.tier}, {slots} slots{f', missing {missing}' if missing else ''}\n")
        if options.cells:
            cage.lend_slots()
            await cage.look_in_session()  # whatever a first session opens is open afterwards
        report = Report()
        report.line("program", "expected", "alone", f"{COPIES} copies", "ok")
        before = await cage.look_at_rest()
        for name, program in programs.items():
            if name in cage.partners or not re.search(options.only, name):
                continue
            before = await run_one(cage, program, before, report, options)
    return conclude(cage, report, time.monotonic() - began)


async def run_one(cage: Cage, program: Program, before: Node, report: Report, options: argparse.Namespace) -> Node:
    """What the machine must look like after the next one: as now, if this one changed it."""
    if why := cage.lacking(program) or (why_no_cell(program) if options.cells else ""):
        report.skip(program, why)
        return before
    run_alone, run_crowd = (cage.run_cell, cage.run_cells_crowd) if options.cells else (cage.run_alone, cage.run_crowd)
    wrong, result = await run_alone(program, crowd=options.slow_machine)
    wrong = [f"alone: {words}" for words in wrong]
    crowd = ""
    if not options.alone:
        crowd_wrong, results = await run_crowd(program)
        wrong += [f"copies: {words}" for words in crowd_wrong]
        crowd = ", ".join(f"{count} x {words}" for words, count in Counter(map(got_words, results)).most_common())
    changed = await cage.differences(before)
    found = await (cage.look_in_session() if options.cells else cage.leftovers())
    wrong += [f"afterwards: {words}" for words in (*changed, *found)]
    expected = (program.as_cell() if options.cells else program).expectation(cage.sandbox)
    report.add(program, expected.words, got_words(result), crowd, wrong)
    return cage.look() if changed else before


def why_no_cell(program: Program) -> str:
    return program.not_as_cell if program.language == "python" else "cells are Python"


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
    parser.add_argument("--cells", action="store_true", help="as cells of sessions")
    parser.add_argument("--tier-mask", default="", help="layers to act without, separated by commas")
    parser.add_argument("--only", default="", help="only programs whose file name matches this expression")
    parser.add_argument("--alone", action="store_true", help="no copies")
    parser.add_argument("--slow-machine", action="store_true", help="alone, each has as much time as among copies")
    try:
        return asyncio.run(run_all(parser.parse_args()))
    except SandboxUnavailable as error:
        print(f"no sandbox in which hostile programs may be run: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
