"""Compares two source trees by CPU time per call: `make bench-paired BASE=COMMIT`. Needs root.

The base is a commit or a folder. It is copied into a temporary folder, its C extension is built there, and its service is run
with this interpreter and its packages. Nothing else of the base is used, so it may have another layout. Every repeat starts
both services, warms them up and sends them the same programs, one service after the other, in alternating order (base, new,
new, base, …); the other service is idle meanwhile. A process keeps its place in memory for its whole life, which changes its
speed by some percent; fresh starts put that into the interval.

CPU time is that of all processes of a service, by a control group around it (`loadtest.support.meter`); the groups of its
sandboxes lie inside. The load generator is this tree's for both and is not counted. Ratios are new / base within a repeat. The
interval of their median comes from order statistics and assumes no distribution. Outcomes that differ between the trees are
shown; the exit code is then 1, as it is if a median ratio is above `--most`.
"""

import argparse
import contextlib
import io
import math
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from loadtest.bench.agent import STARVED, Outcome, difference
from loadtest.bench.arms import Arm, ArmFailed, Run, info, open_arm
from loadtest.bench.figures import RunRecord, record
from loadtest.support import meter, results
from loadtest.support.results import EXIT_FAILED, EXIT_UNAVAILABLE, EXIT_USAGE, ROOT, markdown, some_of
from loadtest.support.workload import MIXES, Program, Workload
from worker.config import default_packages

MODULE = "loadtest.bench.paired"
ARMS = ("http", "redis")
WARM_UP_CALLS = 40
CONFIDENCE = 0.95
SHOWN = 10
# Built, installed or written by a run, so not copied with a folder.
NOT_SOURCE = shutil.ignore_patterns(".git", ".venv*", ".sandbox-packages*", ".integrations", ".tools", "build", "runs", "*.so")


class BadBase(Exception):
    """The base cannot be copied or built; the message says why."""


class Interval(NamedTuple):
    low: float
    high: float
    coverage: float  # the probability that the median is inside; below `CONFIDENCE` if there are too few values


class Pair(Struct, frozen=True):
    """The same programs through both trees, one after the other."""

    base: RunRecord
    new: RunRecord

    @property
    def cpu_ratio(self) -> float:
        return self.new.cpu_ms / self.base.cpu_ms

    @property
    def speed_ratio(self) -> float:
        return self.new.calls_per_s / self.base.calls_per_s


class Comparison(Struct):
    about: dict[str, str]
    base: str
    workload: str
    cpu_counted_by: str = ""
    slots: dict[str, int] = {}  # the default of each tree
    checked: int = 0
    starved: int = 0  # time-outs that one tree only blamed on the busy machine
    pairs: list[Pair] = []
    differences: list[str] = []

    def groups(self) -> Iterator[list[Pair]]:
        for key in dict.fromkeys((pair.new.mix, pair.new.arm) for pair in self.pairs):
            yield [pair for pair in self.pairs if (pair.new.mix, pair.new.arm) == key]

    def worst(self) -> float:
        return max(median(pair.cpu_ratio for pair in pairs) for pairs in self.groups())


