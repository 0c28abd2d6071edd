"""Samples of every core by Linux perf: what ran, in which process, and which process started it."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

SAMPLES_PER_S = 997
KERNEL = "[kernel"  # begins the name of the file of a kernel function
KTHREADD = 2  # starts the kernel's own threads


class PerfFailed(Exception):
    """perf is missing, or not permitted; the message says what to do."""


class Sample(NamedTuple):
    pid: int
    stack: list[tuple[str, str]]  # function and file, the innermost first
    ancestors: list[int]  # its parent first


def check() -> None:
    if not shutil.which("perf"):
        raise PerfFailed("needs perf; Debian: apt-get install linux-perf; Ubuntu: apt-get install linux-tools-generic")
    if int(Path("/proc/kallsyms").read_text().split(maxsplit=1)[0], 16) == 0:
        raise PerfFailed("the kernel hides the names of its functions: sysctl kernel.kptr_restrict=1")


@contextlib.contextmanager
def recording(file: Path) -> Iterator[None]:
    """Sampling runs when the block begins."""
    command, commands = os.pipe()
    answers, answer = os.pipe()
    events = ["-a", "-g", "-e", "cpu-clock", "-F", str(SAMPLES_PER_S), "-D", "-1", "--control", f"fd:{command},{answer}"]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        own = ["perf", "record", "-q", *events, "-o", str(file)]
        perf = subprocess.Popen(own, pass_fds=[command, answer], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        for fd in (command, answer):
            os.close(fd)
        for fd in (commands, answers):
            stack.callback(os.close, fd)
        stack.callback(perf.wait)
        stack.callback(perf.send_signal, signal.SIGINT)
        with contextlib.suppress(BrokenPipeError):
            os.write(commands, b"enable\n")
        if not os.read(answers, 16):  # perf has ended
            log.seek(0)
            raise PerfFailed(f"perf cannot sample: {log.read().decode(errors='replace').strip() or 'it ended'}")
        yield


def samples(file: Path) -> Iterator[Sample]:
    script = ["perf", "script", "-i", str(file), "-F", "pid,ip,sym,dso", "--show-task-events"]
    with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace") as perf:
        assert perf.stdout is not None
        yield from read(perf.stdout)


def read(lines: Iterable[str]) -> Iterator[Sample]:
    """From the output of `perf script`: a line with the pid, one per function, an empty line. A fork is a line of its own."""
    parents: dict[int, int] = {}
    sample: Sample | None = None
    for line in lines:
        if found := re.match(r"\s*\d+ PERF_RECORD_FORK\((\d+):\d+\):\((\d+):", line):
            if found[1] != found[2]:  # else a thread
                parents[int(found[1])] = int(found[2])
        elif found := re.fullmatch(r"\s*(\d+)\s*", line):
            sample = Sample(int(found[1]), [], list(_ancestors(int(found[1]), parents)))
        elif sample is not None and (found := re.match(r"\s+[0-9a-f]+ (.+) \((.+)\)$", line)):
            sample.stack.append((found[1], found[2]))
        elif sample is not None and not line.strip():
            yield sample
            sample = None


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    seen = {0}
    while (pid := parents.get(pid, 0)) not in seen:
        seen.add(pid)
        yield pid
