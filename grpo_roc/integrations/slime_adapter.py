"""slime (git, commit 0044b40): a multi-turn `generate` over SGLang's router, a reward, and RoC.

--custom-generate-function-path grpo_roc.integrations.slime_adapter.generate
--custom-rm-path grpo_roc.integrations.slime_adapter.reward_func
--n-samples-per-prompt 32
--rollout-sample-filter-path grpo_roc.integrations.slime_adapter.roc_filter
--custom-reward-post-process-path grpo_roc.integrations.slime_adapter.advantages

Not with `--partial-rollout`: an aborted rollout would lose its counts.
"""

import random
from typing import Any

import httpx

from grpo_roc import chat, roc
from grpo_roc.integrations import service

MAX_TURNS = 10


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """One rollout: the router generates, the service runs tools. Counts and the answer are in `sample.metadata["exec"]`."""
    tokenizer = _tokenizer(args)
    state: dict[str, Any] = {"outcomes": [], "turns": 0, "answers": 0, "answer": None}
    sample.metadata = {**(sample.metadata or {}), "exec": state}
    if not sample.tokens:
        sample.tokens = service.encode(tokenizer, sample.prompt)
    budget = sampling_params["max_new_tokens"]
    async with httpx.AsyncClient(timeout=None) as http:
        for turn_number in range(MAX_TURNS):
            output = await _turn(
                http, args, sample.tokens, sampling_params | {"max_new_tokens": budget - sample.response_length}
            )
            meta, text = output["meta_info"], output["text"]
            log_probs, tokens = ([one[field] for one in meta["output_token_logprobs"]] for field in (0, 1))
            sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs, trainable=True, meta_info=meta, text=text)
            turn = chat.read_turn(text)
            state["turns"] += 1
            state["answers"] += turn.answers
            if meta["finish_reason"]["type"] != "stop":  # length, or abort: slime starts the sample again
                return sample
            if not turn.calls:
                state["answer"] = chat.final_answer(text)
                return sample
            observations = await service.run_calls(turn.calls)
            state["outcomes"] += [one.outcome for one in observations]
            observed = chat.observation([one.text for one in observations], "")
            tokens = service.encode(tokenizer, observed)
            if turn_number == MAX_TURNS - 1 or sample.response_length + len(tokens) >= budget:
                sample.status = type(sample.status).TRUNCATED
                return sample
            # Tokens that are not trained on carry no log-probabilities: slime refuses them.
            sample.append_response_tokens(args, tokens=tokens, trainable=False, text=observed)
    return sample


def _tokenizer(args: Any) -> Any:
    from slime.rollout.sglang_rollout import GenerateState

    return GenerateState(args).tokenizer


async def _turn(http: httpx.AsyncClient, args: Any, tokens: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    body = {"input_ids": tokens, "sampling_params": sampling_params, "return_logprob": True}
    found: dict[str, Any] = (await http.post(router, json=body)).raise_for_status().json()
    return found


async def reward_func(args: Any, sample: Any, **kwargs: Any) -> float:
    """A sample whose answer could not be verified is removed."""
    answer = sample.metadata["exec"]["answer"]
    if answer is None:
        return 0.0
    score = await service.verify(answer, str(sample.label))
    if score is None:
        sample.remove_sample = True
    return score or 0.0


def roc_filter(args: Any, groups: list[list[Any]]) -> None:
    """Keep G samples of each group of 2G; `remove_sample` masks out the others."""
    for group in groups:
        known = [one for one in group if not one.remove_sample]
        kept = roc.select(list(map(_rollout, known)), len(group) // 2, random.Random(str(group[0].group_index)))
        chosen = {id(known[index]) for index in kept}
        for one in group:
            one.remove_sample = id(one) not in chosen


def advantages(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Raw rewards, and rewards normalised over the kept samples; slime's own normalisation counts removed ones too."""
    found = {id(one): 0.0 for one in samples}
    groups: dict[Any, list[Any]] = {}
    for one in samples:
        if not one.remove_sample:
            groups.setdefault(one.group_index, []).append(one)
    for kept in groups.values():
        if not roc.all_equal([one.reward for one in kept]):
            for one, gain in zip(kept, roc.advantages([one.reward for one in kept]), strict=True):
                found[id(one)] = gain
    return [one.reward for one in samples], [found[id(one)] for one in samples]


def _rollout(sample: Any) -> roc.Rollout:
    state = sample.metadata["exec"]
    return roc.Rollout(sample.reward, state["outcomes"], state["answers"], state["turns"])
