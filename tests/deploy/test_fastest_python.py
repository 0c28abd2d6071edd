"""PYTHON=fastest takes a Python only if the service can be installed with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chart_harness import ROOT

ENTIRE = f'exec "{sys.executable}" "$@"'
BROKEN = "echo 'this version is not active' >&2; exit 127"
WITHOUT_HEADERS = f'''cat > "$0.py" <<END
import sys, sysconfig
sysconfig.get_paths = lambda: {{"include": "/none"}}
exec(sys.argv[2])
END
exec "{sys.executable}" "$0.py" "$@"'''


def picked(folder: Path, **pythons: str) -> str:
    for name, script in pythons.items():
        path = folder / name.replace("_", ".")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.defpath}", "PYENV_ROOT": str(folder)}
    found = subprocess.run(
        ["/bin/sh", "deploy/fastest-python.sh"], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    return found.stdout.strip().removeprefix(f"{folder}/")


@pytest.mark.parametrize(
    ("pythons", "expected"),
    [
        ({"python3_12": ENTIRE, "python3_13": ENTIRE}, "python3.13"),
        ({"python3_12": ENTIRE, "python3_13": BROKEN}, "python3.12"),
        ({"python3_12": ENTIRE, "python3_13": WITHOUT_HEADERS}, "python3.12"),
        ({"python3_12": BROKEN, "python3_13": WITHOUT_HEADERS}, "python3"),
    ],
)
def test_the_first_python_that_is_complete_is_taken(tmp_path: Path, pythons: dict[str, str], expected: str) -> None:
    assert picked(tmp_path, **pythons) == expected


def test_pythons_of_pyenv_are_found(tmp_path: Path) -> None:
    (tmp_path / "versions" / "3.13.0" / "bin").mkdir(parents=True)
    found = picked(tmp_path, **{"versions/3_13_0/bin/python3_13": ENTIRE})
    assert found == "versions/3.13.0/bin/python3.13"
