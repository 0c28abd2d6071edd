"""The versions that `make` installs are those of the pin files, for every supported Python."""

import json
import os
import re
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest
from chart_harness import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYTHONS = ["3.11.2", "3.12.0", "3.13.0", "3.14.0"]
SERVICE = ["constraints.txt", "dev-constraints.txt"]
each_python = pytest.mark.parametrize("python", PYTHONS)


def environment(python: str) -> dict[str, str]:
    return {
        "python_version": ".".join(python.split(".")[:2]),
        "python_full_version": python,
        "platform_machine": "x86_64",
        "sys_platform": "linux",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "extra": "",
    }


def pins(file: str, python: str) -> dict[str, str]:
    """The version of each package that this file names for this Python."""
    found: dict[str, str] = {}
    for line in (ROOT / "deploy" / file).read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        [specifier] = pin.specifier
        assert specifier.operator == "==" and "*" not in specifier.version, line
        if pin.marker is None or pin.marker.evaluate(environment(python)):
            assert canonicalize_name(pin.name) not in found, line
            found[canonicalize_name(pin.name)] = specifier.version
    return found


def unpinned(wanted: list[str], pinned: dict[str, str], python: str) -> list[str]:
    requirements = [Requirement(line) for line in wanted]
    return [
        str(requirement)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(environment(python))
        if not requirement.specifier.contains(pinned.get(canonicalize_name(requirement.name), "0"), prereleases=True)
        or canonicalize_name(requirement.name) not in pinned
    ]


