"""One execution, outside of the sandbox: prepare its descriptors, have a zygote start it, read what is left when all is dead.

What the program did is judged here from the kernel's word alone (`judge`): wait status, who ended it, control group counters.
"""

from __future__ import annotations

import base64
import fcntl
import math
import os
import signal
import socket
import stat
from typing import NamedTuple

from exec_wire import Call, Limits, Result, Sandbox, Timings, Usage, verdict
from worker.sandbox import kernel, protocol
from worker.sandbox.inside import page as page_
from worker.sandbox.inside import payload as payload_
from worker.sandbox.jail import PACKAGES
from worker.sandbox.protocol import Ask, Say

OPEN_FILES = 256
KILL_AT_OUTPUT = 8  # times the cap: what goes beyond the cap is cut, what goes far beyond it is stopped
OWN_SHARE_OF_CPU = 0.75  # a program that got this much of its wall time as CPU time was not starved by the machine
WAITED_TOO_LONG = 0.25  # of its wall limit, ready to run without getting a CPU
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "USER": "sandbox",
    "LANG": "C.UTF-8",
    "PYTHONPATH": PACKAGES,
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "MPLCONFIGDIR": "/tmp/.matplotlib",
}
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Outcome(NamedTuple):
    """How a program's processes ended, before anything they wrote is looked at."""

    say: Say
    stdout_bytes: int
    stderr_bytes: int


class Execution:
    """The descriptors of one program. `close` gives them back; they are the only thing that lives outside of the zygote."""

    def __init__(self, call: Call, wall_s: float, number: int, fail_step: int = 0) -> None:
        self.call, self.number = call, number
        self.wall_s = min(call.limits.wall_s, wall_s)
        self._fail_step = fail_step
        self._given: list[int] = []  # closed as soon as the zygote has them
        self._kept: list[int] = []
        self._folder: socket.socket | None = None
        try:
            self._given = [_sealed("payload", _payload_of(call)), _sealed("stdin", call.stdin.encode("utf-8", "surrogatepass"))]
            self._kept = [_output("stdout"), _output("stderr"), _page()]
        except OSError:
            self.close()
            raise

    def send(self, link: socket.socket, slot: int) -> None:
        fds = [*self._given, *self._kept]
        if self.call.fetch_files:
            self._folder, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._given.append(theirs.detach())
            fds.append(self._given[-1])
        protocol.send_ask(link, _ask(self.call.limits, self.wall_s, slot, self.number, self._fail_step), fds)
        _close_all(self._given)

    def result(self, say: Say, sandbox: Sandbox, step_names: list[str]) -> Result:
        """What became of the program. Call once, when the zygote has said that everything in the sandbox is dead."""
        stdout_fd, stderr_fd, page_fd = self._kept
        cap = self.call.limits.output_kb * 1024
        outcome = Outcome(say, os.fstat(stdout_fd).st_size, os.fstat(stderr_fd).st_size)
        result = judge(outcome, self.call.limits, self.wall_s, step_names)
        result.stdout, cut_out = _text(stdout_fd, outcome.stdout_bytes, cap)
        result.stderr, cut_err = _text(stderr_fd, outcome.stderr_bytes, cap)
        result.truncated = cut_out or cut_err
        result.completed, result.value = page_.read(os.pread(page_fd, page_.SIZE, 0))
        result.files = self._collect_files()
        result.sandbox = sandbox
        result.usage = _usage(say)
        result.timings = Timings(start_ms=round(say.start_ns / 1e6, 3), run_ms=round(say.run_ns / 1e6, 3))
        return result

    def _collect_files(self) -> dict[str, str]:
        if self._folder is None:
            return {}
        self._folder.setblocking(False)
        try:
            _, fds, _, _ = socket.recv_fds(self._folder, 1, 1)
        except BlockingIOError:
            return {}  # the program was not started
        try:
            most = self.call.limits.file_mb << 20
            found = ((path, _read_below(fds[0], path, most)) for path in self.call.fetch_files)
            return {path: base64.b64encode(content).decode() for path, content in found if content is not None}
        finally:
            _close_all(fds)

    def close(self) -> None:
        _close_all(self._given)
        _close_all(self._kept)
        if self._folder is not None:
            self._folder.close()


