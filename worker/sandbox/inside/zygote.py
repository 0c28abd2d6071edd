"""The warm interpreter of one profile, in the outer jail: imports the profile's modules, drops privileges, then forks programs.

The runner starts it as `python -I zygote.py SETTINGS`, with the control socket among its descriptors. It never reads a byte of
a caller's data.
"""

import gc
import json
import os
import re
import sys

CAP_SETPCAP, CAP_SYS_RESOURCE = 8, 24
MAX_HEAP_BYTES = 1 << 30  # address space, not memory


SIGNAL_SCOPE_ABI, TRUNCATE_ABI = 6, 3  # of Landlock: since Linux 6.12 and 6.2
OWN_MOUNTS = {"/proc", "/w/call"}  # the zygote's; each program mounts its own over them


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.path.insert(0, settings["own_code"])
    from worker.sandbox.inside import _zygote

    _zygote.use_huge_pages(MAX_HEAP_BYTES)
    from worker.sandbox.inside import program, seccomp, warmup

    sys.path.remove(settings["own_code"])
    sys.path = [path for path in sys.path if not path.endswith(("site-packages", "dist-packages"))] + [settings["packages"]]
    os.environ.pop("GLIBC_TUNABLES", None)  # for this process only, not for programs that a program starts
    _zygote.limit_landlock(settings["landlock_abi"])
    layers = sum(_zygote.LAYERS.get(name, 0) for name in settings["layers"])
    jailed, own_mounts = "pidns" in settings["layers"], "mntns" in settings["layers"]
    if own_mounts:
        make_mounts_read_only(_zygote.make_read_only)
    # A folder for packages that need one when imported; no program sees it.
    folder = os.path.realpath("/tmp") if own_mounts else f"{settings['scratch']}/zygote{os.getpid()}"
    os.mkdir(folder)  # noqa: PTH102
    os.environ["MPLCONFIGDIR"] = f"{folder}/.matplotlib"
    warmup.warm_up(settings["imports"], settings["packages"])
    os.environ["MPLCONFIGDIR"] = "/tmp/.matplotlib"
    sys.path.insert(0, "/tmp")  # each program's own. Not before: without a jail it is the machine's, writable by all
    sys.path_importer_cache.pop("/tmp", None)
    if jailed:
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")  # no process in this user namespace can make another one
        _zygote.forbid_dumps()
    # Empties the bounding set, which programs inherit, and drops what could undo the above. Without a jail that may be refused.
    if not _zygote.drop_capabilities(1 << CAP_SYS_RESOURCE | 1 << CAP_SETPCAP if jailed else 0) and jailed:
        sys.exit("emptying the capability bounding set failed")
    if len(os.listdir("/proc/self/task")) != 1:  # noqa: PTH208
        sys.exit("a package of this profile starts threads when imported; a zygote must have one thread")
    landlock_abi = _zygote.landlock_abi() if "landlock" in settings["layers"] else -1
    own_signals = jailed or "uid" in settings["layers"] or landlock_abi >= SIGNAL_SCOPE_ABI
    filters = seccomp.compile_filters(
        _zygote.SYSCALLS,
        network_namespace="netns" in settings["layers"],
        memory_counted="cgroup" in settings["layers"],
        mount_namespace=own_mounts,
        files_apart=own_mounts or "uid" in settings["layers"],
        truncation_apart=own_mounts or landlock_abi >= TRUNCATE_ABI,
        signals_apart=own_signals,
    )
    signals = b"" if own_signals or "seccomp" not in settings["layers"] else seccomp.compile_signal_filter(_zygote.SYSCALLS)
    program.prepare(own_folder=not own_mounts, own_pids=jailed)
    rules = [tuple(rule) for rule in settings["landlock"]]
    more = settings["foreign_processes"], settings["faults"], *settings["uids"]
    arguments = settings["control_fd"], layers, rules, *filters, signals, settings["scratch"], *more
    gc.collect()
    _zygote.make_all_immortal()
    gc.freeze()
    program.run(_zygote.serve(*arguments))


def make_mounts_read_only(make_read_only) -> None:  # type: ignore[no-untyped-def]
    """A jail's bind mounts are read-only, but not what the host has mounted below them."""
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        mounts = [line.split()[:6] for line in file]
    for number, _, _, _, escaped, options in mounts:
        path = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), escaped)
        if "rw" in options.split(",") and path not in OWN_MOUNTS and mount_at(path) == number:
            make_read_only(path)


def mount_at(path: str) -> str:
    """The number of the mount that is reached by this path; empty if there is none."""
    try:
        fd = os.open(path, os.O_PATH)
    except OSError:
        return ""  # covered by another mount, or behind a folder without access
    with open(f"/proc/self/fdinfo/{fd}") as file:
        fields = dict(line.split(":", 1) for line in file)
    os.close(fd)
    return fields["mnt_id"].strip()


if __name__ == "__main__":
    main()
