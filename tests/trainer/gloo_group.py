"""A group over gloo in place of one over RCCL: what `direct.JOIN` returns on a machine without GPUs."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from grpo_roc.engines.direct import Broadcast, Group

PATIENCE = timedelta(minutes=2)


def member(group: Group, rank: int) -> Any:
    store = dist.TCPStore(group.master_address, group.master_port, group.world_size, rank == 0, PATIENCE)
    return dist.ProcessGroupGloo(store, rank, group.world_size, PATIENCE)


def join(group: Group) -> Broadcast:
    found = member(group, 0)
    return lambda tensor: found.broadcast(tensor, 0).wait()
