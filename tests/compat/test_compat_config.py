"""Which doors are open, and on what terms."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from gateway_harness import problem, running

from exec_service.config import ConfigError, DoorName, GatewayConfig, OpenDoor, read_environment

MOVE = Path(__file__).parents[2] / "docs" / "move"
ONE_ROUTE = {
    "code-judge": "/run",
    "sandbox-fusion": "/run_code",
    "nemo-skills": "/execute",
    "piston": "/api/v2/execute",
    "mcp": "/mcp",
}


@pytest.mark.parametrize("name", get_args(DoorName))
async def test_each_door_can_be_shut_by_itself(name: str) -> None:
    others = [door for door in get_args(DoorName) if door != name]
    async with running(doors=others) as service:
        problem(await service.client.post(ONE_ROUTE[name], json={}), 404, "not_found")
        for other in others:
            assert (await service.client.post(ONE_ROUTE[other], json={})).status_code != 404
        assert (await service.client.get("/v1/tools")).status_code == 200


@pytest.mark.parametrize("name", get_args(DoorName))
def test_each_door_has_its_page(name: str) -> None:
    text = (MOVE / f"{name}.md").read_text()
    assert text.startswith("# Move from") and "one line to change" in text
    assert "## What differs" in text and "## What gets better" in text


def test_doors_come_from_the_environment() -> None:
    opened = '{"mcp": {"tenant": "agents", "max_calls": 7}}'
    config = read_environment(GatewayConfig, {"EXEC_DOORS": '["mcp"]', "EXEC_OPEN_DOORS": opened})
    assert (config.doors, config.open_doors) == (["mcp"], {"mcp": OpenDoor("agents", 7)})
    assert read_environment(GatewayConfig, {"EXEC_DOORS": "[]"}).doors == []
    assert GatewayConfig().doors == list(get_args(DoorName))


@pytest.mark.parametrize(
    "environment",
    [
        {"EXEC_DOORS": '["codejudge"]'},
        {"EXEC_OPEN_DOORS": '{"mcp": {"tenant": "x"}}'},
        {"EXEC_OPEN_DOORS": '{"mcp": {"max_calls": 1}}'},
        {"EXEC_OPEN_DOORS": '{"mcp": {"tenant": "", "max_calls": 1}}'},
        {"EXEC_OPEN_DOORS": '{"front": {"tenant": "x", "max_calls": 1}}'},
    ],
)
def test_a_door_that_is_not_there_or_has_no_terms_is_refused_by_name(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(environment))):
        read_environment(GatewayConfig, environment)
