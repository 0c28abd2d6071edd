"""Math-Verify as everybody would call it: in a plain interpreter, with its own defaults."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from worker.config import default_packages

PATIENCE_S = 600
PROGRAM = """
import json, logging, sys
from math_verify import parse, verify
logging.disable()
for answer, truth in json.load(sys.stdin):
    found = parse(truth, parsing_timeout=None)
    print(json.dumps([bool(verify(found, parse(answer, parsing_timeout=None), timeout_seconds=None)), bool(found)]))
"""


class Direct(NamedTuple):
    equal: bool
    found_truth: bool


def directly(pairs: Iterable[tuple[str, str]]) -> list[Direct]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(list(pairs)),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        env=os.environ | {"PYTHONPATH": default_packages()},
        cwd=Path(default_packages()),
    )
    return [Direct(*json.loads(line)) for line in done.stdout.splitlines()]
