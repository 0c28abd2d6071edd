"""Weights from the trainer's GPU to an engine's, without files.

    nccl  the trainer and the engine's workers form a group, and the trainer broadcasts (RCCL on ROCm). The engine must be on
          other GPUs than rank 0 of the trainer
    ipc   the engine opens the trainer's memory by handles. The engine must be on the GPU of rank 0 (vLLM only)

The servers' own packages join the groups, so the trainer's environment needs vllm or sglang. Every engine has a group of its
own: losing an engine breaks no other group, and its group is made again when the engine is back.
"""

import asyncio
import base64
import pickle
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from grpo_roc import config
from grpo_roc.engines.base import EngineUnavailable
from grpo_roc.engines.weights import Weights

CHUNK_BYTES = 1 << 30  # of handles in one request: so much memory is taken beside the model's

Broadcast = Callable[[Tensor], None]
Request = Callable[[dict[str, Any]], Awaitable[Any]]


class Group(NamedTuple):
    """Rank 0 is the trainer, the others are the workers of one engine."""

    master_address: str
    master_port: int
    world_size: int
    name: str


def _join_vllm(group: Group) -> Broadcast:
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    found = trainer_init(group._asdict())
    return lambda tensor: found.broadcast(tensor, src=0, stream=torch.cuda.current_stream())


def _join_sglang(group: Group) -> Broadcast:
    from sglang.srt.utils import init_custom_process_group

    address = f"tcp://{group.master_address}:{group.master_port}"
    fields = {"init_method": address, "world_size": group.world_size, "rank": 0, "group_name": group.name}
    found = init_custom_process_group(backend="nccl", **fields)
    return lambda tensor: torch.distributed.broadcast(tensor, src=0, group=found)


JOIN = {"vllm": _join_vllm, "sglang": _join_sglang}


class Direct(Protocol):
    """How one engine gets weights."""

    async def open(self, init: Request) -> None:
        """Prepare, if that is not done; `init` lets the engine's workers do the same."""
        ...

    async def send(self, weights: Weights, update: Request) -> None:
        """`update` lets the workers receive."""
        ...

    def forget(self) -> None:
        """The engine has restarted, so nothing is prepared."""


class Broadcaster:
    def __init__(self, kind: str, url: str, workers: int) -> None:
        self._kind, self._url, self._workers = kind, url, workers
        self._broadcast: Broadcast | None = None

    async def open(self, init: Request) -> None:
        if self._broadcast is None:
            group = Group(*_address_for(self._url), 1 + self._workers, f"grpo-roc-{secrets.token_hex(4)}")
            self._broadcast = await _together(init(group._asdict()), asyncio.to_thread(JOIN[self._kind], group))

    async def send(self, weights: Weights, update: Request) -> None:
        broadcast, self._broadcast = self._broadcast, None  # after a failure a worker may still wait in the old group
        assert broadcast is not None
        await _together(update(describe(weights.tensors, weights.dtype)), asyncio.to_thread(_send, weights, broadcast))
        self._broadcast = broadcast

    def forget(self) -> None:
        """A broadcast in a group without the engine would never end."""
        self._broadcast = None


def _send(weights: Weights, broadcast: Broadcast) -> None:
    for _, tensor in weights.items(_device()):
        broadcast(tensor)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Ipc:
    async def open(self, init: Request) -> None:
        await init({"packed": False})

    async def send(self, weights: Weights, update: Request) -> None:
        for part in chunks(weights.items(_device()), CHUNK_BYTES):
            await update(describe(part, weights.dtype) | {"ipc_handles_pickled": handles(part.values())})

    def forget(self) -> None:
        """It opens handles again every time."""


def make_direct(one: config.Engine, url: str) -> Direct | None:
    if one.weights == "ipc" and one.kind != "vllm":
        raise config.ConfigError(f"engines: weights: ipc needs kind: vllm, not {one.kind}")
    if one.weights == "nccl":
        return Broadcaster(one.kind, url, one.workers)
    return Ipc() if one.weights == "ipc" else None


def describe(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
    shapes = [list(tensor.shape) for tensor in tensors.values()]
    return {"names": list(tensors), "dtype_names": [str(dtype).removeprefix("torch.")] * len(shapes), "shapes": shapes}


def chunks(named: Iterator[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    """Parts of up to `most` bytes, at least one tensor each."""
    part: dict[str, Tensor] = {}
    for name, tensor in named:
        if part and sum(one.nbytes for one in part.values()) + tensor.nbytes > most:
            yield part
            part = {}
        part[name] = tensor
    yield part


def handles(tensors: Iterable[Tensor]) -> str:
    """vLLM opens them with VLLM_ALLOW_INSECURE_SERIALIZATION=1. The tensors must live until it has."""
    from torch.multiprocessing.reductions import reduce_tensor

    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return base64.b64encode(pickle.dumps([{gpu: reduce_tensor(tensor)[1]} for tensor in tensors])).decode()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _address_for(url: str) -> tuple[str, int]:
    """An address of this machine that the engine's machine can reach."""
    target = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, socket.socket() as free:
        probe.connect((target.hostname, target.port or 80))
        address = probe.getsockname()[0]
        free.bind((address, 0))
        return address, free.getsockname()[1]


async def _together(request: Awaitable[Any], work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`. If `request` fails, raise at once: the thread of `work` would wait for the engine forever."""
    try:
        _, result = await asyncio.gather(request, work)
    except RuntimeError as error:
        raise EngineUnavailable(f"weights could not be broadcast: {error}") from error
    return result
