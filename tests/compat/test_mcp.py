"""The MCP adapter, spoken to by hand; the official client is in tests/integrations."""

import asyncio
import base64
from typing import Any
from unittest.mock import ANY

import httpx
from compat_harness import Visitor
from gateway_harness import problem, running, soon, until

ACCEPT = {"accept": "application/json, text/event-stream", "mcp-protocol-version": "2025-06-18"}


async def ask(http: httpx.AsyncClient, method: str, **params: Any) -> dict[str, Any]:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    answer = await http.post("/mcp", json=body, headers=ACCEPT)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()["result"]
    return result


async def call(http: httpx.AsyncClient, name: str = "python", **arguments: Any) -> dict[str, Any]:
    return await ask(http, "tools/call", name=name, arguments=arguments)


async def test_initialize(here: Visitor) -> None:
    about = {"name": "t", "version": "1"}
    made = await ask(here.http, "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=about)
    assert made["serverInfo"]["name"] == "exec-service" and "tools" in made["capabilities"]


async def test_the_tools_are_listed_as_v1_tools_has_them(here: Visitor) -> None:
    tools = (await ask(here.http, "tools/list"))["tools"]
    given = (await here.http.get("/v1/tools")).json()["tools"]
    for tool, openai in zip(tools, given, strict=True):
        assert (openai["type"], openai["function"]["name"]) == ("function", tool["name"])
        assert tool["inputSchema"] == openai["function"]["parameters"]
    assert [tool["name"].removeprefix("python_session_") for tool in tools] == "python start run fork rollback end".split()
    [tool, *_] = tools
    assert tool["inputSchema"]["required"] == ["code"] and tool["inputSchema"]["properties"].keys() == {"code", "input"}
    assert "$ref" not in str(tool["inputSchema"])


async def test_a_program_is_run_and_its_value_shown(here: Visitor) -> None:
    made = await call(here.http, code="print(input())\n6 * 7", input="hi")
    assert made["content"] == [{"type": "text", "text": "hi\n42"}] and not made.get("isError")
    assert made["structuredContent"]["status"] == "ok"


async def test_a_failed_program_is_an_answer_and_no_tool_error(here: Visitor) -> None:
    made = await call(here.http, code="1/0")
    assert "ZeroDivisionError" in made["content"][0]["text"] and not made.get("isError")


async def test_wrong_arguments_and_unknown_tools_are_told_to_the_model(here: Visitor) -> None:
    for made in (await call(here.http), await call(here.http, code=3), await call(here.http, "ruby", code="")):
        assert made["isError"] and made["content"][0]["text"]


async def session_tool(here: Visitor, verb: str, failed: bool = False, **arguments: Any) -> dict[str, Any]:
    made = await call(here.http, f"python_session_{verb}", **arguments)
    assert made.get("isError", False) is failed, made
    return made


async def test_a_session_is_started_forked_rolled_back_and_ended(here: Visitor) -> None:
    made = await session_tool(here, "start")
    session = made["structuredContent"]["session"]
    assert made["content"] == [{"type": "text", "text": session}]
    assert (await session_tool(here, "run", session=session, code="x = int(input())", input="5"))["structuredContent"] == {
        **{"status": "ok", "blame": "none", "exit_code": 0, "state_kept": True},
        "wall_s": ANY,
    }
    one, two = (await session_tool(here, "fork", session=session, n=2))["structuredContent"]["sessions"]
    await session_tool(here, "run", session=one, code="x = 6")
    texts = [(await session_tool(here, "run", session=each, code="x"))["content"][0]["text"] for each in (session, one, two)]
    assert texts == ["5", "6", "5"]
    died = await session_tool(here, "run", session=session, code="import os; os.abort()")
    assert died["structuredContent"]["state_kept"] is False and "variables are lost" in died["content"][0]["text"]
    assert (await session_tool(here, "rollback", session=session))["structuredContent"] == {"files_restored": True}
    assert (await session_tool(here, "run", session=session, code="x"))["content"][0]["text"] == "5"
    again = await session_tool(here, "rollback", session=session)
    assert again["structuredContent"] == {"files_restored": True}  # to before the last cell
    for each in (session, one, two):
        await session_tool(here, "end", session=each)
    gone = await session_tool(here, "run", True, session=session, code="x")
    assert gone["content"][0]["text"].startswith("No such session")


async def test_a_picture_that_a_cell_shows_is_shown(here: Visitor) -> None:
    session = (await session_tool(here, "start"))["structuredContent"]["session"]
    shows = "class P:\n    def _repr_png_(self): return b'picture'\n    def __repr__(self): return 'P'\nP()"
    made = await session_tool(here, "run", session=session, code=shows)
    picture = {"type": "image", "data": base64.b64encode(b"picture").decode(), "mimeType": "image/png"}
    assert made["content"] == [{"type": "text", "text": "P"}, picture]
    await session_tool(here, "end", session=session)


async def test_wrong_arguments_of_session_tools_are_told_to_the_model(here: Visitor) -> None:
    for verb, arguments in (("start", {"a": 1}), ("run", {"code": "1"}), ("fork", {"session": "s", "n": 0}), ("end", {})):
        assert "wrong arguments" in (await session_tool(here, verb, True, **arguments))["content"][0]["text"]
    assert "No such session" in (await session_tool(here, "end", True, session="s"))["content"][0]["text"]


async def test_what_we_did_wrong_is_a_tool_error_and_overload_too() -> None:
    async with running(max_calls=1, max_calls_per_request=1) as service:
        lost = await call(service.client, code="lose")
        assert lost["isError"] and "not the program's fault" in lost["content"][0]["text"]
        held = soon(service.run("hold"))
        await until(lambda: service.gateway.dispatch.admission.calls == 1)
        assert (await call(service.client, code="say x"))["isError"]
        service.worker.let_go.set()
        await held


async def test_a_draining_service_refuses_as_it_does_everywhere() -> None:
    async with running() as service:
        service.gateway.dispatch.draining = True
        problem(await service.client.post("/mcp", json={"method": "tools/list"}, headers=ACCEPT), 503, "draining")


async def test_a_caller_who_leaves_has_his_program_killed() -> None:
    async with running() as service:
        held = soon(call(service.client, code="hold"))
        await until(lambda: len(service.worker.calls) == 1)
        held.cancel()
        await until(lambda: len(service.worker.cancelled) == 1)
        assert service.gateway.dispatch.admission.calls == 0
        await asyncio.gather(held, return_exceptions=True)


async def test_calls_have_the_adapters_tenant_and_are_counted(here: Visitor) -> None:
    async with running(keyless_adapters={"mcp": {"tenant": "agents", "max_calls": 5}}) as service:
        await call(service.client, code="say x")
        assert service.worker.calls[0].tenant == "agents"
        assert await service.metric("exec_adapter_calls_total", adapter="mcp", status="ok", blame="none") == 1


async def test_a_web_page_cannot_use_the_adapter() -> None:
    async with running() as service:
        body = (
            b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "python", "arguments": {"code": "say x"}}}'
        )
        plain = await service.client.post("/mcp", content=body, headers=ACCEPT | {"content-type": "text/plain"})
        problem(plain, 415, "wrong_content_type")
        foreign = ACCEPT | {"content-type": "application/json", "origin": "https://evil.example"}
        problem(await service.client.post("/mcp", content=body, headers=foreign), 403, "foreign_origin")
        problem(await service.client.get("/mcp", headers=ACCEPT), 405, "method_not_allowed")
        assert not service.worker.calls
