"""SGLang over HTTP (written for 0.5.23): tokens in, tokens out; load by /v1/loads, which needs no --enable-metrics."""

from collections.abc import Mapping
from typing import Any

import msgspec

from grpo_roc.engines.base import EngineError, Generated, Load, Sampling
from grpo_roc.engines.http import HttpEngine, hash_seed, total


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, str | None]]
    finish_reason: _Finish


class _Reply(msgspec.Struct):
    meta_info: _Meta


class _RankLoad(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int


class _Loads(msgspec.Struct):
    version: str
    loads: list[_RankLoad]


class _Updated(msgspec.Struct):
    success: bool
    message: str


class SglangEngine(HttpEngine):
    async def generate(self, request_id: str, ids: list[int], sampling: Sampling) -> Generated:
        body = {
            "rid": f"{request_id}-{len(ids)}",
            "input_ids": ids,
            "sampling_params": {
                "max_new_tokens": sampling.max_new,
                "temperature": sampling.temperature,
                "stop_token_ids": list(sampling.stop),
                "sampling_seed": hash_seed(sampling.seed),
                "skip_special_tokens": False,
                "no_stop_trim": True,  # keep the token that ended the turn
            },
            "return_logprob": True,
        }
        reply = await self.request("POST", "/generate", _Reply, json=body)
        meta = reply.meta_info
        logprobs, ids = [one[0] for one in meta.output_token_logprobs], [one[1] for one in meta.output_token_logprobs]
        return self.generated(request_id, ids, logprobs, meta.finish_reason.type)

    async def load(self) -> Load:
        loads = (await self.request("GET", "/v1/loads", _Loads, params={"include": "core"})).loads
        return Load(
            sum(one.max_total_num_tokens for one in loads),
            sum(one.num_used_tokens for one in loads),
            sum(one.num_running_reqs for one in loads),
            sum(one.num_waiting_reqs for one in loads),
            await self._retracted(),
        )

    async def _retracted(self) -> int:
        """0 without --enable-metrics; the scheduler's safe reservations do not need it."""
        try:
            return int(total(await self.metrics(), "sglang:num_retracted_requests_total"))
        except EngineError:
            return 0

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        folder = await self.write_weights(weights, version)
        asked = {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)}
        updated = await self.request("POST", "/update_weights_from_disk", _Updated, json=asked)
        if not updated.success:
            raise EngineError(f"{self.name} did not load the weights: {updated.message}")
        self.version = version
