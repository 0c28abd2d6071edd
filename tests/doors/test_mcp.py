"""The MCP door, spoken to by hand; the official client is in tests/integrations."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from doors_harness import Visitor
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


async def test_the_tool_is_listed_as_v1_tools_has_it(here: Visitor) -> None:
    [tool] = (await ask(here.http, "tools/list"))["tools"]
    [openai] = (await here.http.get("/v1/tools")).json()["tools"]
    assert (openai["type"], openai["function"]["name"], tool["name"]) == ("function", "python", "python")
    assert tool["inputSchema"] == openai["function"]["parameters"]
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


async def test_what_we_did_wrong_is_a_tool_error_and_overload_too() -> None:
    async with running(max_calls=1, max_calls_per_request=1) as service:
        lost = await call(service.client, code="lose")
        assert lost["isError"] and "not the program's fault" in lost["content"][0]["text"]
        held = soon(service.run("hold"))
        await until(lambda: service.gateway.dispatch.admission.calls == 1)
        assert (await call(service.client, code="say x"))["isError"]
        service.worker.let_go.set()
        await held


async def test_a_caller_who_leaves_has_his_program_killed() -> None:
    async with running() as service:
        held = soon(call(service.client, code="hold"))
        await until(lambda: len(service.worker.calls) == 1)
        held.cancel()
        await until(lambda: len(service.worker.cancelled) == 1)
        assert service.gateway.dispatch.admission.calls == 0
        await asyncio.gather(held, return_exceptions=True)


async def test_calls_have_the_doors_tenant_and_are_counted(here: Visitor) -> None:
    async with running(open_doors={"mcp": {"tenant": "agents", "max_calls": 5}}) as service:
        await call(service.client, code="say x")
        assert service.worker.calls[0].tenant == "agents"
        assert await service.metric("exec_door_calls_total", door="mcp", status="ok", blame="none") == 1


async def test_a_web_page_cannot_use_the_door() -> None:
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
