"""A service and a tiny trained model for the trainer's tests. Without torch they are skipped: the service needs none."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the trainer's extra is not installed: pip install -e .[trainer]")
pytest.importorskip("transformers", reason="the trainer's extra is not installed: pip install -e .[trainer]")

os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars would hide the output of a failure

import torch
from engine_server import SGLANG, FixtureServer, serving_fixture
from service_harness import Service, serving
from trainer_harness import TINY, small_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def live_service() -> Iterator[Service]:
    with serving() as service:
        yield service


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows the format and uses the tool, after half a minute of SFT."""
    from grpo_roc.sft import run_sft

    out = tmp_path_factory.mktemp("taught")
    return run_sft(TINY, small_model(out / "tiny"), out)


@pytest.fixture(scope="session")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("untaught"))


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where weights are written."""
    from grpo_roc.engines import weights

    monkeypatch.setattr(weights, "SHARED", tmp_path)
    return tmp_path


@pytest.fixture
def server() -> Iterator[FixtureServer]:
    with serving_fixture(SGLANG) as one:
        yield one
