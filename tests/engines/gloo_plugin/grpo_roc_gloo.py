"""A plugin for vLLM: the weight transfer backend `gloo`, which is `nccl` over gloo, so that a CPU runs all but RCCL itself."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(minutes=10)


def register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    class GlooWeightTransferEngine(NCCLWeightTransferEngine):
        def init_transfer_engine(self, init_info: Any) -> None:
            address = (init_info.master_address, init_info.master_port, init_info.world_size)
            store = dist.TCPStore(*address, False, PATIENCE)
            self._gloo = dist.ProcessGroupGloo(store, init_info.rank_offset, init_info.world_size, PATIENCE)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            info = self.parse_update_info(update_info)
            for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                self._gloo.broadcast(weight, 0).wait()
                self.model.load_weights([(name, weight)])

    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)
