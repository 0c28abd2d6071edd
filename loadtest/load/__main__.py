"""Starts locust with the users of locustfile.py, and a service unless `--url` names one: `make load`.

    python -m loadtest.load --users 50 --time 60s --shape step
    python -m loadtest.load --shape burst --mix std      45,000 calls in flight at once
    python -m loadtest.load --url http://gateway:8080 --web        the page is at http://127.0.0.1:8089
    python -m loadtest.load --only BatchUser,SessionUser -- --csv run1 --html run1.html

Arguments after -- are passed to locust.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path

from loadtest.support.processes import ROOT, Part, exit_on_sigterm
from worker.config import usable_cores

LOCUSTFILE, BURST_USERS = Path(__file__).with_name("locustfile.py"), Path(__file__).with_name("burst_users.py")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="", help="of a running service; by default one is started")
    parser.add_argument("--web", action="store_true", help="show locust's web page and wait for its start button")
    parser.add_argument("--users", type=int, help="(default 24; of a burst 30)")
    parser.add_argument("--time", help="such as 90s or 10m (default 60s; of a burst at most 15m)")
    parser.add_argument("--shape", choices=("steady", "step", "burst"), default="steady")
    parser.add_argument("--mix", choices=("rollout", "std", "slow"), default="rollout")
    parser.add_argument("--processes", type=int, default=max(2, usable_cores() // 2), help="of locust (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="CLASSES", help="of users, separated by commas (default: all)")
    parser.add_argument("rest", nargs="*", help="options of locust, after --")
    given = parser.parse_args(argv)
    given.users = given.users or (30 if given.shape == "burst" else 24)
    given.time = given.time or ("15m" if given.shape == "burst" else "60s")
    return given


def command(given: argparse.Namespace, url: str) -> list[str]:
    file, users = (BURST_USERS, given.users + 1) if given.shape == "burst" else (LOCUSTFILE, given.users)
    words = [sys.executable, "-m", "locust", "-f", str(file), "--host", url, "--users", str(users)]
    words += ["--spawn-rate", str(users), "--run-time", given.time]
    words += ["--mix", given.mix, "--shape", given.shape, "--processes", str(given.processes)]
    words += [] if given.web else ["--headless", "--only-summary"]
    return [*words, *given.rest, *filter(None, given.only.split(","))]


def main(argv: list[str] | None = None) -> int:
    given = parse(argv)
    with contextlib.ExitStack() as stack:
        url = given.url or stack.enter_context(Part.up()).url
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command(given, url), env=environment).returncode


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
