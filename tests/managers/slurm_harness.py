"""Slurm as Debian packages it, with three nodes on this machine, for jobs of a plain user."""

import contextlib
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from common import unavailable, wait_until

from loadtest.support.processes import ROOT, free_port

SCRIPT = ROOT / "deploy" / "slurm" / "exec-service.sbatch"
NODES = ("n1", "n2", "n3")
USER = "games"  # a plain user that Debian has and nobody uses
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdTimeout=10
KillWait=15
MessageTimeout=60
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def need_slurm() -> None:
    if missing := [program for program in PROGRAMS if shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin") is None]:
        unavailable(f"Slurm is not installed ({', '.join(missing)}): make test-cluster-managers installs it on Debian")
    if os.geteuid() != 0:
        unavailable("Slurm's daemons need root")


class Slurm:
    """munged, slurmctld and a slurmd for each node, with their files in a folder of their own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        user = pwd.getpwnam(USER)
        self.home = self.folder / "home"
        self.env = {
            "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}:/usr/sbin",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "HOME": str(self.home),
        }
        self.folder.chmod(0o755)
        for name in ("munge", "state", "home"):
            (self.folder / name).mkdir(mode=0o755)
        os.chown(self.home, user.pw_uid, user.pw_gid)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        nodes = [
            f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname={socket.gethostname()} Port={free_port()} CPUs=2 State=UNKNOWN"
            for name in NODES
        ]
        words = CONFIGURATION.format(
            host=socket.gethostname(),
            folder=self.folder,
            controller_port=free_port(),
            nodes="\n".join(nodes),
            names=",".join(NODES),
        )
        (self.folder / "slurm.conf").write_text(words)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge/{name}" for option, name in files.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        wait_until((self.folder / "munge" / "socket").exists, self.logs)
        self._daemon("slurmctld", "-D", "-i")
        for name in NODES:
            self.start_node(name)

    def start_node(self, name: str) -> None:
        """Also again, after its loss."""
        self._daemon("slurmd", "-D", "-N", name, name=name)
        wait_until(lambda: self.run("sinfo", "-h", "-n", name, "-o", "%T") == "idle", self.logs)

    def _daemon(self, *command: str, name: str = "") -> None:
        log = (self.folder / f"{name or command[0]}.log").open("ab")
        with log:
            self._daemons[name or command[0]] = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def run(self, *command: str) -> str:
        """The output of a command of Slurm; the tests' own user is root."""
        ended = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120)
        return ended.stdout.strip()

    def submit(self, *words: str, variables: dict[str, str] | None = None) -> str:
        """The number of a job that the plain user submits."""
        user = pwd.getpwnam(USER)
        ended = subprocess.run(
            ["sbatch", "--parsable", "--output", f"{self.home}/%j.log", *words],
            env=self.env | (variables or {}),
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=[],
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def state(self, job: str) -> str:
        return self.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T")

    def lose(self, node: str) -> None:
        """Kill the node's daemon and every process of its jobs at once."""
        victims = {self._daemons[node].pid, *processes_of(node)}
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._daemons[node].wait()

    def logs(self) -> str:
        files = [*self.folder.glob("*.log"), self.folder / "munge" / "log", *self.home.glob("*.log")]
        return "\n".join(f"{file.name}:\n{file.read_text(errors='replace')[-3000:]}" for file in files if file.exists())

    def close(self) -> None:
        if "slurmctld" in self._daemons:
            self.run("scancel", "--user", USER)
            give_up = time.monotonic() + 60
            while self.run("squeue", "-h") and time.monotonic() < give_up:
                time.sleep(0.2)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def processes_of(node: str) -> set[int]:
    """Of the node's tasks and everything below them, with the step's own process above."""
    parents, found = {}, set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            parents[pid] = int(re.sub(r".*\) ", "", (entry / "stat").read_text()).split()[1])
            if f"SLURMD_NODENAME={node}\0".encode() in (entry / "environ").read_bytes():
                found.add(pid)
    above = {parents[pid] for pid in found} - {0, 1, os.getpid()}
    while below := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= below
    return found | {pid for pid in above if "slurmstepd" in Path(f"/proc/{pid}/comm").read_text()}


def files_of_user() -> list[Path]:
    """On this node's own disk."""
    user = pwd.getpwnam(USER).pw_uid
    return [folder for folder in Path(tempfile.gettempdir()).glob("exec-*") if folder.stat().st_uid == user]


def processes_of_user() -> list[str]:
    user = pwd.getpwnam(USER).pw_uid
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == user:
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found
