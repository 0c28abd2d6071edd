"""Each built wheel works in an empty environment, with its dependencies and without the source tree."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from common import answers, wait_until

from loadtest.support.processes import free_port

ROOT = Path(__file__).parents[2]
TOPS = {"exec_client": {"exec_client", "exec_wire"}, "exec_service": {"exec_service", "worker"}, "grpo_roc": {"grpo_roc"}}
USE_CLIENT = """
import sys
from exec_client import Client
with Client(sys.argv[1]) as client:
    print(client.run("print(6 * 7)").stdout.strip())
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    run([sys.executable, str(ROOT / "deploy" / "wheels.py"), str(folder)], folder)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


def run(command: list[str], cwd: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("EXEC_", "PYTHON"))}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder: Path, *wheels: Path) -> Path:
    """The Python of an empty environment with these wheels; it sees this one's packages, but not our own: a .pth file does not
    follow the .pth file of an editable install."""
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--no-deps", "--no-index", *map(str, wheels)], folder)
    [own] = folder.glob("lib/python3*/site-packages")
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


def can_import(python: Path, *names: str) -> list[str]:
    program = f"import importlib.util as u; print(*[name for name in {names!r} if u.find_spec(name)])"
    return run([str(python), "-c", program], python.parent).split()


def test_a_wheel_has_its_own_packages_and_no_others(wheels: dict[str, Path]) -> None:
    assert wheels.keys() == TOPS.keys()
    for name, path in wheels.items():
        files = zipfile.ZipFile(path).namelist()
        assert {file.split("/")[0] for file in files if ".dist-info/" not in file} == TOPS[name]
        native = [file for file in files if file.endswith(".so")]
        assert (len(native) == 1) == (name == "exec_service") != path.name.endswith("-py3-none-any.whl"), path.name


def test_the_service_brings_the_built_editor_of_its_page_with_its_licenses(wheels: dict[str, Path]) -> None:
    files = {file for file in zipfile.ZipFile(wheels["exec_service"]).namelist() if "/web/" in file}
    built = {f"exec_service/web/built/{name}" for name in ("editor.js", "LICENSES.txt", "built-from")}
    assert files & built == (built if (ROOT / "exec_service/web/built/editor.js").is_file() else set())
    assert "exec_service/web/plain_editor.js" in files and not [file for file in files if "/web/editor/" in file]


def test_the_client_and_the_service_work_from_their_wheels(wheels: dict[str, Path], tmp_path: Path) -> None:
    client = environment(tmp_path / "client", wheels["exec_client"])
    assert can_import(client, *set().union(*TOPS.values())) in (["exec_client", "exec_wire"], ["exec_wire", "exec_client"])
    service = environment(tmp_path / "service", wheels["exec_client"], wheels["exec_service"])
    (packages := tmp_path / "packages").mkdir()
    url = f"http://127.0.0.1:{(port := free_port())}"
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("EXEC_", "PYTHON"))}
    started = subprocess.Popen(
        [service.parent / "exec-service", "up", "--port", str(port), "--grpc-port", "0", "--slots", "1", "--insecure"],
        cwd=tmp_path,
        env=variables | {"EXEC_PROFILES": '{"bare": []}', "EXEC_PACKAGES": str(packages)},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: answers(f"{url}/readyz") or started.poll() is not None, "ready", 90)
        assert run([str(client), "-c", USE_CLIENT, url], tmp_path) == "42\n"
    finally:
        started.terminate()
        started.wait(60)


def test_the_trainer_works_from_its_wheel(wheels: dict[str, Path], tmp_path: Path) -> None:
    python = environment(tmp_path / "trainer", wheels["exec_client"], wheels["grpo_roc"])
    assert can_import(python, "grpo_roc", "exec_service", "worker") == ["grpo_roc"]
    assert run([str(python), "-c", "import grpo_roc.integrations.service as s; print(s.url())"], tmp_path).startswith("http")
    run([str(python), "-m", "grpo_roc", "--help"], tmp_path)
