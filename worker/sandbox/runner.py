"""The runner: the one process with privileges. Keeps the jails and their zygotes alive and hands the worker a socket to each.

It has no network, no secrets and never sees a call. It lives as long as its worker's connection: when that ends, everything in
the jails dies and the runner removes what it made. It does not trust its worker: the command line (`runner_options.py`) says
what a worker can have, and each message is checked (`runner_requests.py`). A message that is not allowed ends the connection.

    worker: {"configure": {...}}       once, first: slots, sessions, profiles, and a tier if it has to be stronger than ours
    runner: {"ready": {...}}           tier, layers, what is missing and why, set-up steps, languages
    runner: {"failed": "words"}        why there is no sandbox, or why the connection ends
    runner: {"zygote": {...}} + fd     for each zygote, again after each restart
    worker: {"recycle": number}        this zygote does not answer: replace it
    worker: {"retire": number}         start another beside this one, which ends when the worker lets it go
    worker: {"place": index}           the control group of a session
    runner: {"place": index, ...} + fds     its files, and how they are to be read
    worker: {"leaf": [index, leaf]}    and of one process in it
    runner: {"leaf": [...], ...} + fds
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from worker import languages
from worker.sandbox import kernel, memory, protocol, runner_requests, tiers, uids
from worker.sandbox.runner_host import Ground
from worker.sandbox.runner_options import UIDS, RunnerOptions, add_arguments
from worker.sandbox.runner_requests import BadRequest, Configure, Request

log = logging.getLogger("runner")

SLOTS_PER_ZYGOTE = 6  # it forks one program after the other
RESTART_PAUSE_S = 0.2  # after a zygote died young; doubled each time, up to
RESTART_PAUSE_MOST_S = 10.0
YOUNG_S = 30.0
RETIRED_MORE = 16  # retired zygotes without a session: those that were let go of and have not ended yet

EXIT_UNAVAILABLE = 69  # sysexits
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
    retired: bool = False  # another one was started in its place


class TooWeak(Exception):
    """The sandbox that can be built here is below the tier that is required."""

    def __init__(self, words: str, missing: dict[str, str]) -> None:
        super().__init__(words)
        self.missing = missing


class Runner:
    def __init__(self, worker: socket.socket, options: RunnerOptions) -> None:
        self._worker = worker
        self._options = options
        self._zygotes: dict[int, Zygote] = {}
        self._next_number = 0
        self._pauses: dict[str, float] = {}
        self._due: list[tuple[float, str]] = []  # when to start which profile again

    def run(self) -> None:
        first = runner_requests.receive(self._worker)
        if first is None:
            return
        self._wishes = self._allowed(first.configure)
        steps = _native_steps()
        kernel.adopt_orphans()
        options, slots = self._options, self._wishes.slots
        with Ground(options.packages, slots, options.uid_base, options.fault_injection) as self._ground:
            self._found = self._probe(steps, options.mask_layers)
            self._check_tier()
            self._tell_ready(steps)
            try:
                for profile in self._wishes.profiles:
                    for _ in range(max(1, slots // SLOTS_PER_ZYGOTE)):
                        self._start_zygote(profile)
                self._tend()
            finally:
                self._kill_zygotes()

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

    def _check_tier(self) -> None:
        """Fail closed: where the sandbox is too weak, for us or for the worker, no zygote is started."""
        tier = tiers.tier_of(self._found.layers)
        for wanted in (self._options.min_tier, self._wishes.min_tier):
            if not tiers.at_least(tier, wanted):
                missing = self._found.missing
                raise TooWeak(tiers.shortfall(tier, wanted, self._found.layers, missing), missing)

    def _probe(self, steps: list[str], mask: tuple[str, ...]) -> Any:
        from worker.sandbox.probe import probe  # needs the C part, whose absence `_native_steps` explains

        masked = dict.fromkeys(mask, "masked by configuration")
        start = lambda outer, layers, stderr: self._ground.start_zygote(outer, layers, [], stderr)  # noqa: E731
        return probe(start, steps, self._ground.outers, self._ground.missing | masked)

    def _tell_ready(self, steps: list[str]) -> None:
        layers = self._found.layers
        ready = {
            "tier": tiers.tier_of(layers),
            "layers": layers,
            "missing": self._found.missing,
            "steps": steps,
            "languages": languages.paths(),
            "memory": memory.usable(),
        }
        protocol.send_message(self._worker, {"ready": ready})

    def _start_zygote(self, profile: str) -> None:
        process, link = self._ground.start_zygote(self._found.outer, self._found.layers, self._wishes.profiles[profile])
        with link:
            zygote = Zygote(self._next_number, profile, process, time.monotonic())
            self._next_number += 1
            self._zygotes[process.pid] = zygote
            protocol.send_message(self._worker, {"zygote": {"number": zygote.number, "profile": profile}}, [link.fileno()])

    def _tend(self) -> None:
        """Until the worker is gone: replace what dies, kill what the worker finds silent."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write)
        self._notice_dead()  # what died before there was a signal for it
        reap_orphans()
        while True:
            ready = kernel.readable([self._worker.fileno(), wake_read], self._start_due())
            if wake_read in ready:
                os.read(wake_read, 4096)
                self._notice_dead()
                reap_orphans()
            if self._worker.fileno() in ready:
                request = runner_requests.receive(self._worker)
                if request is None:
                    return
                self._handle(request)

    def _handle(self, request: Request) -> None:
        if request.recycle is not None:
            self._recycle(self._known(request.recycle))
        elif request.retire is not None:
            self._retire(self._known(request.retire))
        elif request.place is not None:
            self._answer_place(self._session_place(request.place))
        elif request.leaf is not None:
            self._answer_leaf(self._session_place(request.leaf[0]), request.leaf[1])
        else:
            raise BadRequest("configure is for the first message only")

    def _known(self, number: int) -> int:
        """Of a zygote that there is, or was."""
        if number >= self._next_number:
            raise BadRequest(f"there was no zygote {number}")
        return number

    def _session_place(self, index: int) -> int:
        """The slots have control groups of their own, which are not handed out."""
        slots, sessions = self._wishes.slots, self._wishes.sessions
        if not slots <= index < slots + sessions:
            raise BadRequest(f"{index} is not a session's place: those are {slots} to {slots + sessions - 1}")
        return index

    def _retire(self, number: int) -> None:
        # A retired zygote stays for its sessions, so there are no more of them than sessions; some are about to end.
        if sum(zygote.retired for zygote in self._zygotes.values()) > self._wishes.sessions + RETIRED_MORE:
            raise BadRequest("more zygotes were retired than there can be sessions")
        for zygote in list(self._zygotes.values()):
            if zygote.number == number and not zygote.retired:
                zygote.retired = True
                self._start_zygote(zygote.profile)

    def _answer_place(self, index: int) -> None:
        layers = self._found.layers
        try:
            files, counters = self._ground.make_place(index, layers)
        except OSError as error:
            protocol.send_message(self._worker, {"place": index, "error": str(error)})
            return
        words = {
            "place": index,
            "uid": self._ground.uid_of(self._found.outer, index),
            "present": [fd is not None for fd in files],
            "counters": [fd is not None for fd in counters],
        }
        self._hand_over(words, [fd for fd in (*files, *counters) if fd is not None])

    def _answer_leaf(self, index: int, leaf: int) -> None:
        try:
            fds, by_pids = self._ground.make_leaf(index, leaf, self._found.layers)
        except OSError as error:
            protocol.send_message(self._worker, {"leaf": [index, leaf], "error": str(error)})
            return
        self._hand_over({"leaf": [index, leaf], "by_pids": by_pids}, fds)

    def _hand_over(self, words: dict[str, Any], fds: list[int]) -> None:
        try:
            protocol.send_message(self._worker, words, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _notice_dead(self) -> None:
        for zygote in list(self._zygotes.values()):
            if zygote.process.poll() is None:
                continue
            if zygote.process.returncode != 0:  # 0: it saw that the worker let it go
                log.warning("zygote %s (%s) ended with %s", zygote.number, zygote.profile, zygote.process.returncode)
            del self._zygotes[zygote.process.pid]
            if zygote.retired:
                continue
            young = time.monotonic() - zygote.started_at < YOUNG_S
            pause = min(self._pauses.get(zygote.profile, RESTART_PAUSE_S / 2) * 2, RESTART_PAUSE_MOST_S) if young else 0.0
            self._pauses[zygote.profile] = pause or RESTART_PAUSE_S / 2
            self._due.append((time.monotonic() + pause, zygote.profile))

    def _start_due(self) -> float | None:
        """Start what has waited long enough; how long until the next one."""
        now = time.monotonic()
        due, self._due = [e for e in self._due if e[0] <= now], [e for e in self._due if e[0] > now]
        for _, profile in due:
            self._start_zygote(profile)
        return min((at for at, _ in self._due), default=now) - now if self._due else None

    def _recycle(self, number: int) -> None:
        for zygote in self._zygotes.values():
            if zygote.number == number:
                zygote.process.kill()

    def _kill_zygotes(self) -> None:
        for zygote in self._zygotes.values():
            zygote.process.kill()
        for zygote in self._zygotes.values():
            zygote.process.wait()
        reap_orphans()


def reap_orphans() -> None:
    """What a killed jail leaves: its processes die with it, and we are the one they are given to."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        pass


class NotBuilt(Exception):
    pass


def _native_steps() -> list[str]:
    try:
        from worker.sandbox.inside import _zygote
    except ImportError as error:
        raise NotBuilt(
            "the sandbox's C part is not built: install gcc and Python's headers, then run `make install`"
        ) from error
    return list(_zygote.steps())


def serve(worker: socket.socket, options: RunnerOptions) -> None:
    """One worker's life. Words for whoever started us, and for the worker, when it ends before the worker wants it to."""
    try:
        Runner(worker, options).run()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the worker has gone, and with it the reason to be here
    except BadRequest as error:
        log.error("the worker's connection is closed, it sent what it may not send: %s", error)
        _tell_failed(worker, {"failed": f"the runner does not allow this: {error}"})
    except TooWeak as error:
        log.error("no zygote is started: %s", str(error).partition(";")[0])
        _tell_failed(worker, {"failed": str(error), "missing": error.missing})
    except (OSError, NotBuilt, uids.NoFreeUids) as error:
        log.error("the sandbox cannot be built: %s", error)
        _tell_failed(worker, {"failed": str(error)})


def _tell_failed(worker: socket.socket, words: dict[str, Any]) -> None:
    worker.setblocking(False)  # it need not be reading
    try:
        protocol.send_message(worker, words)
    except OSError:
        pass


class JsonLines(logging.Formatter):
    """As `exec_service.telemetry.logs` writes and reads them."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name, "event": record.getMessage()}
        return json.dumps(line | ({"traceback": self.formatException(record.exc_info)} if record.exc_info else {}))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="exec-service runner", description=__doc__.splitlines()[0] if __doc__ else "")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fd", type=int, help="an inherited socket that is connected to the worker")
    where.add_argument("--socket", type=Path, help="a path to listen on; one worker after the other is served")
    parser.add_argument("--user-namespace", action="store_true", help="end unless our root is somebody else on the machine")
    add_arguments(parser)
    given = parser.parse_args(arguments)
    options = RunnerOptions.read(given)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if given.user_namespace and kernel.root_is_root():
        parser.exit(EXIT_UNAVAILABLE, NOT_IN_A_USER_NAMESPACE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the worker's; it lets us go when it has drained
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if given.fd is not None:
        with socket.socket(fileno=given.fd) as worker:
            serve(worker, options)
        return
    listen(given.socket, options)


def listen(path: Path, options: RunnerOptions) -> None:
    """Serve one worker after the other until SIGTERM; the worker that is there then may drain and leave first."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        path.chmod(0o660)  # also for the folder's group: the worker of a pod is another user in another container
        listener.listen(1)
        log.info("listening on %s", path)
        while wake_read not in kernel.readable([listener.fileno(), wake_read]):
            worker, _ = listener.accept()
            # A process of its own: the namespaces that one worker's sandbox needs are not the next one's.
            command = [sys.executable, "-m", "worker.sandbox.runner", "--fd", str(worker.fileno()), *options.arguments()]
            try:
                process = subprocess.Popen(command, pass_fds=[worker.fileno()])
            except OSError as error:
                log.error("no process for this worker: %s", error)
                continue
            finally:
                worker.close()
            process.wait()
    path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
