"""`doctor --full` against a local engine and a live service, on the CPU; and what it does when something is wrong."""

from pathlib import Path
from typing import Any

import pytest
from service_harness import Service
from trainer_harness import TINY, with_settings
from transformers import AutoConfig

from grpo_roc import checks, doctor
from grpo_roc.checks import Setup
from grpo_roc.engines.local import LocalEngine
from grpo_roc.engines.weights import Weights

FULL = (
    "log-probabilities of engine and trainer", "weights to the engine and back", "collectives", "generation speed",
    "memory of an update", "memory forecast", "engines", "service", "device",
)  # fmt: skip


def test_every_check_passes_on_the_cpu_and_the_report_says_so(
    untaught: Path, live_service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = with_settings(f"service.url={live_service.url}")
    report = tmp_path / "doctor.md"
    failed = doctor.run(settings, need_gpu=False, full=True, model=untaught, report=report)
    told = capsys.readouterr().out
    print(told)
    assert failed == 0 and "FAIL" not in told
    written = report.read_text()
    assert all(f"| {name} | ok |" in written for name in FULL), written
    assert "gloo, 2 ranks: all_reduce" in written and "of the bound" in written and "forecast" in written


def test_without_a_gpu_and_without_a_model_it_says_so(capsys: pytest.CaptureFixture[str], live_service: Service) -> None:
    settings = with_settings(f"service.url={live_service.url}", "model.path=no/such/folder", "engines=[{kind: vllm}]")
    assert doctor.run(settings, need_gpu=True) == 1
    told = capsys.readouterr().out
    assert "FAIL    device: RuntimeError: torch sees no GPU" in told
    assert "skipped memory forecast: no model in no/such/folder" in told


def test_settings_that_do_not_fit_are_refused(untaught: Path) -> None:
    setup = Setup(with_settings("rl.micro_tokens=50000000"), untaught, 1)
    with pytest.raises(RuntimeError, match=r"usable: .* use more ranks"):
        checks.fits(setup)
    assert "each of 1 ranks" in checks.fits(Setup(TINY, untaught, 1))


class _Deaf(LocalEngine):
    async def update_weights(self, weights: Weights) -> None:
        """It does not load them."""


async def test_an_engine_that_keeps_its_weights_is_found(untaught: Path) -> None:
    setup = Setup(TINY, untaught, 1)

    def engine(kind: Any) -> LocalEngine:
        made: LocalEngine = kind(AutoConfig.from_pretrained(untaught), setup.weights().tensors, TINY.engines[0])
        return made

    assert "changed with the weights" in await checks.round_trip(setup, engine(LocalEngine))
    with pytest.raises(RuntimeError, match="engine and trainer compute different models"):
        await checks.round_trip(setup, engine(_Deaf))
    assert "mean" in await checks.parity(setup, engine(_Deaf)), "the check did not undo its change of the model"