def judge(outcome: Outcome, limits: Limits, wall_s: float, step_names: list[str]) -> Result:
    """Status and blame from what the kernel counted, never from what the program said."""
    say = outcome.say
    if say.step != 0:
        name = step_names[say.step - 1] if 0 < say.step <= len(step_names) else "start"
        return verdict("internal_error", error=f"sandbox set-up failed at {name}: {os.strerror(say.error)}")
    if say.ended_by == protocol.BY_REQUEST:
        return verdict("cancelled")
    if say.ended_by == protocol.BY_WALL:
        return verdict("timeout", infra=_machine_was_slow(say, limits, wall_s))
    if max(outcome.stdout_bytes, outcome.stderr_bytes) > limits.output_kb * 1024 * KILL_AT_OUTPUT:
        return verdict("output_limit")
    if say.ended_by == protocol.BY_MEMORY or say.oom_kills > 0:
        return verdict("memory_limit")
    if os.WIFSIGNALED(say.status):
        return _judge_signal(say, limits, os.WTERMSIG(say.status))
    code = os.WEXITSTATUS(say.status)
    return verdict("ok" if code == 0 else "error", exit_code=code)


def _machine_was_slow(say: Say, limits: Limits, wall_s: float) -> bool:
    """The deadline cut its time short, or it stood in line for a CPU that others of its own had not taken."""
    if wall_s < limits.wall_s:
        return True
    wall_ns = wall_s * 1e9
    return say.waited_ns > WAITED_TOO_LONG * wall_ns and say.cpu_ns < OWN_SHARE_OF_CPU * wall_ns


def _judge_signal(say: Say, limits: Limits, number: int) -> Result:
    used_up = say.cpu_ns >= 0.95 * math.ceil(limits.cpu_s) * 1e9
    if used_up and number in (signal.SIGXCPU, signal.SIGKILL):
        return verdict("cpu_limit", signal=number)
    # Neither we nor its memory limit sent a SIGKILL that arrives here: the machine did, or nobody can tell.
    return verdict("signal", infra=number == signal.SIGKILL, signal=number)


def _usage(say: Say) -> Usage:
    return Usage(
        wall_s=round((say.start_ns + say.run_ns) / 1e9, 6),
        cpu_s=round(say.cpu_ns / 1e9, 6),
        memory_peak_bytes=say.memory_peak,
        processes_peak=say.processes_peak,
    )


def _ask(limits: Limits, wall_s: float, slot: int, number: int, fail_step: int) -> Ask:
    return Ask(
        protocol.ASK_RUN,
        slot,
        number,
        wall_ns=max(1, int(wall_s * 1e9)),
        cpu_s=math.ceil(limits.cpu_s),
        memory_bytes=limits.memory_mb << 20,
        file_bytes=max(limits.file_mb << 20, (limits.output_kb << 10) * KILL_AT_OUTPUT * 2),
        folder_bytes=limits.file_mb << 20,
        output_bytes=(limits.output_kb << 10) * KILL_AT_OUTPUT,
        processes=limits.processes,
        open_files=OPEN_FILES,
        fail_step=fail_step,
    )


def _payload_of(call: Call) -> bytes:
    files = {path: base64.b64decode(content) for path, content in call.files.items()}
    return payload_.pack(payload_.Payload(call.code, call.argv, {**ENVIRONMENT, **call.env}, files, call.echo_value))


def _sealed(name: str, data: bytes) -> int:
    """Nobody can write to it any more: no blocked writer, and nothing of one call can be changed by another."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view, at = memoryview(data), 0
    while at < len(view):
        at += os.pwrite(fd, view[at:], at)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def _output(name: str) -> int:
    """Appended to by everybody in the sandbox, read once when they are dead: nothing to drain, nothing to block on."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def _page() -> int:
    fd = os.memfd_create("page", os.MFD_CLOEXEC)
    os.ftruncate(fd, page_.SIZE)
    return fd


def _text(fd: int, size: int, cap: int) -> tuple[str, bool]:
    """A stream as text; beyond `cap` bytes its head and tail with the cut marked."""
    if size <= cap:
        return os.pread(fd, size, 0).decode("utf-8", "replace"), False
    half = cap // 2
    head, tail = os.pread(fd, cap - half, 0), os.pread(fd, half, size - half)
    mark = f"\n[... {size - cap} bytes cut ...]\n"
    return head.decode("utf-8", "replace") + mark + tail.decode("utf-8", "replace"), True


def _read_below(folder_fd: int, path: str, most: int) -> bytes | None:
    """A regular file of the sandbox, at most `most` bytes of it; None for whatever else is there or is not."""
    try:
        fd = kernel.open_beneath(folder_fd, _below_workspace(path))
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return os.pread(fd, most, 0)
    finally:
        os.close(fd)


def _below_workspace(path: str) -> str:
    """/tmp/x and x are tmp/x in the workspace, /mnt/x is mnt/x."""
    return path.lstrip("/") if path.startswith(("/tmp/", "/mnt/")) else f"tmp/{path}"


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
