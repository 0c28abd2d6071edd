"""docs/packages.md is true: its commands are run as they are written, with a stand-in for the package that they name."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from worker.languages import LANGUAGES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "packages.md"
METADATA = "Metadata-Version: 2.1\nName: humanize\nVersion: 1.0\n"


def block(begins: str, language: str = "sh") -> str:
    """The fenced block of the page that begins so."""
    [found] = [
        text
        for text in re.findall(rf"^```{language}[^\n]*\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
        if text.startswith(begins)
    ]
    return str(found)


def make_wheel(folder: Path) -> None:
    """As pip finds it, without a network."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "humanize-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("humanize/__init__.py", "def intcomma(number):\n    return f'{number:,}'\n")
        wheel.writestr("humanize-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("humanize-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("humanize-1.0.dist-info/RECORD", "")


def shell(words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("EXEC_")}
    path = f"{Path(sys.executable).parent}:{own['PATH']}"
    return subprocess.run(
        ["sh", "-euc", words], cwd=cwd, env=own | {"PATH": path} | variables, capture_output=True, text=True, timeout=300
    )


def test_folder_of_ones_own_is_what_programs_may_import(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("the sandbox of this test needs root")
    make_wheel(tmp_path / "wheels")
    found = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PYTHONPATH": str(ROOT)}
    commands = block("python -m pip install --target my-packages")
    ended = shell(commands, tmp_path, **found)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == block("12", "text").strip()
    warm = shell(commands.replace("exec-service run -c", "exec-service run --json -c"), tmp_path, **found)
    assert json.loads(warm.stdout.splitlines()[-1])["sandbox"]["profile"] == "mine"


def test_line_in_packages_txt_is_installed_by_the_set_up_and_by_the_runners_image() -> None:
    line, install, run = block("echo humanize").splitlines()
    assert line == "echo humanize >> worker/sandbox/packages.txt" and (ROOT / "worker" / "sandbox" / "packages.txt").is_file()
    assert install == "make install" and re.search(r"^install:", (ROOT / "Makefile").read_text(), re.M)
    assert "-r worker/sandbox/packages.txt" in (ROOT / "deploy" / "setup.sh").read_text()
    assert run.startswith(".venv/bin/exec-service run -c ")
    build = shlex.split(block("docker build"))
    assert "-r worker/sandbox/packages.txt" in (ROOT / build[build.index("-f") + 1]).read_text()


def test_image_on_top_of_the_runners_installs_where_the_runner_looks() -> None:
    words = (ROOT / "deploy" / "runner.Dockerfile").read_text()
    first, command = block("FROM", "dockerfile").splitlines()
    [folder] = re.findall(r"--target (\S+)", command)
    assert first.startswith("FROM ") and f'"--packages", "{folder}"' in words and "USER 0" in words


def test_values_of_the_chart_name_the_image_and_add_the_profile() -> None:
    if not (helm := shutil.which("helm", path=ROOT / ".tools" / "bin")):
        pytest.skip("helm is not there; `make test` fetches it")
    words = shlex.split(block("helm -n exec upgrade").replace("\\\n", " "))
    assert words[:6] == ["helm", "-n", "exec", "upgrade", "exec", "helm/exec-service"]
    given = [word for word in words[6:] if word != "--reuse-values"]
    values = ["--values", "helm/exec-service/ci/minimal-values.yaml"]
    done = subprocess.run(
        [helm, "template", "exec", "helm/exec-service", *values, *given], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    objects = [found for found in yaml.safe_load_all(done.stdout) if found]
    [config] = [found["data"] for found in objects if found["kind"] == "ConfigMap" and "EXEC_PROFILES" in found.get("data", {})]
    profiles = json.loads(config["EXEC_PROFILES"])
    assert profiles["mine"] == ["humanize"] and profiles["bare"] == []
    assert "exec-service-runner:0.1.0-mine" in done.stdout


def test_client_page_names_every_language() -> None:
    [row] = [line for line in (ROOT / "docs" / "client.md").read_text().splitlines() if line.startswith("| `language` |")]
    assert set(LANGUAGES) <= set(re.findall(r"`(\w+)`", row))


def test_help_and_chart_say_how_many_slots_there_are_by_default() -> None:
    from exec_service.cli.main import build_parser
    from worker.config import default_slots, usable_cores

    assert default_slots() in (3 * usable_cores(), 895)
    for name in ("up", "worker"):
        [commands] = [action.choices for action in build_parser()._actions if action.choices and "up" in action.choices]
        assert "(default: three for every core)" in " ".join(commands[name].format_help().split())  # type: ignore[index, call-overload]
    assert "Two slots for each core" not in (ROOT / "helm" / "exec-service" / "values.yaml").read_text()
