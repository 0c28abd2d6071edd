"""20,000 calls later the service has as much of everything as before."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from common import wait_until
from service_harness import Service, cgroups_of, children_of, mixed_case, serving, until_no_program_runs, until_program_runs

from exec_client import AsyncClient, Call, ExecError, InfraFailure, Limits, Result, Tags

CALLS = int(os.environ.get("EXEC_LEAK_CALLS", "20000"))
WARM_UP = 1000
AT_ONCE = 500
RSS_TOLERANCE_KB = 16 << 10  # of one process; a leak of 1 kB per call would be 20 MB
MACHINE_TOLERANCE = 1000  # others make namespaces and mounts too; one that every call leaves would be 20 times as many
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
KERNEL_OBJECTS = ("pid_namespace", "net_namespace", "uts_namespace", "user_namespace", "mnt_cache")


@pytest.fixture
def long_lived() -> Iterator[Service]:
    """Finished results are kept for two minutes; a budget that is full after the warm-up keeps them out of the figures."""
    with serving(profiles='{"bare": [], "numpy": ["numpy"]}', idempotency_max_bytes=1 << 20) as service:
        yield service


def processes(service: Service) -> dict[str, int]:
    """Those that live as long as the service, by name."""
    named = {"service": service.process.pid, "runner": service.runner_pid}
    named |= {f"jail {number}": pid for number, pid in enumerate(sorted(service.nsjail_pids))}
    return named | {f"zygote {number}": pid for number, pid in enumerate(sorted(service.zygote_pids))}


def figures(service: Service) -> dict[str, int]:
    """Everything that must not grow."""
    found: dict[str, int] = {}
    for name, pid in processes(service).items():
        proc = Path(f"/proc/{pid}")
        found[f"{name}: descriptors"] = len(list((proc / "fd").iterdir()))
        found[f"{name}: threads"] = len(list((proc / "task").iterdir()))
        found[f"{name}: RSS kB"] = int((proc / "status").read_text().split("VmRSS:")[1].split()[0])
        found[f"{name}: mounts"] = len((proc / "mountinfo").read_text().splitlines())
    found["mounts of the machine"] = len(Path("/proc/self/mountinfo").read_text().splitlines())
    found["processes"] = len(service.tree)
    found["zombies"] = zombies_below(service.process.pid)
    for kind in NAMESPACES:
        found[f"{kind} namespaces"] = len({str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for pid in service.tree})
    found["control groups"] = sum(
        1 + len([path for path in root.rglob("*") if path.is_dir()]) for root in cgroups_of(service.block)
    )
    return found | kernel_objects()


def kernel_objects() -> dict[str, int]:
    """Of the whole machine: namespaces and mounts that no process of ours is in any more, but something holds."""
    lines = [line.split() for line in Path("/proc/slabinfo").read_text().splitlines()]
    return {f"machine: {line[0]}": int(line[1]) for line in lines if line[0] in KERNEL_OBJECTS}


def zombies_below(pid: int) -> int:
    below = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    dead = [child for child in below if child not in children_of(pid)]
    return len(dead) + sum(zombies_below(child) for child in below if child not in dead)


def call_of(number: int) -> Call:
    if number % 100 == 50:
        return Call("while True: pass", limits=Limits(wall_s=0.1))
    if number % 100 == 75:
        return Call("x = bytearray(200 << 20)", limits=Limits(memory_mb=64))
    if number % 100 == 99:
        return Call("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\nprint('daemon left')")
    return Call(**mixed_case(number).call)


def expected_of(number: int) -> set[str]:
    special = {50: {"timeout"}, 75: {"memory_limit", "error"}, 99: {"ok"}}
    return special.get(number % 100) or {mixed_case(number).expected["status"]}


def result_of(outcome: Result | ExecError) -> Result:
    """On a busy machine an endless program's time-out is blamed on the machine, rightly, and raised by the client."""
    result = outcome.result if isinstance(outcome, InfraFailure) else outcome
    assert isinstance(result, Result), outcome
    return result


async def load(service: Service, calls: int) -> None:
    """Mixed programs, and callers who cancel or leave."""
    async with AsyncClient(service.url) as client:
        for first in range(0, calls, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, calls))
            outcomes = await client.run_many([call_of(number) for number in numbers], return_exceptions=True)
            ends = zip(numbers, map(result_of, outcomes), strict=True)
            assert [result for number, result in ends if result.status not in expected_of(number)] == []
            await cancel_some(client, service)
            await leave(service)
    await until_no_program_runs(service)


async def cancel_some(client: AsyncClient, service: Service) -> None:
    sleeping = [asyncio.create_task(client.run("import time\ntime.sleep(20)", tags=Tags(run="doomed"))) for _ in range(4)]
    await until_program_runs(service)
    await client.cancel(run="doomed")
    assert {result.status for result in await asyncio.gather(*sleeping)} == {"cancelled"}


async def leave(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.url) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/v1/run", json={"code": "import time\ntime.sleep(20)"}, timeout=0.1)


@pytest.mark.slow
async def test_20000_mixed_calls_leave_everything_flat(long_lived: Service) -> None:
    await load(long_lived, WARM_UP)
    before, pids = await settled(long_lived), processes(long_lived)
    await load(long_lived, CALLS)
    after = await settled(long_lived)
    print("\n" + json.dumps({name: [before[name], after.get(name)] for name in before}, indent=1))
    assert processes(long_lived) == pids  # nobody was replaced
    assert before.keys() == after.keys()
    grown = {name: (value, after[name]) for name, value in before.items() if after[name] > value + tolerance(name)}
    assert grown == {}


def tolerance(name: str) -> int:
    if name.endswith("RSS kB"):
        return RSS_TOLERANCE_KB
    return MACHINE_TOLERANCE if name.startswith("machine: ") else 0


async def settled(service: Service) -> dict[str, int]:
    """When connections are closed and programs gone."""
    wait_until(lambda: service.metric("exec_in_flight") == 0, "nothing is in flight")
    await asyncio.sleep(2)
    return figures(service)
