"""Builds the wheels of the three distributions from one tree and one pyproject.toml: python deploy/wheels.py [FOLDER]

    exec-client   exec_wire, exec_client   pure Python; needs httpx and msgspec; the extra `grpc` for gRPC
    exec-service  exec_service, worker     with the sandbox's C part; depends on exec-client[grpc]
    grpo-roc      grpo_roc                 the trainer: pure Python; depends on exec-client; the extra `train` brings torch

The root project contains all packages and is for development (`pip install -e .`) and the images. Each wheel is built in a
temporary copy of its packages, with a pyproject.toml derived from the root's.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = {"exec-client": ["exec_wire", "exec_client"], "exec-service": ["exec_service", "worker"], "grpo-roc": ["grpo_roc"]}
DESCRIPTIONS = {
    "exec-client": "Client of exec-service, which runs programs in sandboxes",
    "grpo-roc": "GRPO-RoC trainer and adapters for other trainers, on top of exec-client",
}


def requirements(name: str, project: dict[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
    """The dependencies of a distribution and its extras."""
    extras, version = project["optional-dependencies"], project["version"]
    if name == "exec-client":
        return project["dependencies"], {"grpc": extras["grpc"]}
    if name == "exec-service":
        server = [line for line in extras["server"] if not line.startswith("exec-service[")]
        return [f"exec-client[grpc]=={version}", *server], {
            **{name: extras[name] for name in ("otel", "slurm", "ray")},
            "server": [],
        }
    return [f"exec-client=={version}"], {"train": extras["trainer"]}


def pyproject(name: str, root: dict[str, Any]) -> str:
    project, setuptools, packages = root["project"], root["tool"]["setuptools"], PACKAGES[name]
    dependencies, extras = requirements(name, project)
    fields = {key: project[key] for key in ("version", "description", "readme", "requires-python", "license")}
    fields |= {"name": name, "dependencies": dependencies}
    if name in DESCRIPTIONS:
        fields["description"] = DESCRIPTIONS[name]
    data = {key: files for key, files in setuptools["package-data"].items() if key.split(".")[0] in packages}
    tables = {
        "build-system": root["build-system"],
        "project": fields,
        "project.optional-dependencies": extras,
        "project.scripts": project["scripts"] if name == "exec-service" else {},
        "tool.setuptools.packages.find": {"include": [f"{package}*" for package in packages]},
        "tool.setuptools.package-data": data,
    }
    # Strings and lists of strings are written alike in JSON and TOML.
    lines = [
        [f"[{table}]", *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in rows.items())]
        for table, rows in tables.items()
    ]
    return "\n".join(line for table in lines for line in [*table, ""])


def build(name: str, root: dict[str, Any], wheels: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "pyproject.toml").write_text(pyproject(name, root))
        for file in ["README.md", "LICENSE", *(["setup.py"] if name == "exec-service" else [])]:
            shutil.copy(ROOT / file, folder)
        for package in PACKAGES[name]:
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--no-build-isolation", "--wheel-dir", str(wheels), str(folder)], check=True)


def main() -> None:
    wheels = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for name in PACKAGES:
        build(name, root, wheels)
    print(*sorted(path.name for path in wheels.glob("*.whl")), sep="\n")


if __name__ == "__main__":
    main()
