"""Tinker cookbook 0.5: a tool for `AgentToolMessageEnv(tools=[ExecTool().python], reward_fn=reward_fn(truth), …)`."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from tinker_cookbook.tool_use import ToolResult, simple_tool_result, tool

from grpo_roc import chat
from grpo_roc.integrations import service


class ExecTool:
    @tool
    async def python(
        self, code: Annotated[str, "The program."], input: Annotated[str, "Its standard input."] = ""
    ) -> ToolResult:
        """Execute a Python program and return what it prints."""
        found = await service.run(code, input)
        metrics = {"tool_error": float(found.outcome == "error"), "tool_infra": float(found.outcome == "infra")}
        return simple_tool_result(found.text, metrics=metrics, metadata={"status": found.status})


def reward_fn(truth: str) -> Callable[[list[Any]], Awaitable[tuple[float, dict[str, float]]]]:
    async def reward(history: list[Any]) -> tuple[float, dict[str, float]]:
        content = history[-1]["content"]
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        score = await service.verify(chat.final_answer(text) or text, truth)
        return score or 0.0, {"unknown": float(score is None)}

    return reward
