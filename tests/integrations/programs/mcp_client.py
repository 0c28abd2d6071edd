"""The official MCP client."""

import asyncio
import sys

from mcp import Client


async def main() -> None:
    async with Client(sys.argv[1] + "/mcp") as client:
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools][:2] == ["python", "python_session_start"], tools
        made = await client.call_tool("python", {"code": "print(input())\n6 * 7", "input": "hi"})
        assert not made.is_error and made.content[0].text == "hi\n42", made
        failed = await client.call_tool("python", {"code": "1/0"})
        assert not failed.is_error and "ZeroDivisionError" in failed.content[0].text
        wrong = await client.call_tool("python", {"program": "1"})
        assert wrong.is_error
        state = (await client.call_tool("python_session_start", {})).structured_content
        await client.call_tool("python_session_run", {**state, "code": "x = 20"})
        forked = (await client.call_tool("python_session_fork", state)).structured_content["sessions"]
        for one in (state["session"], *forked):
            told = await client.call_tool("python_session_run", {"session": one, "code": "x += 1\nx"})
            assert not told.is_error and told.content[0].text == "21", told
            await client.call_tool("python_session_end", {"session": one})
        many = await asyncio.gather(*(client.call_tool("python", {"code": f"print({n})"}) for n in range(20)))
        assert [one.content[0].text for one in many] == [str(n) for n in range(20)]


asyncio.run(main())
print("all as expected")
