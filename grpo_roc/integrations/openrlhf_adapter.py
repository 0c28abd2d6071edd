"""OpenRLHF 0.11: `--train.agent_func_path .../openrlhf_adapter.py`, with RoC.

OpenRLHF starts the `n_samples_per_prompt` rollouts of a prompt together and wants as many back. The executor makes
`EXEC_OVERSAMPLE` (2) rollouts for each of them, waits for the whole group and returns the selected half. `EXEC_OVERSAMPLE=1`
turns RoC off. Use the estimator `group_norm` for the paper's advantages.
"""

import asyncio
import copy
import os
import random
from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

from grpo_roc import chat, roc
from grpo_roc.integrations import service

MAX_TURNS = 10


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.turns = self.answers = 0
        self.outcomes: list[str] = []
        self.ended = True  # the last turn's tokens end with <|im_end|>
        self.reward: float | None = 0.0  # None: the service could not verify the answer

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        turn = chat.read_turn(states["action_text"])
        self.turns += 1
        self.answers += turn.answers
        if turn.calls and self.turns < MAX_TURNS:
            observations = await service.run_calls(turn.calls)
            self.outcomes += [one.outcome for one in observations]
            feedback = chat.observation([one.text for one in observations], "")
            return self._output(0.0, feedback if self.ended else chat.END + feedback, False, states)
        answer = None if turn.calls else chat.final_answer(states["action_text"])
        self.reward = 0.0 if answer is None else await service.verify(answer, str(states["label"]))
        return self._output(self.reward or 0.0, "", True, states)

    def rollout(self) -> roc.Rollout:
        return roc.Rollout(self.reward or 0.0, self.outcomes, self.answers, self.turns)

    def _output(self, reward: float, feedback: str, done: bool, states: dict[str, Any]) -> dict[str, Any]:
        logs = {
            "tool_error_share": roc.tool_error_share(self.outcomes, without_calls=0.0),
            "unknown": float(self.reward is None),
        }
        return {
            "rewards": torch.tensor(reward),
            "scores": torch.tensor(reward),
            "environment_feedback": feedback,
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {name: torch.tensor(value) for name, value in logs.items()},
        }


class _Watch:
    """The engine of one rollout; tells its agent how a turn ended, which `step` cannot see."""

    def __init__(self, engine: Any, agent: AgentInstance, end: int) -> None:
        self._engine, self._agent, self._end = engine, agent, end

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        found = await self._engine.generate(*args, **kwargs)
        self._agent.ended = list(found.outputs[0].token_ids)[-1:] == [self._end]
        return found


class _Group:
    """The rollouts of a prompt that were started together."""

    def __init__(self) -> None:
        self.members = 0
        self.waiting = 0
        self.made: list[tuple[AgentInstance, dict[str, Any]]] = []
        self.kept: list[dict[str, Any]] = []
        self.done = asyncio.Event()


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self) -> None:
        super().__init__(AgentInstance)
        self._oversample = int(os.environ.get("EXEC_OVERSAMPLE", "2"))
        self._seed = int(os.environ.get("EXEC_SEED", "0"))
        self._groups: dict[str, _Group] = {}
        self._selected = 0

    async def execute(self, prompt: str, label: str, sampling_params: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        group = self._groups.setdefault(prompt, _Group())
        number, group.members = group.members, group.members + 1
        await asyncio.sleep(0)  # the others of the group are started by the same `gather`: now all have joined
        if self._groups.get(prompt) is group:
            del self._groups[prompt]
        try:
            rolls = (
                self._roll(prompt, label, copy.deepcopy(sampling_params), *args, **kwargs) for _ in range(self._oversample)
            )
            group.made += await asyncio.gather(*rolls)
        finally:
            group.waiting += 1
            if group.waiting == group.members:
                self._select(group)
        await group.done.wait()
        return group.kept[number]

    async def _roll(
        self, prompt: str, label: str, sampling_params: Any, max_length: int, hf_tokenizer: Any, llm_engine: Any, **kwargs: Any
    ) -> tuple[AgentInstance, dict[str, Any]]:
        agent = AgentInstance()
        one = copy.copy(self)
        one.agent_instance_cls = lambda: agent
        engine = _Watch(llm_engine, agent, hf_tokenizer.convert_tokens_to_ids(chat.END))
        made = MultiTurnAgentExecutor.execute(
            one, prompt, label, sampling_params, max_length=max_length, hf_tokenizer=hf_tokenizer, llm_engine=engine, **kwargs
        )
        return agent, await made

    def _select(self, group: _Group) -> None:
        """OpenRLHF needs as many as it started: rollouts without a known reward fill up the rest."""
        known = [one for one in group.made if one[0].reward is not None]
        unknown = [one for one in group.made if one[0].reward is None]
        rng = random.Random(f"{self._seed}:{self._selected}")
        self._selected += 1
        kept = [known[index] for index in roc.select([agent.rollout() for agent, _ in known], group.members, rng)]
        group.kept = [found for _, found in (kept + unknown)[: group.members]]
        group.done.set()
