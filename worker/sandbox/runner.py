"""The runner: the only privileged process. Starts the jails with their zygotes and hands the worker a socket to each.

It has no network, no secrets and never sees a call. It runs as long as its worker is connected: then it kills everything in the
jails and removes what it made. It does not trust its worker: the command line limits what a worker can get, and each message is
checked (`runner_limits.py`). A message that is not allowed ends the connection.

    worker: {"configure": {...}}                once, first: slots, sessions, profiles, and a tier if it must be stronger
    runner: {"ready": {...}}                    tier, layers, missing layers and why, set-up steps, languages
    runner: {"failed": "message"}               why there is no sandbox, or why the connection ends
    runner: {"zygote": {...}} + fd              for each zygote, again after each restart
    worker: {"recycle": number}                 replace this zygote, which does not answer
    worker: {"retire": number}                  replace this zygote, which ends when the worker closes its socket
    worker: {"session_slot": index}             make the control group of a session
    runner: {"session_slot": index, ...} + fds  its files, and which of them are present
    worker: {"leaf": [index, leaf]}             make the control group of one process of a session
    runner: {"leaf": [...], ...} + fds
"""

import argparse
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from worker import languages
from worker.sandbox import kernel, memory, protocol, runner_limits, tiers, uids
from worker.sandbox.memory_files import close_all
from worker.sandbox.runner_limits import UIDS, BadRequest, Configure, Request, RunnerOptions, add_arguments

log = logging.getLogger("runner")

SLOTS_PER_ZYGOTE = 6  # a zygote forks one program after the other
RESTART_PAUSE_S, MAX_RESTART_PAUSE_S = 0.2, 10.0  # backoff after a zygote died young; doubled each time
YOUNG_S = 30.0
MAX_ENDING_ZYGOTES = 16  # retired zygotes without a session that have not ended yet

EXIT_UNAVAILABLE = 69  # sysexits
NOT_BUILT = "the sandbox's C part is not built: install gcc and Python's headers, then run `make install`"
NOT_IN_A_USER_NAMESPACE = (
    "exec-service: this container's root is the machine's root, so `hostUsers: false` had no effect: it needs Linux 6.3, "
    "containerd 2.0 and runc 1.2. Update the nodes, or choose another sandbox.profile.\n"
)


@dataclass
class Zygote:
    number: int
    profile: str
    process: subprocess.Popen[bytes]
    started_at: float
    retired: bool = False  # another one was started instead


