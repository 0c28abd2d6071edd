"""Finds the layers that work here, by trying them with the same code that runs programs later.

Starts a temporary zygote in the strongest jail and runs an empty program. A layer that fails is dropped, with its reason, and
the probe tries again; if the jail itself fails, it tries the next weaker one.
"""

import errno
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable

from worker.sandbox import kernel, protocol
from worker.sandbox.inside.payload import Payload
from worker.sandbox.jail import Outer
from worker.sandbox.memory_files import close_all, output, page_file
from worker.sandbox.tiers import ALL_LAYERS, NAMESPACES

PATIENCE_S = 60.0  # also for an interpreter that is not in the page cache of a slow machine
SPACES = ("userns", *NAMESPACES)

LAYERS_OF: dict[Outer, list[str]] = {
    "range": ALL_LAYERS,
    "single": [layer for layer in ALL_LAYERS if layer != "uid"],
    "none": ["uid", "rlimits", "no_new_privs", "landlock", "seccomp", "cgroup"],
}
_LAYER_OF_STEP = {"cgroup": "cgroup", "identity": "uid", "landlock": "landlock", "signals": "seccomp", "seccomp": "seccomp"}

# start(outer, layers, stderr) -> the jail's process and the zygote's socket
Start = Callable[[Outer, list[str], int], tuple[subprocess.Popen[bytes], socket.socket]]


class _Failed(Exception):
    def __init__(self, layer: str | None, reason: str) -> None:
        self.layer, self.reason = layer, reason


def probe(start: Start, steps: list[str], outers: list[Outer], missing: dict[str, str]) -> dict[str, str]:
    """Returns the layers that do not work and why. The last call of `start` was with those that do.

    `missing`: layers that are known not to work before the first try, and why.
    """
    why = "no kind of jail is available"
    for outer in outers:
        if outer != "none" and any(layer in missing for layer in SPACES):
            continue
        absent = {layer: reason for layer, reason in missing.items() if layer in LAYERS_OF[outer]}
        while True:
            layers = [layer for layer in LAYERS_OF[outer] if layer not in absent]
            try:
                _try(start, outer, layers, steps)
            except _Failed as failed:
                why = failed.reason
                if failed.layer is None or failed.layer in absent:
                    missing = missing | {layer: failed.reason for layer in LAYERS_OF[outer] if layer not in LAYERS_OF["none"]}
                    break
                absent[failed.layer] = failed.reason
            else:
                others = dict.fromkeys(ALL_LAYERS, "needs root") | dict.fromkeys(SPACES, "needs the layers before it")
                return {layer: why for layer, why in (others | missing | absent).items() if layer not in layers}
    raise OSError(f"even a process without a jail fails to start: {why}")


def _try(start: Start, outer: Outer, layers: list[str], steps: list[str]) -> None:
    with tempfile.TemporaryFile() as stderr:
        process, link = start(outer, layers, stderr.fileno())
        try:
            with link:
                if _next_report(link) is None:
                    if not _has_ended(process):
                        raise _Failed(None, f"the interpreter did not start within {PATIENCE_S:.0f} s")
                    stderr.seek(0)
                    lines = stderr.read().decode(errors="replace").strip().splitlines()
                    raise _Failed(None, lines[-1] if lines else "the jail did not start")
                _run_nothing(link, steps)
        finally:
            process.kill()
            process.wait()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        return False
    return True


def _next_report(link: socket.socket) -> protocol.ZygoteReport | None:
    if not kernel.readable([link.fileno()], PATIENCE_S):
        return None
    try:
        data = link.recv(protocol.REPORT_BYTES)
    except ConnectionResetError:  # it ended before it had read its slots
        return None
    return protocol.read_report(data) if data else None


def _run_nothing(link: socket.socket, steps: list[str]) -> None:
    fds = [output("stdout"), output("stderr"), page_file(Payload("", [], {}, {}, False))]
    try:
        times = {"wall_ns": int(10e9), "deadline_ns": int(10e9), "cpu_s": 10}
        sizes = {"memory_bytes": 256 << 20, "file_bytes": 16 << 20, "folder_bytes": 16 << 20, "output_bytes": 1 << 20}
        request = protocol.ZygoteRequest(protocol.REQUEST_RUN, 0, 1, **times, **sizes, processes=8, open_files=64)
        protocol.send_request(link, request, fds)
        report = _next_report(link)
    except BrokenPipeError:
        report = None
    finally:
        close_all(fds)
    if report is None:
        raise _Failed(None, "the zygote died while it ran an empty program")
    if report.step != 0:
        step = steps[report.step - 1] if report.step > 0 else "start"
        why = f"{errno.errorcode.get(report.error, report.error)} ({os.strerror(report.error)})"
        raise _Failed(_LAYER_OF_STEP.get(step), f"{step}: {why}")
    if report.status != 0:
        raise _Failed(None, f"an empty program ended with status {report.status}")
