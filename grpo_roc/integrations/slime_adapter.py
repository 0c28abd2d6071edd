"""slime (git, August 2026): a multi-turn `generate` over SGLang's router, a reward, and RoC.

--custom-generate-function-path grpo_roc.integrations.slime_adapter.generate
--custom-rm-path grpo_roc.integrations.slime_adapter.reward_func
--n-samples-per-prompt 32
--rollout-sample-filter-path grpo_roc.integrations.slime_adapter.roc_filter
--custom-reward-post-process-path grpo_roc.integrations.slime_adapter.advantages
"""

import random
from typing import Any

import httpx

from grpo_roc import chat, roc
from grpo_roc.integrations import service

MAX_TURNS = 10


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """One rollout: the router generates, the service runs tools. Outcomes are in `sample.metadata`."""
    state: dict[str, Any] = {"outcomes": [], "turns": 0, "answers": 0}
    sample.metadata = {**(sample.metadata or {}), "exec": state}
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    async with httpx.AsyncClient(timeout=None) as http:
        for _ in range(MAX_TURNS):
            body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
            output = (await http.post(router, json=body)).raise_for_status().json()
            meta = output["meta_info"]
            log_probs, tokens = ([one[field] for one in meta["output_token_logprobs"]] for field in (0, 1))
            sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs, trainable=True, meta_info=meta)
            turn = chat.read_turn(output["text"])
            state["turns"] += 1
            state["answers"] += turn.answers
            if not turn.calls or meta["finish_reason"]["type"] == "length":
                return sample
            observations = await service.run_calls(turn.calls)
            state["outcomes"] += [one.outcome for one in observations]
            text = chat.observation([one.text for one in observations], "")
            tokens = args.tokenizer.encode(text, add_special_tokens=False)
            sample.append_response_tokens(args, tokens=tokens, log_probs=[0.0] * len(tokens), trainable=False, meta_info=None)
    return sample


async def reward_func(args: Any, sample: Any, **kwargs: Any) -> float:
    """A sample whose answer could not be verified is removed."""
    score = await service.verify(chat.final_answer(sample.response) or "", str(sample.label))
    if score is None:
        sample.remove_sample = True
    return score or 0.0


def roc_filter(args: Any, samples: list[Any]) -> None:
    """Keep G samples of each group of 2G."""
    for group in _groups(samples).values():
        seen = [roc.Rollout(reward=one.reward, **one.metadata["exec"]) for one in group]
        kept = set(roc.select(seen, len(group) // 2, random.Random(str(group[0].group_index))))
        for number, one in enumerate(group):
            one.remove_sample = one.remove_sample or number not in kept


def advantages(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Raw rewards, and rewards normalised over the kept samples; slime's own normalisation counts removed ones too."""
    found = {id(one): 0.0 for one in samples}
    for group in _groups(samples).values():
        kept = [one for one in group if not one.remove_sample]
        if kept and not roc.all_equal([one.reward for one in kept]):
            for one, gain in zip(kept, roc.advantages([one.reward for one in kept]), strict=True):
                found[id(one)] = gain
    return [one.reward for one in samples], [found[id(one)] for one in samples]


def _groups(samples: list[Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for one in samples:
        groups.setdefault(one.group_index, []).append(one)
    return groups
