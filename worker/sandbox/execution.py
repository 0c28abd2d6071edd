"""One execution, outside of the sandbox: prepare its descriptors, have a zygote start it, read its output and files.

`worker.sandbox.verdict` decides what its end means.
"""

import base64
import contextlib
import logging
import math
import os
import socket
import stat
from typing import NamedTuple

from exec_wire import Call, Limits, Result, Sandbox, Timings
from exec_wire.messages.bounds import HOME, MOST, WrongField, check_call, normal_path
from worker.sandbox import kernel, protocol
from worker.sandbox.inside.payload import Payload, read_page
from worker.sandbox.memory_files import base64_of, close_all, output, page_file, sealed, text, utf8_size
from worker.sandbox.protocol import ZygoteReport, ZygoteRequest
from worker.sandbox.verdict import KILL_AT_OUTPUT, judge, setup_failed, usage_of

log = logging.getLogger("worker")

OPEN_FILES = 256
PAGE_BYTES = 4096


class Start(NamedTuple):
    """How a program in another language than Python starts; see `Payload`."""

    command: list[str] = []
    source: str = ""
    binary: int | None = None  # a descriptor of the compiled program, which the caller still owns


class Execution:
    """The descriptors of one program, the only state outside of the zygote. `close` closes them."""

    def __init__(
        self, call: Call, remaining_s: float, number: int, fail_step: int, start: Start, max_result_bytes: int
    ) -> None:
        """`remaining_s`: until the call's deadline. `max_result_bytes`: of its output and files together, as sent."""
        self.call, self.number = call, number
        self._max_result_bytes = max_result_bytes
        self._binary = start.binary
        self._remaining_s = remaining_s
        self._fail_step = fail_step
        self._given: list[int] = []  # closed as soon as the zygote has them
        self._kept: list[int] = []
        self._folder: socket.socket | None = None
        self._folder_fd: list[int] = []  # received through `_folder` when the program has ended
        try:
            if call.stdin:
                self._given.append(sealed("stdin", call.stdin.encode("utf-8", "surrogatepass")))
            self._kept += output("stdout"), output("stderr")
            files = decode_files(call.files)
            payload = Payload(call.code, call.argv, call.env, files, call.echo_value, start.command, start.source)
            self._kept.append(page_file(payload))
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
        limits = self.call.limits
        request = run_request(
            limits,
            slot,
            self.number,
            wall_ns=int(limits.wall_s * 1e9),
            deadline_ns=max(1, int(self._remaining_s * 1e9)),
            cpu_s=math.ceil(limits.cpu_limit_s),
            output_bytes=(limits.output_kb << 10) * KILL_AT_OUTPUT,
            flags=flags,
            fail_step=self._fail_step,
        )
        protocol.send_request(link, request, fds)
        close_all(self._given)

    def result(self, report: ZygoteReport, sandbox: Sandbox, step_names: list[str]) -> Result:
        """The call's result. Call once, when the zygote has reported that all processes of the sandbox are dead."""
        stdout_fd, stderr_fd, page_fd = self._kept
        cap = self.call.limits.output_kb * 1024
        stdout_bytes, stderr_bytes = os.fstat(stdout_fd).st_size, os.fstat(stderr_fd).st_size
        result = judge(report, self.call.limits, step_names, max(stdout_bytes, stderr_bytes))
        elapsed_s = (report.start_ns + report.run_ns) / 1e9
        result.sandbox, result.usage = sandbox, usage_of(report, elapsed_s, report.starved_ns / 1e9, report.cpu_ns)
        result.timings = Timings(start_ms=round(report.start_ns / 1e6, 3), run_ms=round(report.run_ns / 1e6, 3))
        if setup_failed(report):  # the program did not run: the output is the set-up's own
            log.error("%s\n%s", result.error, text(stderr_fd, stderr_bytes, cap)[0])
            return result
        result.stdout, cut_out = text(stdout_fd, stdout_bytes, cap)
        result.stderr, cut_err = text(stderr_fd, stderr_bytes, cap)
        result.truncated = cut_out or cut_err
        result.completed, result.value = read_page(page_fd)
        self._fetch_files(result)
        return result

    def bytes_to_read(self) -> int:
        """How many bytes `result` reads, roughly. Call once, before `result`."""
        cap = self.call.limits.output_kb * 1024
        total = sum(min(cap, os.fstat(fd).st_size) for fd in self._kept[:2])
        if self._folder is not None:
            self._folder.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                _, self._folder_fd, _, _ = socket.recv_fds(self._folder, 1, 1)
        for path in self.call.fetch_files if self._folder_fd else []:  # without one it ended before its folder was made
            if not isinstance(found := open_below(self._folder_fd[0], path), str):
                os.close(found[0])
                total += found[1] if found[1] <= self._max_result_bytes else 0
        return total

    def _fetch_files(self, result: Result) -> None:
        """All files together fit in `file_mb` and, as base64, in the rest of the result: a sparse file, or one with many names,
        can exceed the memory that it uses. Files that are not fetched are named with the reason."""
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
        for fds in (self._given, self._kept, self._folder_fd):
            close_all(fds)
        if self._folder is not None:
            self._folder.close()


def run_request(limits: Limits, slot: int, number: int, **fields: int) -> ZygoteRequest:
    """The request to start a program or a session with these limits; `fields`: those in which the two differ."""
    return ZygoteRequest(
        protocol.REQUEST_RUN,
        slot,
        number,
        memory_bytes=limits.memory_mb << 20,
        file_bytes=max(limits.file_mb << 20, (limits.output_kb << 10) * KILL_AT_OUTPUT * 2),
        folder_bytes=limits.file_mb << 20,
        processes=limits.processes,
        open_files=OPEN_FILES,
        **fields,
    )


def decode_files(files: dict[str, str]) -> dict[str, bytes]:
    return {normal_path(path): base64.b64decode(content) for path, content in files.items()}


def open_below(folder_fd: int, path: str) -> tuple[int, int] | str:
    """Open a regular file of the sandbox. Returns the descriptor and its size, or the reason why not."""
    path = normal_path(path)
    try:  # /tmp/x and x are tmp/x in the workspace, /mnt/x is mnt/x
        fd = kernel.open_beneath(folder_fd, (path if path.startswith("/") else HOME + path)[1:])
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
    """Read a regular file of the sandbox of at most `most` bytes. Returns the reason why not as a string."""
    found = open_below(folder_fd, path)
    if isinstance(found, str):
        return found
    fd, size = found
    try:
        if size > most:
            return f"{size} bytes; there is room for {max(0, most)} in this result"
        return os.pread(fd, size, 0)
    finally:
        os.close(fd)


def input_problem(call: Call) -> str | None:
    """Why the call's input does not fit into a sandbox, or None. Checked before one is made."""
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
