"""MCP over streamable HTTP at `/mcp`, by the official SDK: the tool `python`, and those of Python sessions.

No MCP session is kept between requests, and the id of a Python session names its worker: any gateway can answer any request.
A program's failure is a normal answer of the tool; a tool error is an infrastructure failure or wrong arguments. The first
request loads the SDK, which takes half a second and 25 MB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from exec_service.api import tools
from exec_service.api.calls import Endpoint
from exec_service.api.middleware import RequestFacts
from exec_service.api.streaming import cancel_on_disconnect
from exec_service.compat.adapter import Adapter, GatewayParts
from exec_service.config import package_version
from exec_service.dispatch.requests import Origin
from exec_service.refusals import Refusal
from exec_wire.messages.calls import Call, Result
from exec_wire.messages.sessions import Cell, Fork, SessionSpec, Tenant
from exec_wire.problems import PROBLEMS

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, PaginatedRequestParams

A = TypeVar("A", bound=Struct)
CELL_BYTES = 4096  # charged for a request to a session, besides its code


class McpEndpoint(Endpoint):
    def __init__(self, parts: GatewayParts) -> None:
        super().__init__(parts.config, parts.dispatch, parts.validator)
        self._parts, self._adapter = parts, Adapter("mcp", parts)
        self._starting = asyncio.Lock()
        self._manager: StreamableHTTPSessionManager | None = None
        self._tools: dict[str, tuple[type[Struct], Callable[[Any, Origin], Awaitable[CallToolResult]]]] = {
            tools.START.name: (tools.StartArguments, self._start),
            tools.RUN_CELL.name: (tools.CellArguments, self._run_cell),
            tools.FORK.name: (tools.ForkArguments, self._fork),
            tools.ROLL_BACK.name: (tools.SessionArguments, self._roll_back),
            tools.END.name: (tools.SessionArguments, self._end),
        }

    async def _answer(self, scope: Scope, facts: RequestFacts, receive: Receive, send: Send) -> None:
        body = await self._read(scope, facts, receive)
        manager = await self._started()
        await cancel_on_disconnect(manager.handle_request(scope, _replay(body), send), scope)

    async def _started(self) -> StreamableHTTPSessionManager:
        async with self._starting:
            if self._manager is None:
                manager = await asyncio.to_thread(self._make)
                running: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                task = asyncio.create_task(_run(manager, running))
                self._parts.tasks.add(task)
                task.add_done_callback(self._ended)
                await asyncio.wait({task, running}, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    task.result()
                self._manager = manager
            return self._manager

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Forget the manager, which cannot run twice; the next request starts another one."""
        self._manager = None
        self._parts.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._parts.supervisor.failed("mcp", error)

    def _make(self) -> StreamableHTTPSessionManager:
        from mcp.server.lowlevel import Server
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        server = Server("exec-service", version=package_version(), on_list_tools=_list_tools, on_call_tool=self._call_tool)
        # `Guard` checks Host and Origin; the size of the body is checked above.
        most = self._parts.config.max_body_bytes
        return StreamableHTTPSessionManager(server, json_response=True, stateless=True, max_request_body_size=most)

    async def _call_tool(self, context: ServerRequestContext[Any], asked: CallToolRequestParams) -> CallToolResult:
        facts: RequestFacts = context.request.scope["exec"]  # type: ignore[union-attr]
        try:
            return await self._use(asked.name, asked.arguments or {}, facts)
        except Refusal as refusal:
            self._parts.metrics.rejected(refusal.code)
            return _told(f"{PROBLEMS[refusal.code][1]}: {refusal.detail}".removesuffix(": "), failed=True)

    async def _use(self, name: str, given: dict[str, Any], facts: RequestFacts) -> CallToolResult:
        if name == tools.PYTHON.name:
            program = read(given, tools.PythonArguments)
            call = Call(program.code, stdin=program.input, echo_value=True, tenant=self._adapter.tenant)
            self._parts.validator.check(call, "$")
            return tool_result(await self._adapter.run(call, facts))
        if name not in self._tools:
            known = ", ".join((tools.PYTHON.name, *self._tools))
            raise Refusal("bad_field", f"unknown tool {name[:80]!r}; known: {known}")
        kind, act = self._tools[name]
        arguments = read(given, kind)
        texts = len(arguments.code) + len(arguments.input) if isinstance(arguments, tools.CellArguments) else 0
        with self._adapter.admitted(facts, 1, CELL_BYTES + texts):
            return await act(arguments, self._adapter.origin(facts))

    # -- sessions -----------------------------------------------------------------------------------------------------------

    async def _start(self, _: tools.StartArguments, origin: Origin) -> CallToolResult:
        spec = SessionSpec(self._adapter.profile, tenant=self._adapter.tenant, auto_checkpoint=True)
        session = await self._parts.sessions.create(spec, origin)
        return _told(session.id, {"session": session.id}, failed=False)

    async def _run_cell(self, given: tools.CellArguments, origin: Origin) -> CallToolResult:
        cell = Cell(given.code, stdin=given.input, tenant=self._adapter.tenant)
        return tool_result(await self._parts.sessions.run(given.session, cell, origin))

    async def _fork(self, given: tools.ForkArguments, origin: Origin) -> CallToolResult:
        made = await self._parts.sessions.fork(given.session, Fork(given.n, tenant=self._adapter.tenant), origin)
        ids = [session.id for session in made.sessions]
        return _told("\n".join(ids), {"sessions": ids}, failed=False)

    async def _roll_back(self, given: tools.SessionArguments, origin: Origin) -> CallToolResult:
        session = await self._parts.sessions.roll_back(given.session, Tenant(self._adapter.tenant), origin)
        files = "" if session.files_restored else "; the files stay as the cell left them"
        text = f"the session is in its state before the last cell{files}"
        return _told(text, {"files_restored": session.files_restored}, failed=False)

    async def _end(self, given: tools.SessionArguments, origin: Origin) -> CallToolResult:
        await self._parts.sessions.end(given.session, Tenant(self._adapter.tenant), origin)
        return _told("ended", {"ended": True}, failed=False)


