"""verl 0.9.

    actor_rollout_ref.rollout.multi_turn.function_tool_path=.../verl_adapter.py     the function tool, or
    actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml                ExecTool, which records outcomes
    reward.custom_reward_function.path=.../verl_adapter.py  .name=compute_score     verification in the service, awaited
    actor_rollout_ref.rollout.router_config_path=router.yaml                        router_class: …verl_router.KvRouter

RoC, with ExecTool:

    reward.custom_reward_function.name=compute_score_roc
    algorithm.adv_estimator=grpo_roc
    actor_rollout_ref.rollout.n=32                      2G; half of each group get an advantage
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    +ray_kwargs.ray_init.runtime_env.worker_process_setup_hook=grpo_roc.integrations.verl_adapter.register

verl gives an advantage estimator only scores, masks and group ids. So `compute_score_roc` subtracts a thousandth of a correct
rollout's penalty from its score (`acc` is the exact reward), and the estimator reads it back. Rollouts that are not selected
stay in the batch with an advantage of 0; the others are scaled up by their share of the tokens, which gives the token mean over
the selected ones if `ppo_mini_batch_size` is the whole batch.

Raise `max_tool_response_length` (256 characters by default) as far as your answers need.
"""

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse

from grpo_roc import chat, roc
from grpo_roc.integrations import service

PENALTY_SCALE = 1e-3
UNKNOWN = -1.0  # score of a rollout whose answer the service could not verify
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
        return ToolResponse(text=chat.escape_tags(found.text)), 0.0, {"status": found.status}


async def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Mask out samples with `unknown`: the service could not verify them."""
    score = await service.verify(solution_str, ground_truth)
    return {"score": score or 0.0, "unknown": score is None}


async def compute_score_roc(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """For `grpo_roc`. A call that verl could not parse or dispatch has no outcome: it is counted here, as an error."""
    found = await service.verify(chat.final_answer(solution_str) or "", ground_truth)
    outcomes = list((extra_info or {}).get("tool_outcomes") or [])
    turn = chat.read_turn(solution_str)
    outcomes += ["error"] * (len(turn.calls) - len(outcomes))
    # verl counts the turns of both sides and the prompt's: 2 for one assistant turn, 4 for two.
    turns = int((extra_info or {}).get("num_turns") or 2) // 2
    penalty = roc.tool_error_share(outcomes) + roc.format_penalty(turn.answers, turns)
    score = UNKNOWN if found is None else found - PENALTY_SCALE * penalty * found
    return {"score": score, "acc": found or 0.0, "unknown": found is None, "tool_error_share": roc.tool_error_share(outcomes)}


def grpo_roc(token_level_rewards: Any, response_mask: Any, index: Any, config: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    """The advantage estimator: (advantages, returns) by token."""
    scores = token_level_rewards.sum(dim=-1).tolist()
    groups: dict[Any, list[int]] = {}
    for row, name in enumerate(index):
        groups.setdefault(name, []).append(row)
    gains = [0.0] * len(scores)
    for name, rows in groups.items():
        read = [_read(scores[row]) for row in rows]
        found = roc.group_advantages([reward for reward, _ in read], [penalty for _, penalty in read], len(rows) // 2, name)
        for row, gain in zip(rows, found, strict=True):
            gains[row] = gain
    tokens = response_mask.sum(dim=-1).tolist()
    kept = sum(count for count, gain in zip(tokens, gains, strict=True) if gain)
    scale = sum(tokens) / kept if kept else 0.0
    advantages = token_level_rewards.new_tensor([gain * scale for gain in gains])[:, None] * response_mask
    return advantages, advantages


def _read(score: float) -> tuple[float | None, float]:
    """Reward and penalty of a score of `compute_score_roc`."""
    if score <= UNKNOWN / 2:
        return None, 0.0
    reward = float(round(score))
    return reward, (reward - score) / PENALTY_SCALE


def register(*args: Any) -> None:
    """Ray calls this at the start of each of its workers."""
    from verl.trainer.ppo.core_algos import register_adv_est

    register_adv_est("grpo_roc")(grpo_roc)
