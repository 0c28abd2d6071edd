"""One execution, outside of the sandbox: prepare its descriptors, have a zygote start it, read what is left when all is dead.

What the program did is judged here from the kernel's word alone (`judge`): wait status, who ended it, control group counters.
"""

from __future__ import annotations

import base64
import codecs
import errno
import fcntl
import logging
import math
import os
import signal
import socket
import stat
from typing import NamedTuple

from exec_wire import Call, Limits, Result, Sandbox, Timings, Usage, verdict
from exec_wire.messages.bounds import HOME, MOST, WrongField, check_call, normal_path
from worker.sandbox import kernel, protocol
from worker.sandbox.inside import page as page_
from worker.sandbox.inside import payload as payload_
from worker.sandbox.protocol import Ask, Say

log = logging.getLogger("worker")

OPEN_FILES = 256
PAGE_BYTES = 4096
KILL_AT_OUTPUT = 8  # times the cap: what goes beyond the cap is cut, what goes far beyond it is stopped
CPU_USED_UP = 0.75  # of its CPU limit, which the kernel counts in ticks: on a busy machine 0.90 s of ours were 1 s of its own
OWN_LIMIT_REACHED = 0.9  # of its memory limit; a peak below it means that a kill was not for its own memory
MFD_EXEC = 0x10
SLICE_BYTES = 192 << 10  # decoded or encoded in one go, which keeps other threads waiting for under a millisecond
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Start(NamedTuple):
    """How a program of another language than Python is started; see `payload.Payload`."""

    command: list[str] = []
    source: str = ""
    binary: int | None = None  # a descriptor of the compiled program, which stays the caller's


IN_ZYGOTE = Start()


class Outcome(NamedTuple):
    """How a program's processes ended, before anything they wrote is looked at."""

    say: Say
    stdout_bytes: int
    stderr_bytes: int


