"""How tests/vm/run.sh starts its machine, seen with an emulator that only writes down what it is asked for."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from chart_harness import ROOT

EMULATOR = """#!/bin/sh
echo "$@" >"$LOG"
echo "the machine ends: $ENDS"
"""


def start(folder: Path, *command: str, ends: int = 0, machine: str = "") -> tuple[int, str, str]:
    """The exit code of run.sh in a checkout that has a kernel already, the emulator's arguments, and what the machine runs."""
    checkout, programs = folder / "checkout", folder / "programs"
    kernel = checkout / ".tools/vm/kernel-6.1"
    for path in (kernel / "boot", kernel / "lib/modules", programs):
        path.mkdir(parents=True)
    (kernel / "boot/vmlinuz-6.1").touch()
    shutil.copytree(ROOT / "tests/vm", checkout / "tests/vm")
    for name, text in {"qemu-system-x86_64": EMULATOR, "busybox": "", "cpio": "#!/bin/sh\ncat\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    told = {"PATH": f"{programs}:{os.environ['PATH']}", "LOG": str(folder / "log"), "ENDS": str(ends), "MACHINE": machine}
    run = ["sh", str(checkout / "tests/vm/run.sh"), *command]
    done = subprocess.run(run, env=os.environ | told, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, (folder / "log").read_text(), (checkout / ".tools/vm/command").read_text()


@pytest.mark.parametrize("ends", [0, 1])
def test_the_machine_has_this_checkout_and_says_how_its_command_ended(tmp_path: Path, ends: int) -> None:
    code, arguments, command = start(tmp_path, "echo", "two words", ends=ends)
    assert code == ends
    assert f"command={tmp_path}/checkout/.tools/vm/command" in arguments
    assert command == f"cd \"{tmp_path}/checkout\"\n'echo' 'two words' "


def test_make_starts_it() -> None:
    plain = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "--no-print-directory", "-n", "test-vm", "MACHINE=no-userns", "CMD=true"]
    made = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=60)
    assert made.stdout.splitlines()[-1] == "MACHINE=no-userns sh tests/vm/run.sh true"


def test_the_machine_has_control_groups_v2_and_runs_the_isolation_tests(tmp_path: Path) -> None:
    _, arguments, command = start(tmp_path)
    assert "cgroup_no_v1=all" in arguments
    assert command.endswith("'sh' 'tests/vm/checks.sh' ")


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ("", "machine=debian-6.1 user=root "),
        ("no-landlock", "machine=no-landlock user=root "),
        ("no-landlock", " lsm=lockdown,yama "),
        ("no-userns", "machine=no-userns user=nobody "),
        ("delegated", "machine=delegated user=nobody "),
    ],
)
def test_each_machine_has_its_kernel_parameters_and_its_user(tmp_path: Path, machine: str, words: str) -> None:
    _, arguments, _ = start(tmp_path, machine=machine)
    assert words in arguments


def test_a_machine_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="unknown machine: no-kernel"):
        start(tmp_path, machine="no-kernel")
