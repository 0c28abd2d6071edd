"""vLLM over HTTP (written for 0.32): tokens in, tokens out.

vllm serve MODEL --enable-token-in-token-out …    POST /inference/v1/generate
VLLM_SERVER_DEV_MODE=1                            POST /collective_rpc, /pause, /resume, /reset_prefix_cache
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from grpo_roc.engines.base import EngineError, Generated, Load, Sampling
from grpo_roc.engines.http import HttpEngine, hash_seed, total


class _Token(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: _Logprobs


class _Reply(msgspec.Struct):
    request_id: str
    choices: list[_Choice]


class VllmEngine(HttpEngine):
    async def generate(self, request_id: str, ids: list[int], sampling: Sampling) -> Generated:
        body = {
            "request_id": f"{request_id}-{len(ids)}",  # a request is one turn of a rollout
            "token_ids": ids,
            "sampling_params": {
                "max_tokens": sampling.max_new,
                "temperature": sampling.temperature,
                "stop_token_ids": list(sampling.stop),
                "seed": hash_seed(sampling.seed),
                "logprobs": 0,  # of the sampled token only
                "detokenize": False,
            },
        }
        reply = await self.request("POST", "/inference/v1/generate", _Reply, json=body)
        (choice,) = reply.choices
        logprobs = [one.logprob for one in choice.logprobs.content]
        return self.generated(request_id, choice.token_ids, logprobs, choice.finish_reason)

    async def load(self) -> Load:
        metrics = await self.metrics()
        capacity = 0
        for name, labels, _ in metrics:
            if name == "vllm:cache_config_info":
                capacity += int(labels["num_gpu_blocks"]) * int(labels["block_size"])
        if not capacity:
            raise EngineError(f"{self.name}: vllm:cache_config_info is missing in /metrics")
        return Load(
            capacity,
            int(total(metrics, "vllm:kv_cache_usage_perc") * capacity),
            int(total(metrics, "vllm:num_requests_running")),
            int(total(metrics, "vllm:num_requests_waiting")),
            int(total(metrics, "vllm:num_preemptions_total")),
        )

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Load the weights from disk, between rollouts, and drop the prefix cache, which the old ones computed."""
        folder = await self.write_weights(weights, version)
        await self._send("POST", "/pause", params={"mode": "wait"})
        try:
            await self._send(
                "POST", "/collective_rpc", json={"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            )
            await self._send("POST", "/reset_prefix_cache")
        finally:
            await self._send("POST", "/resume")
        self.version = version