class Runner:
    def __init__(self, worker: socket.socket, options: RunnerOptions) -> None:
        self._worker = worker
        self._options = options
        self._zygotes: dict[int, Zygote] = {}
        self._next_number = 0
        self._pauses: dict[str, float] = {}
        self._due: list[tuple[float, str]] = []  # when to restart a zygote of which profile

    def run(self) -> None:
        first = runner_limits.receive(self._worker)
        if first is None:
            return
        self._wishes = self._allowed(first.configure)
        try:
            from worker.sandbox.inside import _zygote
            from worker.sandbox.probe import probe
            from worker.sandbox.runner_host import RunnerHost
        except ImportError as error:
            raise OSError(NOT_BUILT) from error
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # to reap orphaned descendants; not every PID 1 does that
        with RunnerHost(self._options, self._wishes.slots) as self._host:
            steps, masked = list(_zygote.steps()), dict.fromkeys(self._options.masked_layers, "masked by configuration")
            missing = probe(self._host.try_zygote, steps, self._host.outers, self._host.missing | masked)
            self._send_ready(steps, missing)
            try:
                for profile in self._wishes.profiles:
                    for _ in range(max(1, self._wishes.slots // SLOTS_PER_ZYGOTE)):
                        self._start_zygote(profile)
                self._serve_worker()
            finally:
                for zygote in self._zygotes.values():
                    zygote.process.kill()
                for zygote in self._zygotes.values():
                    zygote.process.wait()
                reap_orphans()

    def _allowed(self, wishes: Configure | None) -> Configure:
        if wishes is None:
            raise BadRequest("the first message has to be configure")
        for what, wanted, most in (
            ("slots", wishes.slots, self._options.max_slots),
            ("sessions", wishes.sessions, self._options.max_sessions),
            ("slots and sessions", wishes.slots + wishes.sessions, UIDS),
        ):
            if wanted > most:
                raise BadRequest(f"{wanted} {what} are more than the {most} that this runner allows")
        return wishes

    def _send_ready(self, steps: list[str], missing: dict[str, str]) -> None:
        """If the tier is too low for the runner's options or for the worker, no zygote is started."""
        layers, tier = self._host.layers, tiers.tier_of(self._host.layers)
        for wanted in (self._options.min_tier, self._wishes.min_tier):
            tiers.require(wanted, tier, layers, missing)
        ready = protocol.Ready(tier, layers, missing, steps, languages.paths(), memory.usable())
        protocol.send_message(self._worker, {"ready": msgspec.to_builtins(ready)})

    def _start_zygote(self, profile: str) -> None:
        process, link = self._host.start_zygote(self._wishes.profiles[profile])
        with link:
            zygote = Zygote(self._next_number, profile, process, time.monotonic())
            self._next_number += 1
            self._zygotes[process.pid] = zygote
            protocol.send_message(self._worker, {"zygote": {"number": zygote.number, "profile": profile}}, [link.fileno()])

    def _serve_worker(self) -> None:
        """Handle messages and replace zygotes that die, until the worker disconnects."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write)
        self._handle_dead_zygotes()  # those that died before the signal handler was set
        reap_orphans()
        while True:
            ready = kernel.readable([self._worker.fileno(), wake_read], self._start_due())
            if wake_read in ready:
                os.read(wake_read, 4096)
                self._handle_dead_zygotes()
                reap_orphans()
            if self._worker.fileno() in ready:
                request = runner_limits.receive(self._worker)
                if request is None:
                    return
                self._handle(request)

    def _handle(self, request: Request) -> None:
        if request.recycle is not None:
            for zygote in self._known(request.recycle):
                zygote.process.kill()
        elif request.retire is not None:
            self._retire(self._known(request.retire))
        elif request.session_slot is not None:
            index = self._check_session_slot(request.session_slot)
            self._answer({"session_slot": index}, lambda: self._host.make_session_slot(index))
        elif request.leaf is not None:
            slot, leaf = self._check_session_slot(request.leaf[0]), request.leaf[1]
            self._answer({"leaf": [slot, leaf]}, lambda: self._host.make_leaf(slot, leaf))
        else:
            raise BadRequest("configure is for the first message only")

    def _known(self, number: int) -> list[Zygote]:
        """The zygote with this number; none if it ended."""
        if number >= self._next_number:
            raise BadRequest(f"there was no zygote {number}")
        return [zygote for zygote in self._zygotes.values() if zygote.number == number]

    def _check_session_slot(self, index: int) -> int:
        """Check that this is a session slot. The control groups of program slots are never handed out."""
        slots, sessions = self._wishes.slots, self._wishes.sessions
        if not slots <= index < slots + sessions:
            raise BadRequest(f"{index} is not a session slot: those are {slots} to {slots + sessions - 1}")
        return index

    def _retire(self, zygotes: list[Zygote]) -> None:
        # A retired zygote stays for its sessions, so there are at most as many as sessions; some are about to end.
        if sum(zygote.retired for zygote in self._zygotes.values()) > self._wishes.sessions + MAX_ENDING_ZYGOTES:
            raise BadRequest("more zygotes were retired than there can be sessions")
        for zygote in zygotes:
            if not zygote.retired:
                zygote.retired = True
                self._start_zygote(zygote.profile)

    def _answer(self, message: dict[str, Any], make: Callable[[], tuple[dict[str, Any], list[int]]]) -> None:
        try:
            about, fds = make()
        except OSError as error:
            about, fds = {"error": str(error)}, []
        try:
            protocol.send_message(self._worker, message | about, fds)
        finally:
            close_all(fds)

    def _handle_dead_zygotes(self) -> None:
        for zygote in list(self._zygotes.values()):
            if zygote.process.poll() is None:
                continue
            if zygote.process.returncode != 0:  # 0: the worker closed its socket
                log.warning("zygote %s (%s) ended with %s", zygote.number, zygote.profile, zygote.process.returncode)
            del self._zygotes[zygote.process.pid]
            if zygote.retired:
                continue
            young = time.monotonic() - zygote.started_at < YOUNG_S
            pause = min(self._pauses.get(zygote.profile, RESTART_PAUSE_S / 2) * 2, MAX_RESTART_PAUSE_S) if young else 0.0
            self._pauses[zygote.profile] = pause or RESTART_PAUSE_S / 2
            self._due.append((time.monotonic() + pause, zygote.profile))

    def _start_due(self) -> float | None:
        """Start the zygotes that are due. Returns how long until the next one."""
        now = time.monotonic()
        due, self._due = [e for e in self._due if e[0] <= now], [e for e in self._due if e[0] > now]
        for _, profile in due:
            self._start_zygote(profile)
        return min((at for at, _ in self._due), default=now) - now if self._due else None


def reap_orphans() -> None:
    """Reap the processes of killed jails: they die with it and are re-parented to the runner."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        pass


def serve(worker: socket.socket, options: RunnerOptions) -> None:
    """Serve one worker. If that fails, log why and tell the worker."""
    try:
        Runner(worker, options).run()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the worker is gone
    except BadRequest as error:
        log.error("closing the worker's connection, it sent a message that is not allowed: %s", error)
        _send_failed(worker, {"failed": f"the runner does not allow this: {error}"})
    except tiers.SandboxUnavailable as error:
        log.error("no zygote is started: %s", str(error).partition(";")[0])
        _send_failed(worker, {"failed": str(error), "missing": error.missing})
    except (OSError, uids.NoFreeUids) as error:
        log.error("the sandbox cannot be built: %s", error)
        _send_failed(worker, {"failed": str(error)})


def _send_failed(worker: socket.socket, message: dict[str, Any]) -> None:
    worker.setblocking(False)  # the worker may not be reading
    try:
        protocol.send_message(worker, message)
    except OSError:
        pass


class JsonLines(logging.Formatter):
    """The format of `exec_service.telemetry.logs`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name, "event": record.getMessage()}
        return json.dumps(line | ({"traceback": self.formatException(record.exc_info)} if record.exc_info else {}))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="exec-service runner", description=__doc__.splitlines()[0] if __doc__ else "")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fd", type=int, help="an inherited socket that is connected to the worker")
    where.add_argument("--socket", type=Path, help="a path to listen on; serves one worker after the other")
    parser.add_argument("--user-namespace", action="store_true", help="exit if root is the machine's root")
    add_arguments(parser)
    given = parser.parse_args(arguments)
    options = RunnerOptions.read(given)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if given.user_namespace and kernel.root_is_root():
        parser.exit(EXIT_UNAVAILABLE, NOT_IN_A_USER_NAMESPACE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which disconnects after draining
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if given.fd is not None:
        with socket.socket(fileno=given.fd) as worker:
            serve(worker, options)
        return
    listen(given.socket, options)


def listen(path: Path, options: RunnerOptions) -> None:
    """Serve one worker after the other until SIGTERM; a connected worker may drain and disconnect first."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        path.chmod(0o660)  # also for the folder's group: in a pod the worker is another user in another container
        listener.listen(1)
        log.info("listening on %s", path)
        while wake_read not in kernel.readable([listener.fileno(), wake_read]):
            worker, _ = listener.accept()
            # One process per worker: each sandbox needs namespaces of its own.
            command = [sys.executable, "-m", "worker.sandbox.runner", "--fd", str(worker.fileno()), *options.arguments()]
            try:
                process = subprocess.Popen(command, pass_fds=[worker.fileno()])
            except OSError as error:
                log.error("starting a process for this worker failed: %s", error)
                continue
            finally:
                worker.close()
            process.wait()
    path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
