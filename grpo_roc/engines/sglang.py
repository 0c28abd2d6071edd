"""SGLang over HTTP (written for 0.5.23): tokens in, tokens out; load by /v1/loads, which needs no --enable-metrics."""

from pathlib import Path
from typing import Any

from grpo_roc.engines.base import EngineError, EngineUnavailable, Generated, Load, Sampling
from grpo_roc.engines.direct import Direct
from grpo_roc.engines.http import HttpEngine, hash_seed, total
from grpo_roc.engines.weights import Weights

_LOAD_FIELDS = ("max_total_num_tokens", "num_used_tokens", "num_running_reqs", "num_waiting_reqs")


def _generated(reply: Any) -> tuple[list[int], list[float], str, set[str]]:
    meta = reply["meta_info"]
    logprobs, ids = ([kind(one[at]) for one in meta["output_token_logprobs"]] for at, kind in enumerate((float, int)))
    return ids, logprobs, meta["finish_reason"]["type"], {str(meta["weight_version"])}


def _loads(reply: Any) -> list[int]:
    """The sums over all ranks."""
    return [sum(int(one[name]) for one in reply["loads"]) for name in _LOAD_FIELDS]


class SglangEngine(HttpEngine):
    _group = ""  # for weights by broadcast

    async def generate(self, request_id: str, ids: list[int], sampling: Sampling) -> Generated:
        body = {
            "rid": f"{request_id}-{len(ids)}",
            "input_ids": ids,
            "sampling_params": {
                "max_new_tokens": sampling.max_new,
                "temperature": sampling.temperature,
                "stop_token_ids": list(sampling.stop),
                "sampling_seed": hash_seed(sampling.seed) if sampling.seed else None,
                "skip_special_tokens": False,
                "no_stop_trim": True,  # keep the token that ended the turn
            },
            "return_logprob": True,
        }
        return self.generated(request_id, *await self.request("POST", "/generate", _generated, json=body))

    async def load(self) -> Load:
        asked = {"params": {"include": "core"}, "timeout": self.check_s}
        capacity, used, running, waiting = await self.request("GET", "/v1/loads", _loads, **asked)
        return Load(capacity, used, running, waiting, await self._retracted(), block=1)

    async def _retracted(self) -> int:
        """0 without --enable-metrics; the scheduler's safe reservations do not need it."""
        try:
            return int(total(await self.metrics(), "sglang:num_retracted_requests_total"))
        except EngineError:
            return 0

    async def _load_files(self, folder: Path, label: str) -> None:
        asked = {"model_path": str(folder), "flush_cache": True, "weight_version": label}
        await self._order("/update_weights_from_disk", asked)

    async def _load_direct(self, weights: Weights, direct: Direct) -> None:
        async def init(group: dict[str, Any]) -> None:
            self._group = group.pop("name")
            await self._order("/init_weights_update_group", group | {"rank_offset": 1, "group_name": self._group})

        async def update(info: dict[str, Any]) -> None:
            fields = {"names": info["names"], "dtypes": info["dtype_names"], "shapes": info["shapes"]}
            asked = fields | {"group_name": self._group, "flush_cache": True}
            await self._order("/update_weights_from_distributed", asked | {"weight_version": weights.label})

        await direct.open(init)
        await direct.send(weights, update)

    async def _order(self, path: str, asked: dict[str, Any]) -> None:
        done, message = await self.request("POST", path, lambda reply: (reply["success"], reply["message"]), json=asked)
        if not done:
            raise EngineUnavailable(f"{self.name}{path}: {message}")

    async def _release_memory(self) -> None:
        await self._send("POST", "/release_memory_occupation", json={})

    async def _take_memory(self, part: str) -> None:
        tags = ["weights"] if part == "weights" else ["kv_cache", "cuda_graph"]
        await self._send("POST", "/resume_memory_occupation", json={"tags": tags})

    async def _weight_label(self) -> str:
        return await self.request("GET", "/get_model_info", lambda reply: str(reply["weight_version"]), timeout=self.check_s)
