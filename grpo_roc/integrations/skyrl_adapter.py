"""SkyRL (skyrl-gym 0.4): an environment with the service as its tool.

register(id="exec_math", entry_point="grpo_roc.integrations.skyrl_adapter:ExecMathEnv")
environment.skyrl_gym.max_env_workers=512      # steps run in threads; the default of 32 is too small
"""

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.tools.core import ToolGroup, tool

from grpo_roc import chat
from grpo_roc.integrations import service


class ExecToolGroup(ToolGroup):
    def __init__(self) -> None:
        self.outcomes: list[str] = []
        super().__init__(name="ExecToolGroup")

    @tool
    def python(self, code: str, input: str = "") -> str:
        found = service.run_blocking(code, input)
        self.outcomes.append(found.outcome)
        return found.text


class ExecMathEnv(BaseTextEnv):
    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        extras = extras or {}
        self._truth = str(extras["reward_spec"]["ground_truth"])
        self.max_turns = int(extras.get("max_turns", 10))
        self._tools = ExecToolGroup()
        self.init_tool_groups([self._tools])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        turn = chat.read_turn(action)
        if turn.calls and self.turns < self.max_turns:
            content = chat.tool_responses([self._run(call) for call in turn.calls])
            return self._output([{"role": "user", "content": content}], 0.0, False)
        found = service.blocking_client().verify(chat.final_answer(action) or "", self._truth)
        return self._output([], float(bool(found.equal)), True, unknown=found.equal is None)

    def _run(self, call: chat.ToolCall | chat.ParseFailure) -> str:
        if isinstance(call, chat.ParseFailure):
            self._tools.outcomes.append("error")
            return call.why
        return str(self._execute_tool("ExecToolGroup", "python", [call.code, call.stdin]))

    def _output(self, observations: list[dict[str, str]], reward: float, done: bool, **more: Any) -> BaseTextEnvStepOutput:
        metadata = {"outcomes": list(self._tools.outcomes)} | more
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata=metadata)
