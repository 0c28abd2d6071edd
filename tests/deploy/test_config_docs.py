"""docs/configuration.md says what the classes say, both ways."""

import re
from pathlib import Path

import pytest
from chart_harness import render_settings
from msgspec import Struct

from exec_service.config import GatewayConfig, settings
from worker.config import WorkerConfig

FILE = Path(__file__).parents[2] / "docs" / "configuration.md"
REMEDY = "run: python deploy/render_settings.py"


def rows(title: str) -> dict[str, list[str]]:
    """Variable -> the other cells, as the file has them."""
    section = re.split(r"^## ", FILE.read_text(), flags=re.M)
    [text] = [part for part in section if part.startswith(title)]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {first.strip("`"): rest for first, *rest in cells}


@pytest.mark.parametrize(("title", "config"), [("Gateway", GatewayConfig), ("Worker", WorkerConfig)])
def test_every_setting_has_a_row_and_every_row_a_setting(title: str, config: type[Struct]) -> None:
    documented = rows(title)
    assert list(documented) == [setting.env for setting in settings(config)], REMEDY
    for setting in settings(config):
        assert documented[setting.env][-1] == setting.help, REMEDY


def test_the_file_is_what_the_classes_give() -> None:
    assert FILE.read_text() == render_settings.page(), REMEDY


def test_defaults_are_those_of_the_class() -> None:
    gateway, worker = rows("Gateway"), rows("Worker")
    assert gateway["EXEC_MAX_BYTES"][0] == "`1073741824` (1 GiB)"
    assert gateway["EXEC_HOST"][0] == "`127.0.0.1`"
    assert gateway["EXEC_PORT"][:2] == ["`8080`", "a whole number at least 0 and at most 65535"]
    assert worker["EXEC_RUNNER_SOCKET"][0] == "none"


def test_defaults_that_depend_on_the_machine_are_in_words() -> None:
    worker = rows("Worker")
    assert worker["EXEC_SLOTS"][0] == "three for every core"
    assert "/" not in worker["EXEC_PACKAGES"][0]
    assert str(Path(__file__).parents[2]) not in FILE.read_text()
