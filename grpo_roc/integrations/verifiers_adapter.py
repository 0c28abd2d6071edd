"""verifiers 0.4 (`verifiers.v1`), and RoC for prime-rl.

`ExecToolset` serves the tool over MCP; `ExecMathTask` uses it and scores answers in the service. With a service that speaks MCP
itself, `ToolsetConfig(url=…)` is enough. RoC in prime-rl: call `score_group` from an `Algorithm`; it returns the advantages of
a group's rollouts, zero for those not selected.
"""

from collections.abc import Sequence

import verifiers.v1 as vf

from grpo_roc import chat, roc
from grpo_roc.integrations import service


class ExecToolset(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "py"

    @vf.tool
    async def run(self, code: str, input: str = "") -> str:
        """Execute a Python program and return what it prints."""
        return (await service.run(code, input)).text


class MathData(vf.TaskData):
    answer: str = ""


class ExecTaskConfig(vf.TaskConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class ExecMathTask(vf.Task[MathData, vf.State, ExecTaskConfig]):
    @classmethod
    def toolsets(cls, config: ExecTaskConfig) -> list[vf.Toolset]:
        return [ExecToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return await score(trace.last_reply or "", self.data.answer)


async def score(reply: str, truth: str) -> float:
    found = await service.verify(chat.final_answer(reply) or reply, truth)
    if found is None:
        raise RuntimeError("the service could not verify the answer; the model is not to blame")
    return found


def score_group(rollouts: Sequence[roc.Rollout], seed: str) -> list[float]:
    """One advantage per rollout; half of them are zero."""
    penalties = [roc.penalty(one) for one in rollouts]
    return roc.group_advantages([one.reward for one in rollouts], penalties, len(rollouts) // 2, seed)
