"""A user without privileges gets a weaker sandbox that says so."""

import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_harness import ROOT, is_alive, serving

from worker.sandbox import tiers

NOBODY = 65534
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
# It has to find itself again, as the runner and the zygotes are started with it.
CAN_BE_USED = "import subprocess, sys, exec_service.cli.up\nsubprocess.run([sys.executable, '-c', ''], check=True)"


@pytest.fixture
def nobodys_python(tmp_path: Path) -> Iterator[str]:
    """An interpreter that a plain user can run: this one, or the system's with the packages of this one."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    if nobody_can_use(sys.executable):
        yield sys.executable
        return
    closed = [folder for folder in tmp_path.parents if not folder.stat().st_mode & stat.S_IXOTH]
    modes = {folder: stat.S_IMODE(folder.stat().st_mode) for folder in (tmp_path, *closed)}
    for folder, mode in modes.items():
        folder.chmod(mode | stat.S_IXOTH)
    try:
        python = system_python(tmp_path / "venv")
        if not nobody_can_use(python):
            pytest.skip("a plain user can run neither this interpreter nor the system's on this checkout")
        yield python
    finally:
        for folder, mode in modes.items():
            folder.chmod(mode)


def nobody_can_use(python: str) -> bool:
    tried = subprocess.run([*AS_NOBODY, python, "-c", CAN_BE_USED], cwd=ROOT, capture_output=True, timeout=120)
    return tried.returncode == 0


def system_python(folder: Path) -> str:
    """A virtual environment by hand, of the system's interpreter."""
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.symlink_to("/usr/bin/python3")
    return str(python)


def folders_of_nobody() -> list[Path]:
    return [path for path in Path(tempfile.gettempdir()).glob("exec-service-*") if path.stat().st_uid == NOBODY]


def test_plain_user_is_answered_in_a_weaker_tier_with_a_warning(nobodys_python: str) -> None:
    before = folders_of_nobody()
    with serving(command=[*AS_NOBODY, nobodys_python, "-m", "exec_service"]) as service:
        result = service.run("import os\nprint(6 * 7)")
        tier = result.sandbox.tier
        assert (result.status, result.stdout) == ("ok", "42\n")
        assert tier in ("C", "D")
        assert f"WARNING: the sandbox is of tier {tier}" in service.words
        missing = set(tiers.ALL_LAYERS) - set(result.sandbox.layers)
        assert missing >= {"uid"}
        assert all(f"{layer} (" in service.words for layer in missing)
        assert service.http.get("/readyz").json() == {"status": "ready", "tier": tier}
        assert service.run("open('/etc/passwd').read()").status == "error"
        assert service.run("x = b'x' * (3 << 30)").status in ("error", "memory_limit")
        assert service.run("while True: pass", limits={"wall_s": 0.5}).status == "timeout"
        pids = service.tree
        service.kill(signal.SIGTERM)
        assert service.wait() == 0
        assert "Traceback" not in service.words
    assert [pid for pid in pids if is_alive(pid)] == []
    assert folders_of_nobody() == before
