"""vLLM over HTTP (written for 0.32): tokens in, tokens out.

vllm serve MODEL --enable-scale-out …    POST /inference/v1/generate
VLLM_SERVER_DEV_MODE=1                   POST /pause, /resume, /collective_rpc, /sleep, …; GET /weight_info
--enable-sleep-mode                      /sleep frees the GPU's memory (scheduler.colocated)
--weight-transfer-config '{"backend": "nccl"}'    POST /init_weight_transfer_engine, … (engines: weights: nccl, or ipc)
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from grpo_roc.engines.base import EngineError, Generated, Load, Sampling
from grpo_roc.engines.direct import Direct
from grpo_roc.engines.http import PARTS, HttpEngine, Metric, hash_seed, total
from grpo_roc.engines.weights import Weights


def _generated(reply: Any) -> tuple[list[int], list[float], str, set[str]]:
    (choice,) = reply["choices"]
    logprobs = [float(one["logprob"]) for one in choice["logprobs"]["content"]]
    labels = {str(span["version"]) for span in choice["weight_versions"]}
    return [int(one) for one in choice["token_ids"]], logprobs, choice["finish_reason"], labels


def _cache(metrics: list[Metric]) -> tuple[int, int]:
    """Tokens of KV cache, over all engines behind one address, and tokens of a block that requests share."""
    found = [labels for name, labels, _ in metrics if name == "vllm:cache_config_info"]
    if not found:
        raise EngineError("vllm:cache_config_info is missing in /metrics")
    try:
        sizes = [int(one["block_size"]) for one in found]
        shared = sizes[0] if found[0]["enable_prefix_caching"] == "True" else 0
        return sum(int(one["num_gpu_blocks"]) * size for one, size in zip(found, sizes, strict=True)), shared
    except (LookupError, ValueError) as error:
        raise EngineError(f"vllm:cache_config_info in /metrics has unexpected labels: {error!r}") from error


class VllmEngine(HttpEngine):
    async def generate(self, request_id: str, ids: list[int], sampling: Sampling) -> Generated:
        name = f"{request_id}-{len(ids)}"  # a request is one turn of a rollout
        body = {"request_id": name, "token_ids": ids, "sampling_params": self.sampling(request_id, sampling)}
        return self.generated(request_id, *await self.request("POST", "/inference/v1/generate", _generated, json=body))

    def sampling(self, request_id: str, sampling: Sampling) -> dict[str, Any]:
        return {
            "max_tokens": sampling.max_new,
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop),
            "seed": hash_seed(sampling.seed) if sampling.seed else None,
            "logprobs": 0,  # of the sampled token only
            "detokenize": False,
        }

    async def load(self) -> Load:
        metrics = await self.metrics()
        capacity, block = _cache(metrics)
        return Load(
            capacity,
            int(total(metrics, "vllm:kv_cache_usage_perc") * capacity),
            int(total(metrics, "vllm:num_requests_running")),
            int(total(metrics, "vllm:num_requests_waiting")),
            int(total(metrics, "vllm:num_preemptions_total")),
            block,
        )

    async def _load_files(self, folder: Path, label: str) -> None:
        async with self._paused():
            asked = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await self._send("POST", "/collective_rpc", json=asked)
            await self._send("POST", "/update_weight_version", json={"new_version": label})

    async def _load_direct(self, weights: Weights, direct: Direct) -> None:
        async def init(group: dict[str, Any]) -> None:
            known = {name: value for name, value in group.items() if name != "name"}
            offset = {"rank_offset": 1} if "world_size" in group else {}
            await self._send("POST", "/init_weight_transfer_engine", json={"init_info": known | offset})

        async def update(info: dict[str, Any]) -> None:
            await self._send("POST", "/update_weights", json={"update_info": info})

        await direct.open(init)
        async with self._paused():
            await self._send("POST", "/start_weight_update")
            await direct.send(weights, update)
            await self._send("POST", "/finish_weight_update", json={"weight_version": weights.label})

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Between rollouts; the prefix cache, which the old weights computed, is dropped."""
        await self._send("POST", "/pause", params={"mode": "wait"})
        try:
            yield
            await self._send("POST", "/reset_prefix_cache")
        finally:
            await self._send("POST", "/resume")

    async def _release_memory(self) -> None:
        await self._send("POST", "/sleep", params={"level": 2, "mode": "wait"})

    async def _take_memory(self, part: str) -> None:
        await self._send("POST", "/wake_up", params={"tags": part})

    async def _asleep(self) -> list[str]:
        """Also after a restart of the trainer. A part that it has taken already is no error."""

        def released(reply: Any) -> list[str]:
            return list(PARTS) if reply["is_sleeping"] else []

        return await self.request("GET", "/is_sleeping", released, timeout=self.check_s)

    async def _weight_label(self) -> str:
        return await self.request("GET", "/weight_info", lambda reply: str(reply["weight_version"]), timeout=self.check_s)
