"""Which adapters are enabled, and which accept clients without a key."""

from pathlib import Path
from typing import get_args

import pytest
from gateway_harness import problem, running

from exec_service.config import AdapterName, ConfigError, GatewayConfig, KeylessAdapter, read_environment

MOVE = Path(__file__).parents[2] / "docs" / "move"
ONE_ROUTE = {
    "code-judge": "/run",
    "sandbox-fusion": "/run_code",
    "nemo-skills": "/execute",
    "piston": "/api/v2/execute",
    "mcp": "/mcp",
}


@pytest.mark.parametrize("name", get_args(AdapterName))
async def test_each_adapter_can_be_shut_by_itself(name: str) -> None:
    others = [adapter for adapter in get_args(AdapterName) if adapter != name]
    async with running(adapters=others) as service:
        problem(await service.client.post(ONE_ROUTE[name], json={}), 404, "not_found")
        for other in others:
            assert (await service.client.post(ONE_ROUTE[other], json={})).status_code != 404
        assert (await service.client.get("/v1/tools")).status_code == 200


@pytest.mark.parametrize("name", get_args(AdapterName))
def test_each_adapter_has_its_page(name: str) -> None:
    text = (MOVE / f"{name}.md").read_text()
    assert text.startswith("# Move from") and "one line to change" in text
    assert "## What differs" in text and "## What gets better" in text


def test_adapters_come_from_the_environment() -> None:
    opened = '{"mcp": {"tenant": "agents", "max_calls": 7}}'
    config = read_environment(GatewayConfig, {"EXEC_ADAPTERS": '["mcp"]', "EXEC_KEYLESS_ADAPTERS": opened})
    assert (config.adapters, config.keyless_adapters) == (["mcp"], {"mcp": KeylessAdapter("agents", 7)})
    assert read_environment(GatewayConfig, {"EXEC_ADAPTERS": "[]"}).adapters == []
    assert GatewayConfig().adapters == list(get_args(AdapterName))


@pytest.mark.parametrize(
    "environment",
    [
        {"EXEC_ADAPTERS": '["codejudge"]'},
        {"EXEC_KEYLESS_ADAPTERS": '{"mcp": {"tenant": "x"}}'},
        {"EXEC_KEYLESS_ADAPTERS": '{"mcp": {"max_calls": 1}}'},
        {"EXEC_KEYLESS_ADAPTERS": '{"mcp": {"tenant": "", "max_calls": 1}}'},
        {"EXEC_KEYLESS_ADAPTERS": '{"front": {"tenant": "x", "max_calls": 1}}'},
    ],
)
def test_a_adapter_that_is_not_there_or_has_no_terms_is_refused_by_name(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(environment))):
        read_environment(GatewayConfig, environment)
