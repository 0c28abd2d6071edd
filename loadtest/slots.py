"""How many slots a core should have: calls/s, and who is blamed on a busy machine. `python -m loadtest.slots` (root).

Pools of different sizes take turns with the same programs, first on the machine as it is, then while other processes keep every
core busy. Each then runs endless programs beside that load: all of them are the model's time-outs, whatever the pool's size.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median

from exec_wire import Call, Limits, Result
from loadtest.workload import Program, calls
from worker.config import WorkerConfig, usable_cores
from worker.pool import Pool, SlotBusy

PER_CORE = (1, 2, 3, 4, 6)
DEADLINE_S = 120.0
WHY = """\
The load is another process on every core. Every endless program is blamed on the model, whatever the number of slots, because
starved time does not count; but the more slots, the longer it takes to reach its limit. One slot per core leaves cores idle
while the kernel cleans up. From two on the gain is small and partly noise, up to six, which had more calls/s in this run and
took twice as long as three for the endless programs. Three slots per core is the default.
"""
ENDLESS = Call("while True: pass", limits=Limits(wall_s=0.5))


@contextmanager
def burners() -> Iterator[None]:
    """Another process on every core."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(usable_cores())]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def run_all(pool: Pool, programs: Sequence[Call]) -> list[Result]:
    """As many at a time as there are slots."""
    waiting = list(programs)

    async def work(slot: int) -> list[Result]:
        results = []
        while waiting:
            call = waiting.pop()
            try:
                results.append(await pool.run(call, slot, DEADLINE_S))
            except SlotBusy:
                waiting.append(call)
                await asyncio.sleep(0.01)
        return results

    slots = [pool.take_slot() for _ in range(pool.slots)]
    try:
        return [result for part in await asyncio.gather(*map(work, slots)) for result in part]
    finally:
        for slot in slots:
            pool.give_back(slot)


async def calls_per_s(pool: Pool, programs: Sequence[Program]) -> float:
    began = time.monotonic()
    results = await run_all(pool, [Call(one.code, stdin=one.stdin, limits=Limits(wall_s=one.wall_s)) for one in programs])
    assert len(results) == len(programs)
    return len(programs) / (time.monotonic() - began)


async def measure(repeats: int, count: int) -> list[str]:
    speed: dict[tuple[int, str, bool], list[float]] = {}
    blamed: dict[int, Counter[str]] = {size: Counter() for size in PER_CORE}
    longest: dict[int, float] = dict.fromkeys(PER_CORE, 0.0)
    async with AsyncExitStack() as stack:
        pools = {}
        for size in PER_CORE:
            pools[size] = await stack.enter_async_context(Pool(WorkerConfig(slots=size * usable_cores(), min_tier="A")))
            await pools[size].wait_ready()
        for busy in (False, True):
            with burners() if busy else nullcontext():
                for repeat in range(repeats):
                    for size in PER_CORE if repeat % 2 else reversed(PER_CORE):
                        for mix in ("rollout", "std"):
                            print(f"repeat {repeat + 1} of {repeats}, {size} per core, {mix}, busy: {busy}", file=sys.stderr)
                            found = await calls_per_s(pools[size], calls(count, repeat, mix))
                            speed.setdefault((size, mix, busy), []).append(found)
        with burners():
            for size, pool in pools.items():
                results = await run_all(pool, [ENDLESS] * 6 * usable_cores())
                blamed[size].update(f"{result.status}, {result.blame}" for result in results)
                longest[size] = max(result.usage.elapsed_s for result in results)
    return table(speed, blamed, longest)


def table(
    speed: dict[tuple[int, str, bool], list[float]], blamed: dict[int, Counter[str]], longest: dict[int, float]
) -> list[str]:
    lines = [
        "| slots per core | rollout, calls/s | std, calls/s | rollout beside a load | std beside a load "
        "| endless programs beside a load | the longest took |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for size in PER_CORE:
        figures = [f"{median(speed[size, mix, busy]):.0f}" for busy in (False, True) for mix in ("rollout", "std")]
        verdicts = "; ".join(f"{count} x {words}" for words, count in blamed[size].most_common())
        lines.append(f"| {size} | {' | '.join(figures)} | {verdicts} | {longest[size]:.1f} s |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="slots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=240, help="in one repeat (default: %(default)s)")
    parser.add_argument("--page", type=Path, help="write the table there too")
    options = parser.parse_args()
    lines = asyncio.run(measure(options.repeats, options.calls))
    print("\n".join(lines))
    if options.page:
        command = f"python -m loadtest.slots --repeats {options.repeats} --calls {options.calls}"
        facts = f"{usable_cores()} cores, tier A, medians of {options.repeats} repeats in turns. `{command}`"
        options.page.write_text("\n".join(["# Slots per core", "", facts, "", *lines, "", WHY]))


if __name__ == "__main__":
    main()
