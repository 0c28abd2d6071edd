"""The images, built for real on a Debian base and started by podman, in a storage of their own.

Needs root, podman, buildah, runc and debootstrap (`sh deploy/tools.sh containers`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from chart_harness import CHART, TOOLS

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
    Path("/run/exec-service").mkdir(exist_ok=True)  # docker makes what is to be mounted, podman does not
    limits = [f'"{limit}"' for limit in hard_limits()]
    conf = STATE / "containers.conf"
    conf.write_text(
        f"[containers]\ndefault_ulimits = [{', '.join(limits)}]\n"
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    storage = STATE / "storage.conf"
    storage.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{STATE}/storage"\nrunroot = "/run/exec-service-deploy"\n'
        "[storage.options]\nauto-userns-min-size = 65536\n"
    )
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
    # As in the public image: apt leaves nothing behind.
    (folder / "etc/apt/apt.conf.d/docker-clean").write_text(
        'Binary::apt::APT::Keep-Downloaded-Packages "false";\nDir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";\n'
    )
    for cached in [*folder.glob("var/cache/apt/archives/*.deb"), *folder.glob("var/cache/apt/*.bin")]:
        cached.unlink()
    pack = subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE)
    subprocess.run(["podman", "import", "-", BASE], stdin=pack.stdout, check=True, timeout=BUILD_S, env=environment())
    if pack.wait() != 0:
        raise RuntimeError("tar failed")


def fetch_wheels() -> None:
    """With this machine's settings of pip, so that the builds need none. Whatever Python runs this: the base's may need wheels
    that the markers rule out here."""
    WHEELS.mkdir(exist_ok=True)
    service = STATE / "without-markers.txt"
    pins = (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
    service.write_text("".join(f"{pin.partition(';')[0]}\n" for pin in pins))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(WHEELS)]
    packages = ["-r", "worker/sandbox/packages.txt", "-c", "deploy/packages-constraints.txt"]
    for wanted in (["-r", "deploy/build-constraints.txt"], ["-r", str(service)], packages):
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
    from loadtest.support.redis_server import servers

    folder = STATE / "valkey"
    folder.mkdir(exist_ok=True)
    shutil.copy(servers()[-1], folder / "valkey-server")  # of pip: one of the system needs libraries that the image has not
    (folder / "Dockerfile").write_text(f"FROM {BASE}\nCOPY valkey-server /usr/local/bin/\nUSER 999\n")
    command = ["buildah", "bud", "--quiet", "--layers", "--format", "docker", "--tag", image("valkey"), str(folder)]
    subprocess.run(command, check=True, timeout=BUILD_S, env=environment())


NETWORK = "podman"  # its usual bridge


class Containers:
    """What a test starts, removed at its end with all volumes."""

    def __init__(self, prefix: str, keys: Path) -> None:
        self.prefix, self._keys = prefix, keys

    def __enter__(self) -> Containers:
        self.clear()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names():
            print(f"--- {name}\n{self.logs(name)}")  # shown if the test failed
        self.clear()

    def clear(self) -> None:
        for pod in podman("pod", "ps", "--format", "{{.Name}}", "--filter", f"name={self.prefix}").split():
            for attempt in range(3):  # what a container had mounted is sometimes busy for a moment
                podman("pod", "rm", "--force", "--ignore", "--time", "0", pod, check=attempt == 2)
        for attempt in range(3):  # the kernel may still be busy with what a container had mounted
            for name in self._names():
                podman("rm", "--force", "--time", "0", "--volumes", name, check=attempt == 2)
        podman("volume", "prune", "--force")  # the storage is our own

    def _names(self) -> list[str]:
        return podman("ps", "--all", "--format", "{{.Names}}", "--filter", f"name={self.prefix}").split()

    def run(self, name: str, which: str, options: list[str], *command: str) -> None:
        podman("run", "--detach", "--pull", "never", "--name", self.name(name), *options, image(which), *command)

    def name(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def logs(self, name: str) -> str:
        done = subprocess.run(
            ["podman", "logs", "--tail", "40", name], capture_output=True, text=True, timeout=30, env=environment()
        )
        return done.stdout + done.stderr

    def address(self, name: str) -> str:
        """Of a container, or of the pod that it is in."""
        [found] = json.loads(podman("inspect", name))
        if found.get("Pod"):
            [pod] = [json.loads(podman("pod", "inspect", found["Pod"]))]
            [found] = json.loads(podman("inspect", pod["InfraContainerID"]))
        return str(found["NetworkSettings"]["Networks"][NETWORK]["IPAddress"])

    def from_compose(self, name: str, environment: dict[str, str], *more: str) -> None:
        """A service of the compose file, with the options that it says."""
        service = compose_service(name)
        self.run(
            name, name, [*compose_options(service, self.prefix, self._keys, environment), *more], *service.get("command", [])
        )


def compose_service(name: str) -> dict[str, Any]:
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / "deploy" / "compose.yaml").read_text())  # nothing is set: the defaults
    service: dict[str, Any] = yaml.safe_load(text)["services"][name]
    return service


def compose_options(service: dict[str, Any], prefix: str, keys: Path, environment: dict[str, str]) -> list[str]:
    options = ["--network", "none" if service.get("network_mode") == "none" else NETWORK]
    options += ["--read-only", "--read-only-tmpfs=false"] if service.get("read_only") else []
    options += ["--user", service["user"]] if "user" in service else []
    options += [
        part
        for kind in ("cap_drop", "cap_add")
        for cap in service.get(kind, [])
        for part in (f"--{kind.replace('_', '-')}", cap)
    ]
    options += [part for path in service.get("tmpfs", []) for part in ("--tmpfs", path)]
    for volume in service.get("volumes", []):
        options += ["--volume", volume if volume.startswith("/") else f"{prefix}-{volume}"]
    options += [part for option in service.get("security_opt", []) for part in ("--security-opt", _for_podman(option))]
    options += ["--volume", f"{keys}:/run/secrets/keys:ro"] if service.get("secrets") else []
    variables = {name: value or "" for name, value in (service.get("environment", {}) | environment).items()}
    return options + [part for name, value in variables.items() for part in ("--env", f"{name}={value}")]


def _for_podman(option: str) -> str:
    """Docker's words for the same."""
    if option == "systempaths=unconfined":
        return "unmask=ALL"
    name, _, value = option.partition(":")
    if name == "seccomp":
        return f"seccomp={(ROOT / 'deploy' / value).resolve()}"
    return "no-new-privileges" if name == "no-new-privileges" else f"{name}={value}"


