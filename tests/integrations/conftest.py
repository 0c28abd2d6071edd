"""Clients of other services, as their projects publish them, against a running service: `make test-integrations`.

Each client has a virtual environment of its own below `.integrations`, made by the Makefile; a client that could not be
installed is skipped with pip's reason. Not part of `make test`, which installs nothing of others.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VENVS = Path(os.environ.get("EXEC_INTEGRATIONS", ROOT / ".integrations"))
PROGRAMS = Path(__file__).parent / "programs"

collect_ignore_glob = [] if VENVS.is_dir() and "EXEC_INTEGRATIONS" in os.environ else ["test_*.py"]

RunClient = Callable[..., str]


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    from service_harness import serving

    with serving(profiles='{"bare": [], "data": ["numpy", "pandas", "matplotlib.pyplot"]}') as service:
        yield service.url


@pytest.fixture
def run_client(url: str) -> RunClient:
    def run(venv: str, program: str) -> str:
        """What the program printed, run by the interpreter of that environment."""
        python = VENVS / venv / "bin" / "python"
        if not (VENVS / venv / "installed").exists():
            reason = VENVS / venv / "pip.log"
            pytest.skip(f"{venv} cannot be installed here: {reason.read_text()[-300:] if reason.exists() else 'not tried'}")
        done = subprocess.run(
            [str(python), str(PROGRAMS / program), url],
            capture_output=True,
            text=True,
            timeout=120,
            env={"PATH": os.environ["PATH"], "no_proxy": "*"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
