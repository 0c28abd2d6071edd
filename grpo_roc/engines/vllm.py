"""vLLM over HTTP (written for 0.32): tokens in, tokens out.

vllm serve MODEL --enable-scale-out …    POST /inference/v1/generate
VLLM_SERVER_DEV_MODE=1                   POST /pause, /resume, /collective_rpc, …; GET /weight_info
"""

from pathlib import Path
from typing import Any

from grpo_roc.engines.base import EngineError, Generated, Load, Sampling
from grpo_roc.engines.http import HttpEngine, hash_seed, total


def _generated(reply: Any) -> tuple[list[int], list[float], str, set[str]]:
    (choice,) = reply["choices"]
    logprobs = [float(one["logprob"]) for one in choice["logprobs"]["content"]]
    labels = {str(span["version"]) for span in choice["weight_versions"]}
    return [int(one) for one in choice["token_ids"]], logprobs, choice["finish_reason"], labels


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
        return self.generated(request_id, *await self.request("POST", "/inference/v1/generate", _generated, json=body))

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

    async def _load_weights(self, folder: Path, label: str) -> None:
        """Between rollouts; the prefix cache, which the old weights computed, is dropped."""
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._send("POST", "/pause", params={"mode": "wait"})
        try:
            await self._send("POST", "/collective_rpc", json=asked)
            await self._send("POST", "/reset_prefix_cache")
            await self._send("POST", "/update_weight_version", json={"new_version": label})
        finally:
            await self._send("POST", "/resume")

    async def _weight_label(self) -> str:
        return await self.request("GET", "/weight_info", lambda reply: str(reply["weight_version"]), timeout=self.check_s)
