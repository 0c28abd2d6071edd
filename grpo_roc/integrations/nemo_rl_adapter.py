"""NeMo-RL (git, 2026): an environment. `register()` before `create_env("exec_math", env_configs)`.

A row's `extra_env_info` has `ground_truth`. NeMo-RL appends an observation's text as it is, so it contains the chat turns.
"""

import asyncio
from typing import Any

import ray
import torch
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.utils import register_env

from grpo_roc import chat
from grpo_roc.integrations import service

NAME = "exec_math"
ACTOR = "grpo_roc.integrations.nemo_rl_adapter.ExecEnvironment"


class Environment(EnvironmentInterface):
    """NeMo-RL batches steps: all tool calls of a step are sent together."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def step(self, message_log_batch: list[list[dict[str, Any]]], metadata: list[dict[str, Any]]) -> EnvironmentReturn:
        found = service.wait(_step_all([str(log[-1]["content"]) for log in message_log_batch], metadata))
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": text} for text, _, _ in found],
            metadata=metadata,
            next_stop_strings=[None] * len(found),
            rewards=torch.tensor([reward for _, reward, _ in found]),
            terminateds=torch.tensor([done for _, _, done in found]),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


ExecEnvironment = ray.remote(Environment)


def register() -> None:
    ACTOR_ENVIRONMENT_REGISTRY[ACTOR] = PY_EXECUTABLES.SYSTEM
    register_env(NAME, ACTOR)


async def _step_all(texts: list[str], metadata: list[dict[str, Any]]) -> list[tuple[str, float, bool]]:
    steps = (_step(text, str(one["ground_truth"])) for text, one in zip(texts, metadata, strict=True))
    return list(await asyncio.gather(*steps))


async def _step(text: str, truth: str) -> tuple[str, float, bool]:
    calls = chat.read_turn(text).calls
    if not calls:
        return "", await service.verify(chat.final_answer(text) or "", truth) or 0.0, True
    return chat.observation([one.text for one in await service.run_calls(calls)], ""), 0.0, False
