"""Engines that sleep during the update, and weights without files: what an SGLang server is asked, over gloo instead of RCCL.

SGLang needs a GPU, so a server made from its schemas answers; tests/engines has the same with a real vLLM.
"""

import asyncio
import threading
from pathlib import Path
from typing import Any

import gloo_group
import pytest
import torch
from engine_server import FixtureServer

from grpo_roc import config
from grpo_roc.engines import direct, make_engines
from grpo_roc.engines.base import EngineUnavailable
from grpo_roc.engines.direct import Broadcaster, Group
from grpo_roc.engines.scheduler import Scheduler
from grpo_roc.engines.sglang import SglangEngine
from grpo_roc.engines.weights import Weights

pytestmark = pytest.mark.usefixtures("shared")
COLOCATED = config.Scheduler(colocated=True)


def _weights(version: int = 3) -> Weights:
    return Weights({"a": torch.tensor([1.0, 2.0]), "b": torch.full((2, 3), 0.5)}, version)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _orders(server: FixtureServer) -> list[str]:
    found = [name.split()[1] + "".join(f" {tag}" for tag in body.get("tags", [])) for name, body in server.seen]
    return [one for one in found if "get_model_info" not in one]


# -- sleep ----------------------------------------------------------------------------------------------------------------


async def test_an_engine_sleeps_and_gets_weights_before_its_cache(server: FixtureServer) -> None:
    scheduler = Scheduler([SglangEngine(server.url)], COLOCATED)
    await scheduler.update_weights(_weights(1))
    await scheduler.sleep()
    await scheduler.update_weights(_weights(2))
    await scheduler.update_weights(_weights(3))
    assert _orders(server) == [
        "/update_weights_from_disk",
        "/release_memory_occupation",
        "/resume_memory_occupation weights",
        "/update_weights_from_disk",
        "/resume_memory_occupation kv_cache cuda_graph",
        "/update_weights_from_disk",
    ]
    await scheduler.aclose()


async def test_an_engine_that_restarted_in_its_sleep_is_not_woken(server: FixtureServer) -> None:
    scheduler = Scheduler([SglangEngine(server.url)], COLOCATED)
    await scheduler.update_weights(_weights(1))
    await scheduler.sleep()
    server.label, server.seen = "default", []
    await scheduler.update_weights(_weights(2))
    assert _orders(server) == ["/update_weights_from_disk"]
    await scheduler.aclose()


async def test_engines_with_gpus_of_their_own_do_not_sleep(server: FixtureServer) -> None:
    scheduler = Scheduler([SglangEngine(server.url)], config.Scheduler())
    await scheduler.sleep()
    assert not server.seen
    await scheduler.aclose()


# -- weights without files ------------------------------------------------------------------------------------------------


class _Worker(threading.Thread):
    """What a worker of the engine does: joins the group that the server was told of, and receives what it was told of."""

    def __init__(self, server: FixtureServer) -> None:
        super().__init__(daemon=True)
        self.server, self.received = server, dict[str, torch.Tensor]()

    def _asked(self, path: str) -> dict[str, Any]:
        while True:
            for name, body in list(self.server.seen):
                if name == f"POST {path}":
                    return body
            threading.Event().wait(0.01)

    def run(self) -> None:
        group = self._asked("/init_weights_update_group")
        joined = gloo_group.member(
            Group(group["master_address"], group["master_port"], group["world_size"], ""), group["rank_offset"]
        )
        update = self._asked("/update_weights_from_distributed")
        assert update["group_name"] == group["group_name"]
        for name, dtype, shape in zip(update["names"], update["dtypes"], update["shapes"], strict=True):
            self.received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            joined.broadcast(self.received[name], 0).wait()


async def test_weights_are_broadcast_to_the_engine_without_a_file(
    server: FixtureServer, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(direct.JOIN, "sglang", gloo_group.join)
    worker = _Worker(server)
    worker.start()
    scheduler = Scheduler([SglangEngine(server.url, Broadcaster("sglang", server.url, 1))], config.Scheduler())
    weights = _weights()
    async with asyncio.timeout(120):
        await scheduler.update_weights(weights)
    worker.join(60)
    assert {name: tensor.tolist() for name, tensor in worker.received.items()} == {"a": [1, 2], "b": [[0.5] * 3] * 2}
    assert {tensor.dtype for tensor in worker.received.values()} == {torch.bfloat16}
    assert server.label == weights.label and not _names(shared)
    await scheduler.aclose()


async def test_a_broken_group_is_made_again(server: FixtureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = []

    def join(group: Group) -> direct.Broadcast:
        joined.append(group.name)

        def broadcast(tensor: torch.Tensor) -> None:
            if len(joined) == 1:
                raise RuntimeError("connection closed by peer")

        return broadcast

    monkeypatch.setitem(direct.JOIN, "sglang", join)
    engine = SglangEngine(server.url, Broadcaster("sglang", server.url, 1))
    with pytest.raises(EngineUnavailable, match="connection closed by peer"):
        await engine.update_weights(_weights())
    for _ in range(2):
        await engine.update_weights(_weights())
    assert len(set(joined)) == len(joined) == 2
    await engine.aclose()


async def test_an_engine_that_was_lost_gets_files_when_the_tensors_are_gone(server: FixtureServer) -> None:
    engine, weights = SglangEngine(server.url, Broadcaster("sglang", server.url, 1)), _weights()
    await weights.folder()
    weights.keep_files_only()
    await engine.update_weights(weights)
    assert _orders(server) == ["/update_weights_from_disk"]
    await engine.aclose()


def test_parts_hold_as_many_tensors_as_fit() -> None:
    named = [(str(n), torch.zeros(size, dtype=torch.bfloat16)) for n, size in enumerate((3, 2, 4, 9, 1))]
    assert [list(part) for part in direct.chunks(iter(named), 10)] == [["0", "1"], ["2"], ["3"], ["4"]]


def test_handles_are_refused_for_an_engine_that_cannot_open_them() -> None:
    settings = config.Config(engines=[config.Engine(kind="sglang", url="http://h:1", weights="ipc")])
    with pytest.raises(config.ConfigError, match="weights: ipc needs kind: vllm"):
        make_engines(settings, Path(), {})
