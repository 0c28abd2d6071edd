"""Programs may run on another Python than the service."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from sandbox_harness import laboratory

from exec_service.cli import doctor
from worker.config import WorkerConfig, default_packages
from worker.sandbox import interpreter
from worker.sandbox.interpreter import find, own

SHOW = "import sys\nprint(sys.base_prefix, sys.executable)"


def stand_in(folder: Path, **facts: object) -> str:
    """A program that describes itself as the service's own Python with other facts."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{json.dumps(asdict(replace(own(), **facts)))}'\n")
    path.chmod(0o755)
    return str(path)


def packages_for(python: str, folder: Path) -> Path:
    (folder / ".python").symlink_to(python)
    folder.chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    yield
    find.cache_clear()


@pytest.fixture
def other() -> str:
    """Another Python of the service's version: its C part and its packages fit."""
    path = shutil.which("python{}.{}".format(*sys.version_info), path="/usr/bin:/usr/local/bin")
    try:
        if path is not None and find(path, Path(default_packages())).prefix != own().prefix:
            return path
    except OSError:
        pass
    pytest.skip("this machine has no second Python for which the sandbox's C part is built")


async def test_programs_run_on_the_python_that_the_setting_names(other: str) -> None:
    async with laboratory(program_python=other) as lab:
        assert (await lab.output(SHOW)).split() == [find(other, Path("/")).prefix, find(other, Path("/")).path]


async def test_programs_run_on_the_python_that_the_folder_of_packages_names(other: str, tmp_path: Path) -> None:
    async with laboratory(packages=str(packages_for(other, tmp_path))) as lab:
        assert (await lab.output(SHOW)).split()[0] == find(other, Path("/")).prefix


async def test_doctor_names_both_pythons(tmp_path: Path) -> None:
    config = WorkerConfig(program_python=stand_in(tmp_path, version="3.99.0"))
    assert f"{own().version} for the service and 3.99.0 for programs" in doctor.examine_python(config).why


def test_without_a_setting_or_a_link_programs_run_on_the_services_python(tmp_path: Path) -> None:
    assert find("", tmp_path) == own()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"version": "3.10.13"}, "is Python 3.10.13; programs need 3.11 or newer"),
        ({"suffix": ".cpython-399-x86_64-linux-gnu.so"}, "the sandbox's C part is not built for"),
    ],
)
def test_a_python_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path, facts: dict[str, str], words: str) -> None:
    with pytest.raises(OSError, match=words):
        find(stand_in(tmp_path, **facts), tmp_path)


@pytest.mark.parametrize("path", ["/bin/true", "/nowhere/python3"])
def test_what_is_no_python_is_refused_by_its_path(path: str) -> None:
    with pytest.raises(OSError, match=f"{path} is not a Python"):
        find(path, Path("/"))


def test_an_interpreter_describes_itself_without_the_services_packages() -> None:
    source = Path(interpreter.__file__).read_text()
    assert "msgspec" not in source and "from worker" not in source
