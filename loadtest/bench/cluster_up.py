"""Redis, a gateway and a worker as one process tree on this machine: `python -m loadtest.cluster_up PORT`. For measurements."""

from __future__ import annotations

import signal
import sys
import threading

from loadtest.parts import Part
from loadtest.redis_server import RedisServer


def main() -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with RedisServer() as redis, Part.gateway(redis.url, "--port", sys.argv[1]), Part.worker(redis.url):
        stop.wait()


if __name__ == "__main__":
    main()
