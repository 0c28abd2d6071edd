"""A session that breaks the protocol is ended with a reason and does not affect others."""

import logging
from collections.abc import AsyncIterator

import pytest
from common import until
from session_harness import SessionLab, session_laboratory

from exec_wire.messages.sessions import FetchFiles, Refused
from worker.sandbox.inside.session import CONTROL_FD

FLOOD = f"import os\nwhile True:\n    os.write({CONTROL_FD}, b'[' * 4000)\n"
# Ours, by which a session writes whatever is not output.
PATCH = "import json\nplain = json.dumps\njson.dumps = lambda said: '[' * 1000 if {when} else plain(said)\n"


@pytest.fixture(scope="module")
async def lab() -> AsyncIterator[SessionLab]:
    async with session_laboratory() as lab:
        yield lab


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


async def test_deep_json_on_the_control_socket_ends_the_session_by_its_own_fault(
    lab: SessionLab, logged: pytest.LogCaptureFixture
) -> None:
    session, canary = await lab.create(), await lab.create()
    await canary.ok("kept = 41")
    result = await session.run(FLOOD)
    assert (result.status, result.blame, result.state_kept) == ("signal", "model", False)
    assert "it wrote to its control socket" in result.error
    assert (await canary.ok("kept + 1")).value == "42"
    assert logged.records == []
    refused = await session.refused("1")
    assert (refused.code, "it wrote to its control socket" in refused.detail) == ("session_ended", True)


async def test_deep_json_while_no_cell_runs_is_not_the_machines_fault(
    lab: SessionLab, logged: pytest.LogCaptureFixture
) -> None:
    session = await lab.create()
    await session.ok(f"import threading, os, time\ndef later():\n    time.sleep(1)\n    os.write({CONTROL_FD}, b'[' * 4000)\n")
    await session.ok("threading.Thread(target=later).start()")
    await until(lambda: not session.session.member.alive, "the session is ended")
    refused = await session.refused("1")
    assert (refused.code, "it wrote to its control socket" in refused.detail) == ("session_ended", True)
    assert logged.records == []


async def test_deep_json_as_the_value_of_a_cell_ends_the_session_by_its_own_fault(lab: SessionLab) -> None:
    session = await lab.create()
    result = await session.run(PATCH.format(when="'value' in said"))
    assert (result.status, result.blame, result.state_kept) == ("signal", "model", False)
    assert "cannot be read" in result.error


async def test_deep_json_as_an_index_of_files_ends_the_session_by_its_own_fault(lab: SessionLab) -> None:
    session = await lab.create()
    await session.ok(PATCH.format(when="isinstance(said, list)"))
    reply = await lab.ask(FetchFiles(session.id, ["a" * 200], ""))
    assert isinstance(reply, Refused) and reply.code == "session_ended"
    assert "answer about files" in reply.detail
