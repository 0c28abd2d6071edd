"""The adapters with the real packages: a venv each in .venvs, and one service for all of them.

    python tests/trainer_integrations/run.py [NAME …]

A venv also sees the packages of the environment that runs this file, so torch is not installed again. The table of what ran is
written to docs/results/integrations.md; a run of some packages replaces their rows only. Packages that are not on an index are
tested with stand-ins and listed so.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "results" / "integrations.md"
HEAD = """# Adapters with the real packages

Written by `make test-integrations`: each package in an environment of its own, against a live service, on a CPU.

| name | package | Python | outcome |
| --- | --- | --- | --- |
"""
sys.path += [str(ROOT / "tests" / "service"), str(ROOT / "tests" / "worker"), str(ROOT / "tests"), str(ROOT)]
TORCH = "torch==2.13.0"
COMMON = ["httpx>=0.27", "msgspec>=0.19", "pytest>=8", "pytest-asyncio>=0.24", "fastapi>=0.115"]


class Package(NamedTuple):
    name: str  # on the index, with its version
    needs: list[str] = []
    alone: bool = False  # installed without what it asks for, which has parts for GPUs
    python: str = ""  # a version that it needs; empty: this one


PACKAGES = {
    "skyrl": Package("skyrl-gym==0.4.0"),
    "verifiers": Package("verifiers==0.4.0"),
    "trl": Package("trl==1.16.0", [TORCH, "transformers>=5,<6", "accelerate", "datasets", "pyyaml"]),
    "tinker": Package("tinker-cookbook==0.5.8", [TORCH]),
    "verl": Package(
        "verl==0.9.1",
        [TORCH, "transformers>=5.5.3,<5.11", "ray>=2.41", "cachetools", "omegaconf", "hydra-core", "pydantic", "numpy>=2",
         "tensordict>=0.8,<=0.10", "codetiming", "dill", "pandas", "torchdata", "accelerate", "peft", "datasets"],
        alone=True,
    ),
    "openrlhf": Package(
        "openrlhf==0.11.2", [TORCH, "aiohttp", "numpy>=2", "pylatexenc", "sympy", "transformers==5.15.0"], alone=True
    ),
    "nemo_gym": Package("nemo-gym==0.4.0", python="3.12"),
}  # fmt: skip
STAND_IN_ONLY = {
    "slime": "not on an index (0.0.0 is a placeholder); tested with a stand-in of its `Sample`",
    "nemo_rl": "not on an index (0.0.0 is a placeholder); tested with a stand-in of its interfaces",
}


class NotInstalled(Exception):
    pass


def prepare(name: str, package: Package) -> Path:
    folder = ROOT / ".venvs" / name
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    wanted = repr((package, COMMON))
    if not stamp.exists() or stamp.read_text() != wanted:
        base = _interpreter(package.python)
        shutil.rmtree(folder, ignore_errors=True)
        _run([base, "-m", "venv", str(folder)])
        if not package.python:
            _share(folder)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*install, *COMMON, *package.needs, *([] if package.alone else [package.name])])
        if package.alone:
            _run([*install, "--no-deps", package.name])
        stamp.write_text(wanted)
    return python


def _share(folder: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _interpreter(version: str) -> str:
    if not version:
        return sys.executable
    candidates = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}*/bin/python"))]
    for one in candidates:
        if one and subprocess.run([one, "-c", ""], capture_output=True).returncode == 0:
            return one
    raise NotInstalled(f"needs Python {version}")


def _run(command: list[str]) -> None:
    if subprocess.run(command).returncode:
        raise NotInstalled("pip failed")


def check(name: str, python: Path, url: str) -> str:
    variables = os.environ | {"EXEC_TEST_URL": url, "EXEC_REAL": name, "PYTHONPATH": str(ROOT)}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/trainer_integrations", "-k", name]
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    counted = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", done.stdout.rstrip().rpartition("\n")[2])
    return ("" if done.returncode == 0 else "FAILED: ") + ", ".join(counted)


def version(python: Path) -> str:
    code = "import platform; print(platform.python_version())"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True).stdout.strip()


def write(rows: dict[str, str]) -> None:
    known = {}
    if TABLE.exists():
        known = {line.split("|")[1].strip(): line for line in TABLE.read_text().splitlines() if line.startswith("| ")}
    rows = {**known, **rows, **{name: f"| {name} | none | | {why} |" for name, why in STAND_IN_ONLY.items()}}
    TABLE.write_text(HEAD + "".join(rows[name] + "\n" for name in (*PACKAGES, *STAND_IN_ONLY) if name in rows))


def main(names: list[str]) -> int:
    from service_harness import serving

    rows: dict[str, str] = {}
    failed = False
    with serving() as service:
        for name in names or PACKAGES:
            package = PACKAGES[name]
            print(f"== {name}", flush=True)
            try:
                python = prepare(name, package)
                found, ran = check(name, python, service.url), version(python)
            except NotInstalled as error:
                found, ran = f"NOT RUN: {error}", package.python
            failed |= not found[:1].isdigit()
            rows[name] = f"| {name} | {package.name.replace('==', ' ')} | {ran} | {found} |"
            write(rows)
    print(TABLE.read_text())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
