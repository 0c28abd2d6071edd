LAYER_PIDNS: int
LAYER_MOUNTS: int
LAYER_UID: int
LAYER_CGROUP: int
LAYER_LANDLOCK: int
LAYER_SECCOMP: int
PAYLOAD_FD: int
SYSCALLS: dict[str, int]

def serve(
    *,
    control_fd: int,
    layers: int,
    rules: list[tuple[str, str]],
    filter: bytes,
    scratch: str,
    foreign_processes: int,
    faults: bool,
) -> memoryview: ...
def begin() -> None: ...
def steps() -> tuple[str, ...]: ...
def landlock_abi() -> int: ...
def drop_capability(capability: int, /) -> None: ...
def use_huge_pages(most: int, /) -> None: ...
def forbid_dumps() -> None: ...
