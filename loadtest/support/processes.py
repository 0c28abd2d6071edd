"""Processes of a cluster on this machine: each is a real `exec-service gateway`, `worker`, `jobs-worker` or `up`.

with RedisServer() as redis, Part.gateway(redis.url) as gateway, Part.worker(redis.url, slots=2) as worker:
    ...
"""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]
START_S, STOP_S = 240.0, 90.0
# Below the range that Linux takes the ports of outgoing connections from, so that no connection takes the port first.
_PORTS = range(10_000, 32_768)
_READY = re.compile(
    r"(?:is ready on (?P<url>http://\S+) \(|takes calls: .*\().*metrics: (?P<side>http://\S+)/metrics\)|takes chunks: "
    r"|exec-service is ready on (?P<up>http://\S+) "
)


def free_port() -> int:
    """A port for a server whose port must be known before it starts."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def environment(settings: Mapping[str, object]) -> dict[str, str]:
    """The environment of this process with these settings of the service, named in lower case, and no others."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("EXEC_")}
    return own | {f"EXEC_{name.upper()}": str(value) for name, value in settings.items()}


def exit_on_sigterm() -> None:
    """Exit through the `with` blocks on SIGTERM, so that started processes are closed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class PartFailed(Exception):
    """A process did not start or did not become ready; the message has its stderr."""


class Part:
    """One process of the service. It is ready when its log says so."""

    url = ""  # of a gateway
    side_url = ""  # of the metrics

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "exec_service", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            cwd=ROOT,
            env=dict(environment),
            start_new_session=True,
        )

    @classmethod
    def up(cls, *arguments: str, **settings: object) -> Self:
        """Gateway and worker in one process."""
        return cls(["up", "--port", "0", "--grpc-port", "0", *arguments], environment(settings))

    @classmethod
    def gateway(cls, redis: str, *arguments: str, **settings: object) -> Self:
        return cls(["gateway", "--port", "0", "--grpc-port", "0", *arguments], environment({"redis": redis, **settings}))

    @classmethod
    def worker(cls, redis: str, *arguments: str, **settings: object) -> Self:
        return cls(["worker", *arguments], environment({"redis": redis, **settings}))

    @classmethod
    def jobs_worker(cls, redis: str, *arguments: str, **settings: object) -> Self:
        return cls(["jobs-worker", *arguments], environment({"redis": redis, **settings}))

    @classmethod
    def echo(cls, redis: str, slots: int = 64, **settings: object) -> Self:
        return cls.worker(redis, "--runtime", "echo", "--insecure", slots=slots, **settings)

    def __enter__(self) -> Self:
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def words(self) -> str:
        """Its stderr so far."""
        return os.pread(self._stderr.fileno(), os.fstat(self._stderr.fileno()).st_size, 0).decode(errors="replace")

    def wait_ready(self) -> None:
        give_up = time.monotonic() + START_S
        while (ready := _READY.search(self.words)) is None:
            if not self.alive or time.monotonic() > give_up:
                words = self.words
                self.close()
                raise PartFailed(f"the process did not start:\n{words}")
            time.sleep(0.02)
        self.url, self.side_url = ready["url"] or ready["up"] or "", ready["side"] or ready["up"] or ""

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.side_url}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}

    def wait_for_workers(self, count: int, patience_s: float = 10.0) -> None:
        """Wait until this gateway sees `count` live workers."""
        give_up = time.monotonic() + patience_s
        while self.metrics()["exec_workers"] != count:
            if time.monotonic() > give_up:
                raise PartFailed(f"the gateway did not see {count} workers within {patience_s} s:\n{self.words}")
            time.sleep(0.05)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def wait(self, patience_s: float = STOP_S) -> int:
        return self.process.wait(patience_s)

    def close(self) -> None:
        if self.alive:
            self.kill(signal.SIGCONT)
            self.kill(signal.SIGTERM)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.kill()
                self.wait()
        with contextlib.suppress(OSError):
            self._stderr.close()
