"""`make release`: wheels always, images if there is an engine; and the support matrix says what its records say."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VERSION = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[0]
SUPPORT: dict[str, Any] = runpy.run_path(str(ROOT / "deploy" / "support.py"))
RECORD: dict[str, Any] = runpy.run_path(str(ROOT / "tests" / "support_record.py"))


def release(folder: Path, path: Path, python: str) -> str:
    (path / "python").write_text(python)
    (path / "python").chmod(0o755)
    environment = {"PATH": f"{path}:/usr/bin:/bin", "BIN": str(path), "REGISTRY": "registry.example/rl", "HOME": str(path)}
    command = ["sh", "deploy/release.sh", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_without_an_engine_the_wheels_are_made_and_the_words_say_what_is_missing(tmp_path: Path) -> None:
    for engine in ("docker", "podman"):  # there may be real ones
        (tmp_path / engine).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / engine).chmod(0o755)
    said = release(tmp_path / "dist", tmp_path, f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    wheels = sorted(path.name.split("-")[0] for path in (tmp_path / "dist").glob("*.whl"))
    assert wheels == ["exec_client", "exec_service", "grpo_roc"]
    assert len((tmp_path / "dist" / "SHA256SUMS").read_text().splitlines()) == 3
    assert "No images: neither docker nor podman answers" in said


def test_with_an_engine_every_image_is_built_with_the_version(tmp_path: Path) -> None:
    (tmp_path / "docker").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (tmp_path / "docker").chmod(0o755)
    release(tmp_path / "dist", tmp_path, '#!/bin/sh\nmkdir -p "$2" && touch "$2/one.whl"\n')
    asked = (tmp_path / "asked").read_text().splitlines()
    names = [f"registry.example/rl/exec-service-{name}:{VERSION}" for name in ("gateway", "worker", "runner")]
    assert [line.split(" -t ")[1].split()[0] for line in asked if line.startswith("build")] == names


def test_support_page_is_made_from_the_records_and_only_from_them() -> None:
    records = [json.loads(path.read_text()) for path in (ROOT / "docs" / "support").glob("*.json")]
    page = (ROOT / "docs" / "support.md").read_text()
    assert records and page == SUPPORT["page"](records)
    assert all(record["machine"]["python"] in page for record in records)


def test_run_of_tests_records_its_machine_and_its_outcome(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "tests/docs/test_contributing.py"]
    environment = os.environ | {"EXEC_SUPPORT_RECORD": str(tmp_path)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=120)
    [file] = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert record["tests"] == {"tests/docs": {"passed": 2}} and record["machine"] == RECORD["machine"]()
