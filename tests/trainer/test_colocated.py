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
from common import until
from engine_server import SGLANG, FixtureServer, order, serving_fixture
from service_harness import Service
from trainer_harness import settings_at

from grpo_roc import config
from grpo_roc.engines import direct, make_engines
from grpo_roc.engines.base import EngineUnavailable, Sampling
from grpo_roc.engines.direct import Broadcaster, Group
from grpo_roc.engines.local import LocalEngine
from grpo_roc.engines.scheduler import Scheduler
from grpo_roc.engines.sglang import SglangEngine
from grpo_roc.engines.weights import Weights
from grpo_roc.learner import Learner
from grpo_roc.rollout import Actor
from grpo_roc.runs import run_rl

pytestmark = pytest.mark.usefixtures("shared")
COLOCATED = config.Scheduler(colocated=True)


def _weights(version: int = 3) -> Weights:
    return Weights({"a": torch.tensor([1.0, 2.0]), "b": torch.full((2, 3), 0.5)}, version)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _orders(server: FixtureServer) -> list[str]:
    found = [order(name.split()[1], body) for name, body in server.seen]
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


WEIGHTS, FILES, CACHE = (
    "/resume_memory_occupation weights",
    "/update_weights_from_disk",
    "/resume_memory_occupation kv_cache cuda_graph",
)


@pytest.mark.parametrize(
    ("asked", "broken"),
    [
        ([WEIGHTS, WEIGHTS, FILES, CACHE], WEIGHTS),
        ([WEIGHTS, FILES, FILES, CACHE], FILES),
        ([WEIGHTS, FILES, CACHE, FILES, CACHE], CACHE),
    ],
)
async def test_an_engine_that_failed_while_waking_takes_the_rest_of_its_memory_before_it_is_used(
    server: FixtureServer, asked: list[str], broken: str
) -> None:
    scheduler = Scheduler([SglangEngine(server.url)], COLOCATED)
    await scheduler.update_weights(_weights(1))
    await scheduler.sleep()
    server.seen, server.failing[broken] = [], 1
    await scheduler.update_weights(_weights(2))
    assert (await scheduler.generate("r", [1], Sampling(4))).weight_version == 2
    assert [one for one in _orders(server) if one != "/v1/loads" and one != "/metrics"] == [*asked, "/generate"]
    await scheduler.aclose()


async def test_a_sleeping_engine_is_not_ready(server: FixtureServer) -> None:
    engine = SglangEngine(server.url)
    await engine.update_weights(_weights(1))
    await engine.check()
    await engine.sleep()
    with pytest.raises(EngineUnavailable, match="sleeps"):
        await engine.check()
    await engine.aclose()


async def test_an_engine_that_restarts_during_the_update_sleeps_until_the_new_weights_come() -> None:
    with serving_fixture(SGLANG) as first:
        scheduler = Scheduler([SglangEngine(first.url)], COLOCATED)
        await scheduler.update_weights(_weights(1))
    await scheduler.sleep()  # it does not answer
    with serving_fixture(SGLANG, first.server_address[1]) as restarted:
        await until(lambda: _orders(restarted), "the restarted engine to be asked for something")
        new = _weights(2)
        await scheduler.update_weights(new)
        await until(lambda: scheduler.engines[0].usable, "the engine to be back")
        assert _orders(restarted) == [
            "/release_memory_occupation",
            WEIGHTS,
            FILES,
            CACHE,
        ]
        assert restarted.label == new.label
        await scheduler.aclose()


def test_engines_sleep_from_the_end_of_the_rollouts_until_the_update_is_done(
    taught: Path, live_service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def watch(kind: Any, name: str) -> None:
        real = getattr(kind, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            events.append(name)
            return real(*arguments, **named)

        monkeypatch.setattr(kind, name, watched)

    for kind, name in ((Actor, "roll"), (LocalEngine, "sleep"), (Learner, "update"), (LocalEngine, "update_weights")):
        watch(kind, name)
    settings = settings_at(live_service, "rl.lockstep=false", "scheduler.colocated=true", "rl.steps=2")
    asyncio.run(run_rl(settings, taught, tmp_path, eval_problems=8))
    assert events == ["update_weights", *["roll", "sleep", "update", "update_weights"] * 2]


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


@pytest.mark.parametrize("lost", ["before the push", "after the push"])
async def test_a_lost_engine_gets_its_weights_by_broadcast_though_the_trainers_have_changed(
    server: FixtureServer, shared: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """It may be on a machine that has none of the trainer's files."""
    sent: list[list[float]] = []
    groups: list[str] = []

    def join(group: Group) -> direct.Broadcast:
        groups.append(group.name)
        return lambda tensor: sent.append(tensor.flatten().tolist())

    monkeypatch.setitem(direct.JOIN, "sglang", join)
    scheduler = Scheduler([SglangEngine(server.url, Broadcaster("sglang", server.url, 1))], config.Scheduler())
    server.failing["/init_weights_update_group"] = 2 if lost == "before the push" else 0
    weights = _weights()
    live = list(weights.tensors.values())
    await scheduler.update_weights(weights)
    for tensor in live:
        tensor.zero_()  # a training step
    if lost == "after the push":
        sent.clear()
        server.label = "default"  # it restarts
    await scheduler.generate("r", [1], Sampling(4))
    assert sent == [[1, 2], [0.5] * 6] and server.label == weights.label and not _names(shared)
    assert len(set(groups)) == len(groups) > 1, "a group was used that the engine is not in"
    await scheduler.aclose()


def test_parts_hold_as_many_tensors_as_fit() -> None:
    named = [(str(n), torch.zeros(size, dtype=torch.bfloat16)) for n, size in enumerate((3, 2, 4, 9, 1))]
    assert [list(part) for part in direct.chunks(iter(named), 10)] == [["0", "1"], ["2"], ["3"], ["4"]]


def test_handles_are_refused_for_an_engine_that_cannot_open_them() -> None:
    settings = config.Config(engines=[config.Engine(kind="sglang", url="http://h:1", weights="ipc")])
    with pytest.raises(config.ConfigError, match="weights: ipc needs kind: vllm"):
        make_engines(settings, Path(), {})
