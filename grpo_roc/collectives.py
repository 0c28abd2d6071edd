"""The bandwidth of the collectives that training uses, between processes of this node: RCCL between GPUs, gloo between CPUs."""

import multiprocessing
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from grpo_roc.distributed import Device

BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}
REPEATS = 5
PATIENCE_S = 600.0


def bandwidth(device: Device, world: int) -> dict[str, float]:
    """Bytes per second on each rank's link (NCCL's "bus bandwidth") of all_reduce and all_gather over `world` ranks.

    Raises:
        RuntimeError: a rank failed, or computed a wrong sum.
    """
    spawn = multiprocessing.get_context("spawn")  # a process that has used a GPU cannot fork
    results: Any = spawn.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [spawn.Process(target=_rank, args=(device, rank, world, port, results)) for rank in range(world)]
    for one in ranks:
        one.start()
    end = time.monotonic() + PATIENCE_S
    for one in ranks:
        one.join(max(0.0, end - time.monotonic()))
    failed = [number for number, one in enumerate(ranks) if one.exitcode != 0]
    for one in ranks:
        one.kill()
    if failed:
        raise RuntimeError(
            f"rank {', '.join(map(str, failed))} of {world} failed or did not end in {PATIENCE_S:.0f} s; see above"
        )
    found: dict[str, float] = results.get()
    return found


def _rank(device: Device, rank: int, world: int, port: int, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    if device.kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(device.backend, rank=rank, world_size=world)
    own = torch.full((BYTES[device.kind] // 4 // world,), float(rank + 1), device=device.torch)
    whole = own.new_empty(world * len(own))
    seconds = {
        "all_reduce": _time(device, lambda: dist.all_reduce(whole)),
        "all_gather": _time(device, lambda: dist.all_gather_into_tensor(whole, own)),
    }
    if not all(float(part[0]) == number + 1 for number, part in enumerate(whole.chunk(world))):
        raise RuntimeError("all_gather returned other values than the ranks sent")
    dist.all_reduce(own)
    if float(own[-1]) != world * (world + 1) / 2:
        raise RuntimeError(f"all_reduce returned {float(own[-1])}")
    if rank == 0:
        passes = {"all_reduce": 2, "all_gather": 1}  # a ring sends so many times (world - 1) / world of the bytes
        size = 4 * len(whole) * (world - 1) / world
        results.put({name: passes[name] * size / taken for name, taken in seconds.items()})
    dist.destroy_process_group()


def _time(device: Device, collective: Any) -> float:
    """Seconds of the fastest of several."""
    taken = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        began = time.perf_counter()
        collective()
        if device.kind == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])
