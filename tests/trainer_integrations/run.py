"""The adapters with the real packages: a venv each in .venvs, and one service for all of them.

    python tests/trainer_integrations/run.py [NAME …]

Packages that pip cannot install without a GPU, or that are not on an index, are tested with stand-ins only and listed so.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "service"), str(ROOT / "tests" / "worker"), str(ROOT / "tests"), str(ROOT)]
TORCH = "torch==2.13.0"
COMMON = ["httpx>=0.27", "msgspec>=0.19", "pytest>=8", "pytest-asyncio>=0.24", "fastapi>=0.115"]


class Package(NamedTuple):
    needs: list[str]
    alone: list[str] = []  # installed without what they ask for: that has parts for GPUs


PACKAGES = {
    "skyrl": Package(["skyrl-gym==0.4.0"]),
    "verifiers": Package(["verifiers==0.4.0"]),
    "trl": Package([TORCH, "trl==1.16.0"]),
    "tinker": Package([TORCH, "tinker-cookbook==0.5.8"]),
    "verl": Package(
        [TORCH, "transformers>=5.5.3,<5.11", "ray>=2.41", "cachetools", "omegaconf", "hydra-core", "pydantic", "numpy>=2",
         "tensordict>=0.8,<=0.10", "codetiming", "dill", "pandas", "torchdata", "accelerate", "peft", "datasets"],
        ["verl==0.9.1"],
    ),
    "openrlhf": Package([TORCH, "aiohttp", "numpy>=2", "pylatexenc", "sympy", "transformers==5.15.0"], ["openrlhf==0.11.2"]),
}  # fmt: skip
STAND_IN_ONLY = {"slime": "has no package on PyPI (0.0.0 is a placeholder)", "nemo": "NeMo-RL and NeMo Gym are not on PyPI"}


def prepare(name: str, package: Package) -> Path:
    folder = ROOT / ".venvs" / name
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    wanted = repr((package, COMMON))
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *COMMON, *package.needs], check=True)
        if package.alone:
            subprocess.run([*install, "--no-deps", *package.alone], check=True)
        stamp.write_text(wanted)
    return python


def check(name: str, python: Path, url: str) -> bool:
    variables = os.environ | {"EXEC_TEST_URL": url, "EXEC_REAL": name, "PYTHONPATH": str(ROOT)}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/trainer_integrations", "-k", name]
    return subprocess.run(command, cwd=ROOT, env=variables).returncode == 0


def main(names: list[str]) -> int:
    from service_harness import serving

    found: dict[str, str] = {}
    with serving() as service:
        for name in names or PACKAGES:
            print(f"== {name}", flush=True)
            try:
                python = prepare(name, PACKAGES[name])
            except subprocess.CalledProcessError as error:
                found[name] = f"NOT INSTALLED ({error.returncode})"
                continue
            found[name] = "ok, real package" if check(name, python, service.url) else "FAILED"
    for name, words in found.items():
        print(f"{name:10} {words}")
    for name, why in STAND_IN_ONLY.items():
        print(f"{name:10} stand-in only: {why}")
    return 0 if all(words.startswith("ok") for words in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