@each_python
def test_every_requirement_of_the_project_has_a_pin_that_fits(python: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def wanted(*names: str) -> list[str]:
        lines = project["dependencies"] + [line for name in names for line in extras[name]]
        return [line for line in lines if not line.startswith("exec-service[")]

    assert unpinned(wanted("server", "grpc"), pins("constraints.txt", python), python) == []
    assert unpinned(wanted(*extras.keys() - {"ray"}), pins("dev-constraints.txt", python), python) == []
    assert unpinned(wanted("ray"), pins("ray-constraints.txt", python), python) == []


@each_python
def test_every_package_of_programs_has_a_pin(python: str) -> None:
    lines = (ROOT / "worker" / "sandbox" / "packages.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert wanted and unpinned(wanted, pins("packages-constraints.txt", python), python) == []


@each_python
def test_tests_run_with_the_versions_of_the_images(python: str) -> None:
    images, tests = (pins(file, python) for file in SERVICE)
    assert {name: tests.get(name) for name in images} == images


# Installs a stub of esbuild and two packages; the license of esbuild is not the bundle's.
NPM = """#!/bin/sh
echo "$@" >> "$NPM_LOG"
mkdir -p node_modules/@esbuild/linux-x64/bin node_modules/editor
echo words > node_modules/editor/LICENSE
echo words > node_modules/@esbuild/linux-x64/LICENSE
mkdir -p node_modules/@codemirror/view
echo words > node_modules/@codemirror/view/LICENSE
printf '#!/bin/sh\\necho bundle > built/editor.js\\n' > node_modules/@esbuild/linux-x64/bin/esbuild
chmod +x node_modules/@esbuild/linux-x64/bin/esbuild
"""


@pytest.fixture
def set_up(tmp_path: Path) -> Path:
    """A copy of the files that deploy/setup.sh reads, with a pip that logs its arguments, and stubs for the two interpreters:
    starting a real one five times (through pyenv's shims, half a second each) was most of the time of these tests."""
    files = "deploy exec_service/web/editor worker/sandbox/inside/native worker/sandbox/packages.txt pyproject.toml setup.py"
    for file in files.split():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / file).is_dir() else shutil.copy
        copy(ROOT / file, tmp_path / file)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text("#!/bin/sh\necho 3.11\n")
    (programs / "system-python").write_text(f"#!/bin/sh\necho {sysconfig.get_paths()['include']}\n")
    (programs / "npm").write_text(NPM)
    (programs / "pip").write_text('#!/bin/sh\necho "$@" >> pip.log\nmkdir -p .sandbox-packages-3.11.new\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return tmp_path


def run_set_up(folder: Path, *, extras: str = "dev,trainer", **settings: str) -> tuple[list[str], list[str], str]:
    """The command lines of pip and of npm in one run of deploy/setup.sh, and its words."""
    logs = [folder / "pip.log", folder / "npm.log"]
    for log in logs:
        log.write_text("")
    path = f"{folder / '.venv/bin'}:{os.environ['PATH']}"
    settings = {"PYTHON": ".venv/bin/system-python", "PATH": path, "NPM_LOG": str(logs[1])} | settings
    command = ["sh", "deploy/setup.sh", extras]
    done = subprocess.run(command, cwd=folder, env=os.environ | settings, check=True, capture_output=True, text=True)
    pip, npm = (log.read_text().splitlines() for log in logs)
    return pip, npm, done.stderr


def installs(folder: Path, **settings: str) -> list[str]:
    return run_set_up(folder, **settings)[0]


@pytest.mark.parametrize("extras", ["server", "dev", "dev,trainer"])
def test_set_up_installs_the_pinned_versions(set_up: Path, extras: str) -> None:
    *_, service, programs = installs(set_up, extras=extras)
    assert f"-e .[{extras}]" in service and re.findall(r"-c (\S+)", service) == [f"deploy/{file}" for file in SERVICE]
    assert "packages.txt" in programs and re.findall(r"-c (\S+)", programs) == ["deploy/packages-constraints.txt"]


def test_set_up_builds_with_the_build_tools_of_the_images(set_up: Path) -> None:
    tools, service, _ = installs(set_up)
    assert "-r deploy/build-constraints.txt" in tools and "--no-build-isolation" in service
    for image in ("gateway", "worker", "runner"):
        assert "-r deploy/build-constraints.txt" in (ROOT / "deploy" / f"{image}.Dockerfile").read_text()


@pytest.mark.parametrize(
    "file", ["constraints.txt", "dev-constraints.txt", "build-constraints.txt", "packages-constraints.txt"]
)
def test_set_up_installs_again_when_a_pin_has_changed(set_up: Path, file: str) -> None:
    assert installs(set_up) != []
    assert installs(set_up) == []
    path = set_up / "deploy" / file
    path.write_text(path.read_text() + "another==1.0\n")
    assert installs(set_up) != []


def test_newest_versions_are_tried_on_request_only(set_up: Path) -> None:
    lines = installs(set_up, PINS="newest")
    assert lines and not [line for line in lines if "constraints" in line]
    makefile = (ROOT / "Makefile").read_text()
    [recipe] = re.findall(r"^test-latest:.*\n((?:\t.*\n)+)", makefile, re.M)
    assert "PINS=newest" in recipe and makefile.count("PINS=newest") == 1 and "deploy/test.sh" in recipe


def test_set_up_builds_the_editor_once_from_its_lock_file(set_up: Path) -> None:
    built = set_up / "exec_service" / "web" / "built"
    _, [line], _ = run_set_up(set_up)
    assert line.startswith("ci ") and "--ignore-scripts" in line
    assert (built / "editor.js").read_text() == "bundle\n" and (built / "LICENSES.txt").read_text() == "words\nwords\n"
    assert run_set_up(set_up)[1:] == ([], "")
    lock = set_up / "exec_service" / "web" / "editor" / "package-lock.json"
    lock.write_text(lock.read_text() + "\n")
    assert len(run_set_up(set_up)[1]) == 1
    [newest] = run_set_up(set_up, PINS="newest")[1]
    assert newest.startswith("install --no-package-lock ")


@pytest.mark.parametrize("npm", [None, "#!/bin/sh\necho 'npm error code ENOTFOUND' >&2\nexit 1\n"], ids=["missing", "offline"])
def test_set_up_without_npm_keeps_the_plain_editor_and_says_what_to_do(set_up: Path, tmp_path: Path, npm: str | None) -> None:
    if npm is None:
        (set_up / ".venv" / "bin" / "npm").unlink()
    else:
        (set_up / ".venv" / "bin" / "npm").write_text(npm)
    path = without("npm", tmp_path / "programs")
    _, _, words = run_set_up(set_up, PATH=f"{set_up / '.venv/bin'}:{path}")
    [sentence] = [line for line in words.splitlines() if "editor" in line]
    assert ("npm is missing" if npm is None else "ENOTFOUND") in sentence and "make install" in sentence
    assert not (set_up / "exec_service" / "web" / "built").exists()


def without(program: str, folder: Path) -> Path:
    """A folder with links to all programs of PATH but one."""
    folder.mkdir()
    for part in reversed(os.environ["PATH"].split(":")):
        for file in Path(part).iterdir() if Path(part).is_dir() else ():
            if file.name != program:
                (folder / file.name).unlink(missing_ok=True)
                (folder / file.name).symlink_to(file)
    return folder


def test_the_editors_lock_file_names_versions_and_hashes_and_no_registry() -> None:
    text = (ROOT / "exec_service" / "web" / "editor" / "package-lock.json").read_text()
    packages = [package for path, package in json.loads(text)["packages"].items() if path]
    assert packages and all({"version", "integrity"} <= package.keys() for package in packages)
    assert "resolved" not in text and "://" not in text
