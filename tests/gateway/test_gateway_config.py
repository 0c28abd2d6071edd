"""The gateway's settings: one class, each with a default, bounds and a line of help."""

import subprocess
import sys

import msgspec
import pytest

from exec_service.config import ConfigError, GatewayConfig, read_environment, settings


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
