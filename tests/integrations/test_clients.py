"""Each program is what a user of that client would write, and asserts what he would expect."""

import pytest


@pytest.mark.parametrize(
    ("venv", "program"),
    [
        ("sandbox-fusion", "fusion_sdk.py"),
        ("sandbox-fusion", "fusion_sdk_async.py"),
        ("verl", "verl_reward.py"),
        ("mcp", "mcp_client.py"),
        ("mcp1", "mcp1_client.py"),
    ],
)
def test_an_unmodified_client_gets_what_it_expects(venv: str, program: str, run_client: object) -> None:
    assert run_client(venv, program) == "all as expected\n"  # type: ignore[operator]
