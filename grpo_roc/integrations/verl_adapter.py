"""verl 0.9.

    actor_rollout_ref.rollout.multi_turn.function_tool_path=.../verl_adapter.py     the function tool, or
    actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml                ExecTool, which records outcomes
    reward.custom_reward_function.path=.../verl_adapter.py  .name=compute_score     verification in the service, awaited
    actor_rollout_ref.rollout.router_config_path=router.yaml                        router_class: …verl_router.KvRouter

Raise `max_tool_response_length` (256 characters by default) as far as your answers need.
"""

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse

from grpo_roc.integrations import service

run_python = function_tool(service.TOOL)(service.tool)


class ExecTool(BaseTool):
    """Like `run_python`; passes outcomes to the reward function and the batch in `extra_fields["tool_outcomes"]`."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        found = await service.run(str(parameters.get("code", "")), str(parameters.get("input", "")))
        agent = kwargs.get("agent_data")
        if agent is not None:
            agent.extra_fields.setdefault("tool_outcomes", []).append(found.outcome)
        return ToolResponse(text=found.text), 0.0, {"status": found.status}


async def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Mask out samples with `unknown`: the service could not verify them."""
    score = await service.verify(solution_str, ground_truth)
    return {"score": score or 0.0, "unknown": score is None}
