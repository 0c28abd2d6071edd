"""MCP over streamable HTTP at `/mcp`, by the official SDK: one tool, `python`.

No session is kept between requests, so any gateway can answer any of them. What a program did is the tool's answer, also when
it failed; a tool error is what we did wrong. The SDK is loaded by the first request: it takes half a second and 25 MB.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from exec_service.doors.foreign_door import Desk, House
from exec_service.guard import RequestFacts
from exec_service.http_api import ClientGone, check_content_type, read_body
from exec_service.info import package_version
from exec_service.judging_api import unless_gone
from exec_service.refusals import Refusal
from exec_service.tools import PYTHON, TEXT_CHARS, PythonArguments
from exec_wire.messages import Call, Result

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, PaginatedRequestParams


class McpDoor:
    def __init__(self, house: House) -> None:
        self._house, self._desk = house, Desk("mcp", house)
        self._starting = asyncio.Lock()
        self._manager: StreamableHTTPSessionManager | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        facts: RequestFacts = scope["exec"]
        check_content_type(scope)
        try:
            body = await read_body(scope, receive, self._house.config.max_body_bytes)
            facts.body_bytes = len(body)
            manager = await self._started()
            await unless_gone(manager.handle_request(scope, _replay(body), send), receive)
        except ClientGone:
            facts.client_gone = True

    async def _started(self) -> StreamableHTTPSessionManager:
        async with self._starting:
            if self._manager is None:
                manager = await asyncio.to_thread(self._make)
                running: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                task = asyncio.create_task(_run(manager, running))
                self._house.tasks.add(task)
                await running
                self._manager = manager
            return self._manager

    def _make(self) -> StreamableHTTPSessionManager:
        from mcp.server.lowlevel import Server
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        server = Server("exec-service", version=package_version(), on_list_tools=_list_tools, on_call_tool=self._call_tool)
        # Host and Origin are the guard's business; the size of a body was looked at above.
        most = self._house.config.max_body_bytes
        return StreamableHTTPSessionManager(server, json_response=True, stateless=True, max_request_body_size=most)

    async def _call_tool(self, context: ServerRequestContext[Any], asked: CallToolRequestParams) -> CallToolResult:
        facts: RequestFacts = context.request.scope["exec"]  # type: ignore[union-attr]
        try:
            if asked.name != PYTHON.name:
                raise Refusal("bad_field", f"there is no tool {asked.name[:80]!r}; there is {PYTHON.name!r}")
            return tool_result(await self._desk.run(self._call(asked.arguments or {}), facts))
        except Refusal as refusal:
            self._house.metrics.rejected(refusal.code)
            return _said(refusal.detail or refusal.code, failed=True)

    def _call(self, given: dict[str, Any]) -> Call:
        try:
            arguments = msgspec.convert(given, PythonArguments)
        except msgspec.ValidationError as error:
            raise Refusal("bad_field", f"wrong arguments: {error}") from None
        call = Call(arguments.code, stdin=arguments.input, echo_value=True, tenant=self._desk.tenant)
        self._house.validator.check(call, "$")
        return call


async def _run(manager: StreamableHTTPSessionManager, running: asyncio.Future[None]) -> None:
    """The SDK's tasks live in this one."""
    async with manager.run():
        running.set_result(None)
        await asyncio.Event().wait()


def _replay(body: bytes) -> Receive:
    """The body that was read; that the caller has gone is noticed elsewhere."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.Event().wait()  # type: ignore[return-value]

    return receive


async def _list_tools(context: ServerRequestContext[Any], asked: PaginatedRequestParams | None) -> ListToolsResult:
    from mcp_types import ListToolsResult, Tool

    tool = Tool(name=PYTHON.name, description=PYTHON.description, input_schema=PYTHON.parameters)
    return ListToolsResult(tools=[tool])


def tool_result(result: Result) -> CallToolResult:
    facts = {"status": result.status, "blame": result.blame, "exit_code": result.exit_code, "wall_s": result.usage.wall_s}
    return _said(result.tool_text(TEXT_CHARS), facts, failed=result.blame in ("infra", "client"))


def _said(text: str, facts: dict[str, Any] | None = None, *, failed: bool) -> CallToolResult:
    from mcp_types import CallToolResult, TextContent

    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=facts, is_error=failed)


def routes(house: House) -> list[Route]:
    return [Route("/mcp", McpDoor(house), methods=["POST"])]
