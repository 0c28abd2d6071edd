"""NVIDIA NeMo: a resources server for NeMo Gym, and an environment for NeMo-RL (git, August 2026).

NeMo-RL: `register_env("exec_math", "grpo_roc.integrations.nemo_adapter.ExecEnvironment")`, in a `ray.remote`.
NeMo Gym: `ExecResourcesServer` with `POST /execute_python`; `verify` scores the last message.
"""

import asyncio
from typing import Any

import torch
from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from pydantic import BaseModel

from grpo_roc import chat
from grpo_roc.integrations import service


class ExecuteRequest(BaseModel):
    code: str
    input: str = ""


class ExecuteResponse(BaseModel):
    output: str
    status: str
    outcome: str


class ExecResourcesServer(SimpleResourcesServer):
    def setup_webserver(self) -> Any:
        app = super().setup_webserver()
        app.post("/execute_python")(self.execute_python)
        return app

    async def execute_python(self, body: ExecuteRequest) -> ExecuteResponse:
        found = await service.run(body.code, body.input)
        return ExecuteResponse(output=found.text, status=found.status, outcome=found.outcome)

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        text = "".join(part.text for item in body.response.output if item.type == "message" for part in item.content)
        score = await service.verify(chat.final_answer(text) or text, str(body.verifier_metadata["expected_answer"]))
        return BaseVerifyResponse(**body.model_dump(), reward=score or 0.0)


class ExecEnvironment(EnvironmentInterface):
    """NeMo-RL batches steps: all tool calls of a step are sent together."""

    def step(self, message_log_batch: list[list[dict[str, Any]]], metadata: list[dict[str, Any]]) -> EnvironmentReturn:
        found = asyncio.run(_step_all([str(log[-1]["content"]) for log in message_log_batch], metadata))
        return EnvironmentReturn(
            observations=[{"role": "user", "content": text} for text, _, _ in found],
            metadata=metadata,
            next_stop_strings=[None] * len(found),
            rewards=torch.tensor([reward for _, reward, _ in found]),
            terminateds=torch.tensor([done for _, _, done in found]),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


async def _step_all(texts: list[str], metadata: list[dict[str, Any]]) -> list[tuple[str, float, bool]]:
    steps = (_step(text, str(one["ground_truth"])) for text, one in zip(texts, metadata, strict=True))
    return list(await asyncio.gather(*steps))


async def _step(text: str, truth: str) -> tuple[str, float, bool]:
    calls = chat.read_turn(text).calls
    if not calls:
        return "", await service.verify(chat.final_answer(text) or "", truth) or 0.0, True
    return chat.tool_responses([one.text for one in await service.run_calls(calls)]), 0.0, False
