"""The images, built for real on a Debian base and started by podman, in a storage of their own.

Needs root, podman, buildah, runc and debootstrap (`sh deploy/tools.sh containers`). The network is the machine's.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Outside the checkout: images are mounted below it while they run, and nobody should remove such a tree by hand.
STATE = Path("/var/tmp/exec-service-deploy")
BASE = "localhost/exec-service-base:bookworm"
IMAGES = ("gateway", "worker", "runner")
WHEELS = STATE / "wheels"
BUILD_S = 1800.0


def image(name: str) -> str:
    return f"localhost/exec-service-{name}:test"


def environment() -> dict[str, str]:
    """Podman's settings. Its usual limits may be more than this machine's root is allowed to give."""
    STATE.mkdir(exist_ok=True)
    limits = [f'"{limit}"' for limit in hard_limits()]
    conf = STATE / "containers.conf"
    conf.write_text(
        f"[containers]\ndefault_ulimits = [{', '.join(limits)}]\n"
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    storage = STATE / "storage.conf"
    storage.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{STATE}/storage"\nrunroot = "/run/exec-service-deploy"\n')
    return os.environ | {"CONTAINERS_CONF": str(conf), "CONTAINERS_STORAGE_CONF": str(storage)}


def hard_limits() -> list[str]:
    """No more than what a root without CAP_SYS_RESOURCE may hand on; buildah itself goes down to the number of process ids."""
    files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1] % (1 << 63), 1 << 20)
    processes = int(Path("/proc/sys/kernel/pid_max").read_text()) // 2
    return [f"nofile={files}:{files}", f"nproc={processes}:{processes}"]


def podman(*arguments: str, timeout_s: float = 120.0, stdin: str | None = None, check: bool = True) -> str:
    done = subprocess.run(
        ["podman", *arguments], input=stdin, capture_output=True, text=True, timeout=timeout_s, env=environment()
    )
    if check and done.returncode != 0:
        raise RuntimeError(f"podman {' '.join(arguments)}: {done.stderr.strip()}\n{done.stdout.strip()}")
    return done.stdout


def build_all() -> None:
    build_base()
    fetch_wheels()
    for name in IMAGES:
        build(name)
    build_valkey()


def build_base() -> None:
    """In the place of the public image python:3.11-slim: the same Debian and Python, made from Debian's packages."""
    if podman("images", "--quiet", BASE).strip():
        return
    folder = STATE / "base"
    if not (folder / "usr/bin/python3").exists():
        include = "--include=python3,python3-venv,python3-dev,ca-certificates"
        subprocess.run(["debootstrap", "--variant=minbase", include, "bookworm", str(folder)], check=True, timeout=BUILD_S)
    pack = subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE)
    subprocess.run(["podman", "import", "-", BASE], stdin=pack.stdout, check=True, timeout=BUILD_S, env=environment())
    if pack.wait() != 0:
        raise RuntimeError("tar failed")


def fetch_wheels() -> None:
    """With this machine's settings of pip, so that the builds need none."""
    WHEELS.mkdir(exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(WHEELS)]
    packages = ["-r", "worker/sandbox/packages.txt", "-c", "deploy/packages-constraints.txt"]
    for wanted in (["setuptools==80.9.0", "wheel==0.45.1"], ["-r", "deploy/constraints.txt"], packages):
        subprocess.run([*pip, *wanted], check=True, timeout=BUILD_S, cwd=ROOT)


def build(name: str) -> None:
    arguments = {"BASE": BASE, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels"}
    command = ["buildah", "bud", "--quiet", "--layers", "--format", "docker", "--network", "host"]
    command += ["--volume", f"{WHEELS}:/wheels:ro", "--file", f"deploy/{name}.Dockerfile", "--tag", image(name)]
    command += [part for limit in hard_limits() for part in ("--ulimit", limit)]
    command += [part for key, value in arguments.items() for part in ("--build-arg", f"{key}={value}")]
    subprocess.run([*command, "."], check=True, timeout=BUILD_S, cwd=ROOT, env=environment())


def build_valkey() -> None:
    """In the place of the public image valkey/valkey: a server of the same protocol, by the same name."""
    from loadtest.redis_server import find_server

    folder = STATE / "valkey"
    folder.mkdir(exist_ok=True)
    shutil.copy(find_server(), folder / "valkey-server")
    (folder / "Dockerfile").write_text(f"FROM {BASE}\nCOPY valkey-server /usr/local/bin/\nUSER 999\n")
    command = ["buildah", "bud", "--quiet", "--layers", "--format", "docker", "--tag", image("valkey"), str(folder)]
    subprocess.run(command, check=True, timeout=BUILD_S, env=environment())
