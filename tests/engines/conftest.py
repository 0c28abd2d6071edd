"""A real vLLM on the CPU, with a real pretrained model and with the toy: `make test-engines`. Not part of `make test`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

collect_ignore_glob = [] if "EXEC_ENGINES" in os.environ else ["test_*.py"]
if not collect_ignore_glob:
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch

    sys.path.append(str(Path(__file__).parents[1] / "trainer"))
    from engine_harness import SEEDED, SMOLLM2, TOY, Vllm
    from service_harness import Service, serving

    torch.set_num_threads(1)

    @pytest.fixture(scope="module", params=["bfloat16", "float32"])
    def smollm2(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
        gloo = ("--weight-transfer-config", '{"backend": "gloo"}')
        with Vllm(SMOLLM2, tmp_path_factory.mktemp("log"), "--dtype", request.param, *gloo) as server:
            yield server

    @pytest.fixture(scope="session")
    def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A model of the toy that knows the format and uses the tool."""
        from grpo_roc.model import make_tiny
        from grpo_roc.sft import run_sft

        out = tmp_path_factory.mktemp("toy")
        make_tiny(TOY, out / "tiny")
        return run_sft(TOY, out / "tiny", out)

    @pytest.fixture(scope="module")
    def pair(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Vllm]]:
        """Two engines with a KV cache of 8,192 tokens each."""
        small = ("--dtype", "float32", "--num-gpu-blocks-override", "64", *SEEDED)
        first, second = (Vllm(toy, tmp_path_factory.mktemp("log"), *small) for _ in range(2))
        with first, second:
            yield [first, second]

    @pytest.fixture(scope="session")
    def live_service() -> Iterator[Service]:
        with serving() as service:
            yield service
