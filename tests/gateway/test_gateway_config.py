"""The gateway's settings: one class, each with a default, bounds and a line of help."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from exec_service.config import ConfigError, GatewayConfig, JobsWorkerConfig, read_environment, settings
from worker.config import WorkerConfig


def test_the_defaults_are_the_documented_ones() -> None:
    config = GatewayConfig()
    assert (config.host, config.port) == ("127.0.0.1", 8080)
    assert (config.max_calls, config.max_bytes) == (60_000, 1 << 30)
    assert (config.max_calls_per_request, config.max_body_bytes) == (4096, 64 << 20)
    assert config.idempotency_ttl_s == 120


def test_every_setting_has_a_variable_and_a_line_of_help() -> None:
    found = list(settings(GatewayConfig))
    assert [setting.name for setting in found] == list(GatewayConfig.__struct_fields__)
    for setting in found:
        assert setting.env == "EXEC_" + setting.name.upper()
        assert setting.help and "\n" not in setting.help
        assert setting.default is not msgspec.NODEFAULT


def test_settings_come_from_the_environment_that_is_passed() -> None:
    config = read_environment(
        GatewayConfig, {"EXEC_PORT": "9", "EXEC_DRAIN_S": "1.5", "EXEC_HOST": "::1", "OTHER": "x", "EXEC_SLOTS": "3"}
    )
    assert config == GatewayConfig(port=9, drain_s=1.5, host="::1")


@pytest.mark.parametrize(
    ("name", "text"), [("EXEC_PORT", "many"), ("EXEC_PORT", "70000"), ("EXEC_MAX_CALLS", "0"), ("EXEC_DRAIN_S", "")]
)
def test_a_setting_that_cannot_be_meant_is_an_error_naming_it(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_environment(GatewayConfig, {name: text})


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_calls"):
        GatewayConfig(max_calls=10)
    with pytest.raises(ConfigError, match="max_bytes"):
        GatewayConfig(max_bytes=10)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        GatewayConfig().port = 1  # type: ignore[misc]


def test_importing_the_gateway_starts_and_reads_nothing() -> None:
    code = "import sys, threading, exec_service.app; sys.exit(threading.active_count() != 1)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"EXEC_PORT": "nonsense", "PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )


@pytest.mark.parametrize("config", [GatewayConfig, WorkerConfig, JobsWorkerConfig])
def test_a_variable_that_nobody_reads_is_an_error_with_a_suggestion(config: type[msgspec.Struct]) -> None:
    given = {"EXEC_REDIS": "redis://r", "EXEC_JOBS_DIR": "/jobs"}
    with pytest.raises(ConfigError, match=r"EXEC_SLOT: .* did you mean EXEC_SLOTS\?"):
        read_environment(config, given | {"EXEC_SLOT": "4"})
    with pytest.raises(ConfigError, match=r"EXEC_ZZZ: .*configuration\.md"):
        read_environment(config, given | {"EXEC_ZZZ": "4"})


def test_variables_of_others_are_no_settings_and_no_errors() -> None:
    links = {
        "EXEC_GATEWAY_SERVICE_HOST": "10.0.0.1",
        "EXEC_GATEWAY_SERVICE_PORT_HTTP": "80",
        "EXEC_GATEWAY_PORT": "tcp://10.0.0.1:80",
        "EXEC_GATEWAY_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert read_environment(GatewayConfig, links | {"EXEC_API_KEY": "k", "EXECUTE": "x"}) == GatewayConfig()


def test_every_variable_of_the_project_is_known() -> None:
    """Whatever the chart, the images, documents, tools and tests name can be set where a service starts."""
    from exec_service.config import check_names

    root = Path(__file__).parents[2]
    files = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    wrong = set()
    for file in files:
        if Path(file).name not in (Path(__file__).name, "CHANGELOG.md", "trust.md") and (root / file).is_file():
            for name in set(re.findall(r"\bEXEC_[A-Z][A-Z_]*[A-Z]\b", (root / file).read_text(errors="replace"))):
                try:
                    check_names({name: ""})
                except ConfigError:
                    wrong.add((name, file))
    assert not wrong
