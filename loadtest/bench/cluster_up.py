"""Redis, a gateway and a worker as one process tree: `python cluster_up.py PORT`, for measurements.

The service is the one of the current folder's source tree, which may be another commit than this file: it is started by its
command line, and the log is not read.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2])

from loadtest.support.redis_server import RedisServer  # noqa: E402


def main() -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with RedisServer() as redis:
        environment = {**os.environ, "EXEC_REDIS": redis.url}
        gateway = ["gateway", "--port", sys.argv[1], "--grpc-port", "0"]
        commands = [[sys.executable, "-m", "exec_service", *words] for words in (gateway, ["worker"])]
        processes = [subprocess.Popen(command, env=environment) for command in commands]
        stop.wait()
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait()


if __name__ == "__main__":
    main()