def read(given: dict[str, Any], kind: type[A]) -> A:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise Refusal("bad_field", f"wrong arguments: {error}") from None


async def _run(manager: StreamableHTTPSessionManager, running: asyncio.Future[None]) -> None:
    """Run the SDK's tasks within this one."""
    async with manager.run():
        running.set_result(None)
        await asyncio.Event().wait()


def _replay(body: bytes) -> Receive:
    """Replay the body; `cancel_on_disconnect` watches the connection."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.Event().wait()  # type: ignore[return-value]

    return receive


async def _list_tools(context: ServerRequestContext[Any], asked: PaginatedRequestParams | None) -> ListToolsResult:
    from mcp_types import ListToolsResult, Tool

    listed = [Tool(name=made.name, description=made.description, input_schema=made.parameters) for made in tools.FUNCTIONS]
    return ListToolsResult(tools=listed)


def tool_result(result: Result) -> CallToolResult:
    facts = {"status": result.status, "blame": result.blame, "exit_code": result.exit_code, "wall_s": result.usage.wall_s}
    if result.state_kept is not None:
        facts["state_kept"] = result.state_kept
    pictures = [shown.data["image/png"] for shown in result.display if "image/png" in shown.data]
    return _told(result.tool_text(tools.TEXT_CHARS), facts, pictures, failed=result.blame in ("infra", "client"))


def _told(text: str, facts: dict[str, Any] | None = None, pictures: Sequence[str] = (), *, failed: bool) -> CallToolResult:
    from mcp_types import CallToolResult, ImageContent, TextContent

    images = [ImageContent(type="image", data=picture, mime_type="image/png") for picture in pictures]
    content = [TextContent(type="text", text=text), *images]
    return CallToolResult(content=content, structured_content=facts, is_error=failed)


def routes(parts: GatewayParts) -> list[Route]:
    return [Route("/mcp", McpEndpoint(parts), methods=["POST"])]