def chart_objects(kinds: set[str], *values: str) -> list[dict[str, Any]]:
    """Of the chart as it is, the objects that podman can play."""
    sets = [part for value in values for part in ("--set", value)]
    command = [str(TOOLS / "helm"), "template", "rel", str(CHART), "--namespace", "exec", *sets]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [found for found in yaml.safe_load_all(done.stdout) if found and found["kind"] in kinds]


def adapt_to_podman(found: dict[str, Any]) -> None:
    """Podman 4.3 does not know procMount, but a container that may do all in its user namespace has an unmasked /proc; and it
    would publish every port on the machine."""
    if found["kind"] == "Deployment":
        for container in found["spec"]["template"]["spec"]["containers"]:
            container.pop("ports", None)
            context = container["securityContext"]
            if context.pop("procMount", None) == "Unmasked":
                context["privileged"] = True


def status_of(container: str) -> dict[str, str]:
    """Of its first process, as the machine sees it."""
    pid = podman("inspect", "--format", "{{.State.Pid}}", container).strip()
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return {line[0].rstrip(":"): line[1] for line in lines if len(line) > 1}


def play(objects: list[dict[str, Any]]) -> None:
    text = yaml.safe_dump_all(objects)
    seccomp = str(STATE / "seccomp")
    podman("kube", "play", "--network", NETWORK, "--seccomp-profile-root", seccomp, "-", stdin=text, timeout_s=300)


def install_seccomp_profile() -> None:
    """What the chart's DaemonSet does on a node."""
    folder = STATE / "seccomp" / "exec-service"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(CHART / "files" / "seccomp" / "runner.json", folder)


@contextlib.contextmanager
def pod_secret(name: str, file: Path) -> Iterator[None]:
    """As podman wants it: the Kubernetes object is the content of the secret, but its data is not encoded."""
    data = {file.name: file.read_text()}
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data})
    podman("secret", "rm", name, check=False)
    podman("secret", "create", name, "-", stdin=text)
    try:
        yield
    finally:
        podman("secret", "rm", name)
