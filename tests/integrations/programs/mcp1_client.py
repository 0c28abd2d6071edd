"""The official MCP client of the first generation, which most agents still have."""

import asyncio
import sys

from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client


async def main() -> None:
    async with streamablehttp_client(sys.argv[1] + "/mcp") as (read, write, _), ClientSession(read, write) as session:
        await session.initialize()
        tools = (await session.list_tools()).tools
        assert [tool.name for tool in tools][:2] == ["python", "python_session_start"], tools
        made = await session.call_tool("python", {"code": "print(input())\n6 * 7", "input": "hi"})
        assert not made.isError and made.content[0].text == "hi\n42", made
        failed = await session.call_tool("python", {"code": "1/0"})
        assert not failed.isError and "ZeroDivisionError" in failed.content[0].text
        state = (await session.call_tool("python_session_start", {})).structuredContent
        await session.call_tool("python_session_run", {**state, "code": "x = 20"})
        forked = (await session.call_tool("python_session_fork", state)).structuredContent["sessions"]
        for one in (state["session"], *forked):
            told = await session.call_tool("python_session_run", {"session": one, "code": "x += 1\nx"})
            assert not told.isError and told.content[0].text == "21", told
            await session.call_tool("python_session_end", {"session": one})
        many = await asyncio.gather(*(session.call_tool("python", {"code": f"print({n})"}) for n in range(20)))
        assert [one.content[0].text for one in many] == [str(n) for n in range(20)]


asyncio.run(main())
print("all as expected")