class Execution:
    """The descriptors of one program. `close` gives them back; they are the only thing that lives outside of the zygote."""

    def __init__(
        self,
        call: Call,
        remaining_s: float,
        number: int,
        fail_step: int = 0,
        start: Start = IN_ZYGOTE,
        max_result_bytes: int = 1 << 62,
    ) -> None:
        """`remaining_s`: until the call's deadline. `max_result_bytes`: of its output and files together, as they are sent."""
        self.call, self.number = call, number
        self._max_result_bytes = max_result_bytes
        self._binary = start.binary
        self._remaining_s = remaining_s
        self._fail_step = fail_step
        self._given: list[int] = []  # closed as soon as the zygote has them
        self._kept: list[int] = []
        self._folder: socket.socket | None = None
        self._folder_fd: list[int] = []  # what came through it, when the program had ended
        try:
            if call.stdin:
                self._given.append(sealed("stdin", call.stdin.encode("utf-8", "surrogatepass")))
            self._kept += output("stdout"), output("stderr")
            self._kept.append(page_file(_payload_of(call, start)))
        except BaseException:
            self.close()
            raise

    def send(self, link: socket.socket, slot: int) -> None:
        fds, flags = [*self._kept, *self._given], protocol.HAS_STDIN if self._given else 0
        if self.call.fetch_files:
            self._folder, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._given.append(theirs.detach())
            fds.append(self._given[-1])
            flags |= protocol.HAS_FOLDER_SOCKET
        if self._binary is not None:
            fds.append(self._binary)
            flags |= protocol.HAS_BINARY
        ask = _ask(self.call.limits, self._remaining_s, slot, self.number, flags, self._fail_step)
        protocol.send_ask(link, ask, fds)
        close_all(self._given)

    def result(self, say: Say, sandbox: Sandbox, step_names: list[str]) -> Result:
        """What became of the program. Call once, when the zygote has said that everything in the sandbox is dead."""
        stdout_fd, stderr_fd, page_fd = self._kept
        cap = self.call.limits.output_kb * 1024
        outcome = Outcome(say, os.fstat(stdout_fd).st_size, os.fstat(stderr_fd).st_size)
        result = judge(outcome, self.call.limits, step_names)
        result.sandbox, result.usage = sandbox, _usage(say)
        result.timings = Timings(start_ms=round(say.start_ns / 1e6, 3), run_ms=round(say.run_ns / 1e6, 3))
        if setup_failed(say):  # no byte of the program's ran: what is on the streams is our own
            log.error("%s\n%s", result.error, text(stderr_fd, outcome.stderr_bytes, cap)[0])
            return result
        result.stdout, cut_out = text(stdout_fd, outcome.stdout_bytes, cap)
        result.stderr, cut_err = text(stderr_fd, outcome.stderr_bytes, cap)
        result.truncated = cut_out or cut_err
        result.completed, result.value = page_.read(lambda size, at: os.pread(page_fd, size, at))
        self._fetch_files(result)
        return result

    def weigh(self) -> int:
        """How many bytes `result` reads, roughly. Call once, before it."""
        cap = self.call.limits.output_kb * 1024
        output_bytes = sum(min(cap, os.fstat(fd).st_size) for fd in self._kept[:2])
        return output_bytes + self._weigh_files()

    def _weigh_files(self) -> int:
        if self._folder is None:
            return 0
        self._folder.setblocking(False)
        try:
            _, self._folder_fd, _, _ = socket.recv_fds(self._folder, 1, 1)
        except BlockingIOError:
            return 0
        if not self._folder_fd:  # it ended before its folder was there
            return 0
        sizes = (size_below(self._folder_fd[0], path) for path in self.call.fetch_files)
        return sum(size for size in sizes if isinstance(size, int) and size <= self._max_result_bytes)

    def _fetch_files(self, result: Result) -> None:
        """All of them together fit in `file_mb` and, as base64, into what is left of the result: a sparse file, or one with
        many names, is larger than what it took to make. What is not fetched is named, with the reason."""
        if not self.call.fetch_files:
            return
        left = self._max_result_bytes - utf8_size(result.stdout) - utf8_size(result.stderr)
        left = min(self.call.limits.file_mb << 20, left * 3 // 4)
        for path in self.call.fetch_files:
            content = read_below(self._folder_fd[0], path, left) if self._folder_fd else "the program had no folder yet"
            if isinstance(content, str):
                result.files_missing[path] = content
            else:
                left -= len(content)
                result.files[path] = base64_of(content)

    def close(self) -> None:
        close_all(self._given)
        close_all(self._kept)
        close_all(self._folder_fd)
        if self._folder is not None:
            self._folder.close()


def judge(outcome: Outcome, limits: Limits, step_names: list[str]) -> Result:
    """Status and blame from what the kernel counted, never from what the program said."""
    say = outcome.say
    if setup_failed(say):
        name = step_names[say.step - 1] if 0 < say.step <= len(step_names) else "start"
        why = f": {os.strerror(say.error)}" if say.error else ""
        return verdict("internal_error", error=f"sandbox set-up failed at {name}{why}")
    if say.ended_by == protocol.BY_REQUEST:
        return verdict("cancelled")
    if say.ended_by == protocol.BY_WALL:
        if say.step != 0:
            return verdict("timeout", infra=True, error="setting up the sandbox took all of the program's time")
        return verdict("timeout")
    if say.ended_by == protocol.BY_DEADLINE:
        return verdict("timeout", infra=True, error="the deadline passed before the program had the time that its limit allows")
    if max(outcome.stdout_bytes, outcome.stderr_bytes) > limits.output_kb * 1024 * KILL_AT_OUTPUT:
        return verdict("output_limit")
    if say.ended_by == protocol.BY_MEMORY or say.oom_kills > 0:
        return _judge_out_of_memory(say, limits)
    if os.WIFSIGNALED(say.status):
        return _judge_signal(say, limits, os.WTERMSIG(say.status))
    code = os.WEXITSTATUS(say.status)
    return verdict("ok" if code == 0 else "error", exit_code=code)


def setup_failed(say: Say) -> bool:
    """A step of ours failed. Not so if a limit of the call's own ended it that early."""
    return say.step != 0 and say.ended_by == protocol.BY_ITSELF and say.oom_kills == 0


def zygote_failed(say: Say, step_names: list[str]) -> bool:
    """A step failed that does the same for every request. The last one, `prepare`, works on what the request contained, so its
    failure says nothing of the zygote."""
    return setup_failed(say) and say.step != len(step_names)


def _judge_out_of_memory(say: Say, limits: Limits) -> Result:
    """The kernel counts a kill here whoever ran out: the program, by reaching its limit, or the whole machine. Control groups
    version 2 tell which; else the peak does."""
    below = 0 < say.memory_peak < OWN_LIMIT_REACHED * (limits.memory_mb << 20)
    if say.oom_by == protocol.OOM_BY_MACHINE or (say.oom_by == protocol.OOM_BY_UNKNOWN and below):
        return _killed_by_machine()
    return verdict("memory_limit")


def _judge_signal(say: Say, limits: Limits, number: int) -> Result:
    used_up = say.cpu_ns >= CPU_USED_UP * math.ceil(limits.cpu_limit_s) * 1e9
    if used_up and number in (signal.SIGXCPU, signal.SIGKILL):
        return verdict("cpu_limit", signal=number)
    return _killed_by_machine() if number == signal.SIGKILL else verdict("signal", signal=number)


def _killed_by_machine() -> Result:
    return verdict("signal", infra=True, signal=signal.SIGKILL, error="a SIGKILL that no limit of the call sent")


def _usage(say: Say) -> Usage:
    elapsed_ns = say.start_ns + say.run_ns
    return Usage(
        wall_s=round((elapsed_ns - say.starved_ns) / 1e9, 6),
        elapsed_s=round(elapsed_ns / 1e9, 6),
        cpu_s=round(say.cpu_ns / 1e9, 6),
        memory_peak_bytes=say.memory_peak,
        processes_peak=say.processes_peak,
    )


def _ask(limits: Limits, remaining_s: float, slot: int, number: int, flags: int, fail_step: int) -> Ask:
    return Ask(
        protocol.ASK_RUN,
        slot,
        number,
        wall_ns=int(limits.wall_s * 1e9),
        deadline_ns=max(1, int(remaining_s * 1e9)),
        cpu_s=math.ceil(limits.cpu_limit_s),
        memory_bytes=limits.memory_mb << 20,
        file_bytes=max(limits.file_mb << 20, (limits.output_kb << 10) * KILL_AT_OUTPUT * 2),
        folder_bytes=limits.file_mb << 20,
        output_bytes=(limits.output_kb << 10) * KILL_AT_OUTPUT,
        processes=limits.processes,
        open_files=OPEN_FILES,
        flags=flags,
        fail_step=fail_step,
    )


def _payload_of(call: Call, start: Start) -> bytes:
    files = {normal_path(path): base64.b64decode(content) for path, content in call.files.items()}
    return payload_.pack(payload_.Payload(call.code, call.argv, call.env, files, call.echo_value, start.command, start.source))


def sealed(name: str, data: bytes, flags: int = 0) -> int:
    """Nobody can write to it any more: no blocked writer, and nothing of one call can be changed by another."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    except OSError as error:
        if error.errno != errno.EINVAL or not flags:
            raise
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)  # kernels before 6.3 know no flag for it
    _write_all(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def _write_all(fd: int, data: bytes, at: int = 0) -> None:
    """Or close it."""
    try:
        written = os.pwrite(fd, data, at)
        while written < len(data):  # more than two gigabytes, or nearly out of memory
            written += os.pwrite(fd, memoryview(data)[written:], at + written)
    except OSError:
        os.close(fd)
        raise


def sealed_program(data: bytes) -> int:
    """A compiled program that can be executed and not changed."""
    return sealed("program", data, MFD_EXEC)


def output(name: str) -> int:
    """Appended to by everybody in the sandbox, read once when they are dead: nothing to drain, nothing to block on."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def page_file(payload: bytes) -> int:
    """The page, and behind it what the child reads before its program begins."""
    fd = os.memfd_create("page", os.MFD_CLOEXEC)
    _write_all(fd, payload, page_.SIZE)
    return fd


def text(fd: int, size: int, cap: int) -> tuple[str, bool]:
    """A stream as text; beyond `cap` bytes its head and tail with the cut marked."""
    if not size:
        return "", False
    if size <= cap:
        return _text_at(fd, size, 0), False
    half = cap // 2
    head, tail = _text_at(fd, cap - half, 0), _text_at(fd, half, size - half)
    return f"{head}\n[... {size - cap} bytes cut ...]\n{tail}", True


def _text_at(fd: int, size: int, at: int) -> str:
    if size <= SLICE_BYTES:
        return os.pread(fd, size, at).decode("utf-8", "replace")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts = [decoder.decode(os.pread(fd, min(SLICE_BYTES, size - done), at + done)) for done in range(0, size, SLICE_BYTES)]
    return "".join((*parts, decoder.decode(b"", final=True)))


def utf8_size(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(len(text[at : at + SLICE_BYTES].encode()) for at in range(0, len(text), SLICE_BYTES))


def base64_of(content: bytes) -> str:
    if len(content) <= SLICE_BYTES:
        return base64.b64encode(content).decode()
    view = memoryview(content)
    return "".join(base64.b64encode(view[at : at + SLICE_BYTES]).decode() for at in range(0, len(view), SLICE_BYTES))


def size_below(folder_fd: int, path: str) -> int | str:
    found = open_below(folder_fd, path)
    if isinstance(found, str):
        return found
    fd, size = found
    os.close(fd)
    return size


def open_below(folder_fd: int, path: str) -> tuple[int, int] | str:
    """A regular file of the sandbox, open, and its size; or why there is none."""
    try:
        fd = kernel.open_beneath(folder_fd, _below_workspace(path))
    except FileNotFoundError:
        return "no such file"
    except OSError as error:
        return f"it cannot be opened: {error.strerror}"
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode):
        return fd, info.st_size
    os.close(fd)
    return "it is not a regular file"


def read_below(folder_fd: int, path: str, most: int) -> bytes | str:
    """A regular file of the sandbox with at most `most` bytes; or why it is not read."""
    found = open_below(folder_fd, path)
    if isinstance(found, str):
        return found
    fd, size = found
    try:
        return does_not_fit(size, most) if size > most else os.pread(fd, size, 0)
    finally:
        os.close(fd)


def does_not_fit(size: int, most: int) -> str:
    return f"{size} bytes; there is room for {max(0, most)} in this result"


def _below_workspace(path: str) -> str:
    """/tmp/x and x are tmp/x in the workspace, /mnt/x is mnt/x."""
    path = normal_path(path)
    return (path if path.startswith("/") else HOME + path)[1:]


def misfit(call: Call) -> str | None:
    """Why the call cannot be put into a sandbox; None if it can. Found before one is made."""
    try:
        check_call(call, MOST)
    except WrongField as wrong:
        return f"{wrong.field}: {wrong}"
    room = call.limits.file_mb << 20
    if not call.files and 4 * len(call.code) <= room:
        return None
    taken = _in_pages(len(call.code.encode("utf-8", "surrogatepass")))
    taken += sum(_in_pages(len(content) // 4 * 3 - content[-2:].count("=")) for content in call.files.values())
    return f"files and code take {taken} bytes; limits.file_mb allows {room}" if taken > room else None


def _in_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
