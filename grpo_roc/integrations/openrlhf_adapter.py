"""OpenRLHF 0.11: `--train.agent_func_path .../openrlhf_adapter.py`."""

from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

from grpo_roc import chat, roc
from grpo_roc.integrations import service

MAX_TURNS = 10


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._turns = 0
        self._outcomes: list[str] = []

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self._turns += 1
        turn = chat.read_turn(states["action_text"])
        if turn.calls and self._turns < MAX_TURNS:
            observations = await service.run_calls(turn.calls)
            self._outcomes += [one.outcome for one in observations]
            feedback = chat.END + chat.observation([one.text for one in observations], "")
            return self._output(0.0, feedback, False, states)
        score = await service.verify(chat.final_answer(states["action_text"]) or "", str(states["label"]))
        return self._output(score or 0.0, "", True, states, unknown=float(score is None))

    def _output(self, reward: float, feedback: str, done: bool, states: dict[str, Any], **logs: float) -> dict[str, Any]:
        errors = roc.tool_error_share(self._outcomes, without_calls=0.0)
        return {
            "rewards": torch.tensor(reward),
            "scores": torch.tensor(reward),
            "environment_feedback": feedback,
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"tool_error_share": torch.tensor(errors)} | {name: torch.tensor(v) for name, v in logs.items()},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self) -> None:
        super().__init__(AgentInstance)
