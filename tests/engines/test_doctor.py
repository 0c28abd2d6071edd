"""`doctor --full` with real vLLM servers: what a user runs first."""

from pathlib import Path

import pytest
from engine_harness import Vllm, at
from service_harness import Service

from grpo_roc import doctor


def test_doctor_finds_nothing_wrong_with_two_engines(
    toy: Path, pair: list[Vllm], live_service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for server in pair:
        server.wait()
    settings = at(live_service.url, [server.url for server in pair])
    failed = doctor.run(settings, need_gpu=False, full=True, model=toy, report=tmp_path / "doctor.md")
    with capsys.disabled():
        print(capsys.readouterr().out)
    written = (tmp_path / "doctor.md").read_text()
    assert failed == 0 and "| FAIL |" not in written
    assert all(written.count(f"{server.url}: ") == 4 for server in pair), "not every engine was checked"
    assert pair[0].label() != pair[1].label(), "each got its own push"