def interval(values: list[float], confidence: float = CONFIDENCE) -> Interval:
    """The narrowest interval from k-th smallest to k-th largest value that contains the median with this probability."""
    ordered, n = sorted(values), len(values)

    def coverage(k: int) -> float:
        return 1 - sum(math.comb(n, fewer) for fewer in range(k)) / float(2 ** (n - 1))

    k = max((k for k in range(1, n // 2 + 1) if coverage(k) >= confidence), default=1)
    return Interval(ordered[k - 1], ordered[-k], coverage(k))


@contextlib.contextmanager
def base_tree(base: str) -> Iterator[Path]:
    """A copy of the base with its C extension built, on the same file system as this tree and with the same packages."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="paired-", dir=ROOT / "build") as folder:
        Path(folder).chmod(0o755)
        tree = Path(folder, "tree")
        if Path(base).is_dir():
            shutil.copytree(base, tree, ignore=NOT_SOURCE)
        else:
            archive = _output(["git", "archive", "--format=tar", f"{base}^{{commit}}"], ROOT)
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(tree, filter="data")
        (tree / ".sandbox-packages").symlink_to(default_packages())
        _output([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], tree)
        if not list((tree / "worker").rglob("_zygote*.so")):
            raise BadBase(f"{base}: its C extension was not built")
        yield tree


def _output(command: list[str], folder: Path) -> bytes:
    done = subprocess.run(command, cwd=folder, capture_output=True)
    if done.returncode:
        raise BadBase(f"{' '.join(command)}: {done.stderr.decode(errors='replace').strip()[-2000:]}")
    return done.stdout


def compare(options: argparse.Namespace, workload: Workload) -> Comparison:
    meter.remove_leftovers()
    found = Comparison(options.about, Path(options.base).name, workload.name)
    with base_tree(options.base) as tree:
        for repeat in range(options.repeats):
            for arm in options.arms:
                with open_arm(arm, root=tree) as old, open_arm(arm, root=ROOT) as new:
                    found.cpu_counted_by = old.counted_by
                    found.slots = {"base": info(old.url)["slots"], "new": info(new.url)["slots"]}
                    for mix in options.mix:
                        programs = workload.calls(options.calls, options.seed + repeat, mix)
                        order = [old, new] if repeat % 2 == 0 else [new, old]
                        runs = {id(one): _measure(one, programs) for one in order}
                        _keep(found, mix, arm, repeat, programs, runs[id(old)], runs[id(new)])
    return found


def _measure(arm: Arm, programs: list[Program]) -> Run:
    arm.run(programs[:WARM_UP_CALLS], 0)  # the service decides how many run at a time
    return arm.run(programs, 0)


def _keep(found: Comparison, mix: str, arm: str, repeat: int, programs: list[Program], old: Run, new: Run) -> None:
    pair = Pair(record(mix, arm, repeat, old), record(mix, arm, repeat, new))
    found.pairs.append(pair)
    found.checked += len(programs)
    for program, before, after in zip(programs, old.outcomes, new.outcomes, strict=True):
        if {before.status, after.status} == {"timeout", STARVED}:
            found.starved += 1
        elif words := differing(before, after):
            found.differences.append(f"{mix} {arm}, repeat {repeat + 1}: {program.kind} {program.name}: {words}")
    words = f"CPU {pair.base.cpu_ms:.2f} -> {pair.new.cpu_ms:.2f} ms per call, {pair.cpu_ratio:.3f} x"
    print(f"paired: repeat {repeat + 1}, {mix} {arm}: {words}", file=sys.stderr, flush=True)


def differing(before: Outcome, after: Outcome) -> str:
    """Output before a time-out may differ; everything else has to agree."""
    return "" if before.status == after.status in ("timeout", STARVED) else difference(before, after)


def table(found: Comparison) -> str:
    head = ["mix", "arm", "CPU ms/call, base", "new", "ratio", "interval", "coverage", "calls/s ratio"]
    rows = []
    for pairs in found.groups():
        ratios = [pair.cpu_ratio for pair in pairs]
        low, high, coverage = interval(ratios)
        base_ms, new_ms = median(pair.base.cpu_ms for pair in pairs), median(pair.new.cpu_ms for pair in pairs)
        cells = [f"{base_ms:.2f}", f"{new_ms:.2f}", f"{median(ratios):.3f}", f"{low:.3f}…{high:.3f}", f"{100 * coverage:.1f} %"]
        rows.append([pairs[0].new.mix, pairs[0].new.arm, *cells, f"{median(pair.speed_ratio for pair in pairs):.3f}"])
    return markdown(head, rows, 2)


def summary(found: Comparison, most: float) -> str:
    others = max(run.others_share for pair in found.pairs for run in (pair.base, pair.new))
    lines = [
        f"{found.base} -> {found.about['commit']}, {found.workload}; slots {found.slots}; CPU time by {found.cpu_counted_by}.",
        f"Medians of new / base within each repeat. Other processes used up to {100 * others:.0f} % of the cores.",
        f"{found.checked} outcomes compared, {len(found.differences)} differ; {found.starved} time-outs differ in blame only.",
        *(f"  {words}" for words in found.differences[:SHOWN]),
        f"Largest ratio {found.worst():.3f}, at most {most:g} wanted: {'met' if found.worst() <= most else 'MISSED'}.",
    ]
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = results.parser(MODULE, __doc__)
    parser.add_argument("--base", required=True, metavar="COMMIT", help="a commit, or a folder with a source tree")
    parser.add_argument("--repeats", type=int, default=9, help="pairs of each mix and arm (default 9)")
    parser.add_argument("--calls", type=int, default=600, help="of each tree, mix and arm in a repeat (default 600)")
    parser.add_argument("--mix", type=some_of(MIXES), default=["rollout", "std"], help="default rollout,std")
    parser.add_argument("--arms", type=some_of(ARMS), default=list(ARMS), help="default http,redis")
    parser.add_argument("--workload", type=Path, metavar="PATH", help="another module with calls(n, seed, mix)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most", type=float, default=1.05, help="the largest median ratio of CPU time (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every pair as JSON")
    given = parser.parse_args(argv)
    given.about = results.about(MODULE, argv)
    return given


def main(argv: list[str] | None = None) -> int:
    given = parse(argv)
    if not results.is_root("paired"):
        return EXIT_UNAVAILABLE
    try:
        workload = Workload.from_file(given.workload) if given.workload else Workload.own()
        found = compare(given, workload)
    except (OSError, ImportError, SyntaxError, BadBase, ArmFailed) as error:
        print(f"paired: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE if isinstance(error, ArmFailed) else EXIT_USAGE
    print(f"{table(found)}\n\n{summary(found, given.most)}")
    results.write_json(found, given.json)
    return 0 if found.worst() <= given.most and not found.differences else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
