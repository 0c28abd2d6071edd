"""Tiers: which layers each one needs, and how to enable a missing layer.

The tier is never inferred from a uid or a kernel version: `probe.py` tries each layer.
"""

from exec_wire import Tier

NAMESPACES = ["pidns", "mntns", "ipcns", "utsns", "netns"]
RESTRICTIONS = ["rlimits", "no_new_privs", "landlock", "seccomp"]
ALL_LAYERS = ["userns", *NAMESPACES, "uid", *RESTRICTIONS, "cgroup"]

_NEEDED: dict[Tier, set[str]] = {
    "A": set(ALL_LAYERS),
    "B": set(ALL_LAYERS) - {"cgroup"},
    # Namespaces contain a program without Landlock: its root has only what it may read, it sees no other process or socket.
    "C": {"userns", *NAMESPACES, *RESTRICTIONS} - {"landlock"},
    "D": set(RESTRICTIONS),
}

MEANING = {
    "S": "tier A inside a virtual machine or a user-space kernel of its own",
    "A": "everything: namespaces, a uid of its own, Landlock, seccomp, and memory and processes counted by the kernel",
    "B": "as A, but no control groups: memory is sampled every 50 ms instead of limited by the kernel",
    "C": "namespaces and seccomp, but all programs share one uid, or there is no Landlock",
    "D": "Landlock and seccomp only: programs see other processes and share the machine's folders",
    "E": "resource limits only: programs can read and change what you can",
}

REMEDY = {
    "userns": "run as root, or allow user namespaces: sysctl -w user.max_user_namespaces=10000",
    "uid": "run as root (or in a pod with hostUsers: false and CAP_SETUID), so that each program gets a uid of its own",
    "cgroup": "run as root with a writable /sys/fs/cgroup, or under systemd-run --user --scope -p Delegate=yes",
    "landlock": "use a kernel of 5.13 or newer with landlock in CONFIG_LSM and in `lsm=` of its command line, if that is there",
    "seccomp": "use a kernel with CONFIG_SECCOMP_FILTER, and a container profile that allows the seccomp call",
    **dict.fromkeys(
        NAMESPACES,
        "run as root, or allow user namespaces and the mount, unshare and pivot_root calls in the container's profile",
    ),
}


def tier_of(layers: list[str]) -> Tier:
    return next((tier for tier, needed in _NEEDED.items() if needed <= set(layers)), "E")


def at_least(tier: Tier, wanted: Tier) -> bool:
    order: list[Tier] = ["S", "A", "B", "C", "D", "E", "none"]
    return order.index(tier) <= order.index(wanted)


class SandboxUnavailable(Exception):
    """There is no sandbox of the required tier; the message says why. `missing`: layer -> why."""

    def __init__(self, message: str, missing: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.missing = missing or {}


def require(wanted: Tier, tier: Tier, layers: list[str], missing: dict[str, str]) -> None:
    """Fail closed: below the required tier, `SandboxUnavailable` says what is missing, why, and how to enable it."""
    if at_least(tier, wanted):
        return
    needed = [layer for layer in ALL_LAYERS if layer in _NEEDED.get(wanted, set()) and layer not in layers]
    lacking = [f"{layer} ({missing.get(layer, 'not there')}): {REMEDY.get(layer, '')}" for layer in needed]
    message = f"tier {wanted} is required and this is tier {tier}; missing is\n  " + "\n  ".join(lacking)
    raise SandboxUnavailable(message, missing)
