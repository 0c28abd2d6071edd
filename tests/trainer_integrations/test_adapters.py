"""Every adapter makes a tool call, and scores an answer, in a live service."""

import asyncio
import importlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from stand_ins import SlimeSample, adapter

from grpo_roc import chat, roc

CALL = f"<tool_call>{json.dumps({'name': chat.TOOL, 'arguments': {'code': 'print(6 * 7)', 'input': ''}})}</tool_call>"
RIGHT, WRONG = "<answer>\\boxed{42}</answer>", "<answer>\\boxed{41}</answer>"


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return adapter(request.param, monkeypatch)


def using(name: str) -> Any:
    return pytest.mark.parametrize("module", [pytest.param(name, id=name)], indirect=True)


@using("verl")
async def test_verl_tools_run_programs_and_keep_outcomes(module: Any) -> None:
    registry = importlib.import_module("verl.tools.function_tool").FUNCTION_TOOL_REGISTRY
    assert await registry["python_code_with_standard_io"].call({"code": "print(input() * 2)", "input": "ab"}) == "abab"
    schema: Any = SimpleNamespace(function=SimpleNamespace(name="x"), model_dump=lambda **kwargs: {})
    tool, agent = module.ExecTool({}, schema), SimpleNamespace(extra_fields={})
    response, reward, metrics = await tool.execute("i", {"code": "1/0"}, agent_data=agent)
    assert "ZeroDivisionError" in response.text and reward == 0.0 and metrics["status"] == "error"
    assert agent.extra_fields["tool_outcomes"] == ["error"]


@using("verl")
async def test_verl_reward_is_verified_in_the_service(module: Any) -> None:
    assert (await module.compute_score("d", RIGHT, "42"))["score"] == 1.0
    assert await module.compute_score("d", WRONG, "42") == {"score": 0.0, "unknown": False}


def test_verl_router_sends_requests_where_there_is_room_and_keeps_them_there() -> None:
    from grpo_roc.integrations.verl_router import KvRouter

    router = KvRouter({"a": "A", "b": "B"}, {"capacity": {"a": 1000, "b": 3000}, "max_response": 400})
    first = [router.acquire_server(str(number), prompt_ids=[1] * 100)[0] for number in range(6)]
    assert first.count("b") > first.count("a") and router.acquire_server("0", prompt_ids=[1] * 200)[0] == first[0]
    assert router.get_total_inflight() == 7
    router.release_server(first[0], "0")
    assert router.get_total_inflight() == 6 and router.require_acquire_fields() == ["prompt_ids"]
    router.remove_servers(["b"])
    assert router.acquire_server("9", prompt_ids=[1])[0] == "a" and router.get_all_servers() == ["a"]
    assert router.clear_sticky_cache()["cleared_entries"] > 0


def test_verl_router_leaks_no_tokens_over_thousands_of_requests() -> None:
    from grpo_roc.integrations.verl_router import KvRouter

    router = KvRouter({"a": "A", "b": "B"}, {"capacity": 1_000_000, "max_response": 400})
    for wave in range(3):
        held = [(str(n), router.acquire_server(f"{wave}:{n}", prompt_ids=[1] * 100)[0]) for n in range(1000)]
        assert router.get_status()["servers"]["a"] == {"inflight": 500, "room": 750_000}
        router.clear_sticky_cache()  # between acquire and release, as trainers do
        for name, server in held:
            router.release_server(server, f"{wave}:{name}")
            router.release_server(server, f"{wave}:{name}")  # a second release changes nothing
    assert all(one == {"inflight": 0, "room": 1_000_000} for one in router.get_status()["servers"].values())


@using("verl")
async def test_verl_roc_score_hides_a_small_penalty_in_the_score(module: Any) -> None:
    once = {"tool_outcomes": ["error", "ok"], "num_turns": 6}
    found = await module.compute_score_roc("d", CALL + CALL + RIGHT, "42", once)
    assert found["score"] == pytest.approx(1 - 0.5e-3) and found["acc"] == 1.0 and found["tool_error_share"] == 0.5
    assert (await module.compute_score_roc("d", CALL + WRONG, "42", {"tool_outcomes": ["ok"], "num_turns": 4}))["score"] == 0.0
    unparsed = await module.compute_score_roc("d", CALL + CALL + RIGHT, "42", {"tool_outcomes": ["ok"], "num_turns": 6})
    assert unparsed["tool_error_share"] == 0.5


@using("verl")
def test_verl_estimator_selects_half_of_each_group_and_prefers_clean_rollouts(module: Any) -> None:
    torch = importlib.import_module("torch")
    clean, dirty, wrong, unknown = 1.0, 1.0 - 1.5e-3, 0.0, module.UNKNOWN
    group = [clean] * 4 + [dirty] * 4 + [wrong] * 7 + [unknown]
    rewards = torch.zeros(32, 5)
    rewards[:, 4] = torch.tensor(group + [wrong] * 16)
    mask = torch.ones(32, 5, dtype=torch.int64)
    mask[:, 1] = 0  # an observation
    found = Counter[str]()
    for seed in range(20):
        names = [f"g{seed}"] * 16 + [f"h{seed}"] * 16
        advantages = _verl_advantages(module, rewards, mask, names)
        gains = advantages[:, 0].tolist()
        assert sum(gain != 0 for gain in gains) == 8 and not any(gains[15:])
        assert advantages[:, 1].tolist() == [0.0] * 32
        kept = [index for index in range(16) if gains[index]]
        plain = roc.advantages([round(group[index]) for index in kept])
        assert [gains[index] for index in kept] == pytest.approx([4 * gain for gain in plain])  # 8 of 32 rows keep the mean
        found.update("clean" if index < 4 else "dirty" if index < 8 else "wrong" for index in kept)
    assert found["clean"] > 2 * found["dirty"] > 0 and found["wrong"] > 0


def _verl_advantages(module: Any, rewards: Any, mask: Any, names: list[str]) -> Any:
    """Through verl's own function."""
    import numpy
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    module.register()
    tensors = {"token_level_rewards": rewards, "response_mask": mask}
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": numpy.array(names, dtype=object)})
    return compute_advantage(data, adv_estimator="grpo_roc", config={}).batch["advantages"]


@using("verl")
def test_verl_workers_of_ray_know_the_estimator(module: Any) -> None:
    import ray

    hook = "grpo_roc.integrations.verl_adapter.register"
    ray.init(num_cpus=1, include_dashboard=False, runtime_env={"worker_process_setup_hook": hook}, log_to_driver=False)
    try:

        @ray.remote
        def known() -> str:
            from verl.trainer.ppo.core_algos import get_adv_estimator_fn

            return get_adv_estimator_fn("grpo_roc").__module__

        assert ray.get(known.remote()) == "grpo_roc.integrations.verl_adapter"
    finally:
        ray.shutdown()


@using("verl")
def test_verl_router_has_every_method_of_the_protocol(module: Any) -> None:
    protocol = importlib.import_module("verl.workers.rollout.router").RequestLoadBalancer
    from grpo_roc.integrations.verl_router import KvRouter

    wanted = {name for name in vars(protocol) if not name.startswith("_")}
    assert wanted <= set(dir(KvRouter))


class _Words:
    """A tokenizer whose tokens are whole texts."""

    def __init__(self) -> None:
        self.texts: list[str] = [chat.END]

    def id(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text)

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        return {"input_ids": [self.id(text)]}

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(self.texts[one] for one in ids)

    def convert_tokens_to_ids(self, text: str) -> int:
        return self.id(text)


def _trl_trainer(words: _Words, scripts: dict[str, list[str]]) -> Any:
    """A trainer whose rollouts begin with the turns of `scripts[prompt]`; a second turn is the right answer."""

    def generate(prompts: list[list[int]], images: Any, fields: Any, count: int) -> Any:
        assert count == 1 and images is None and fields == {}
        made = []
        for prompt in prompts:
            said = scripts[words.texts[prompt[0]]].pop(0) if len(prompt) == 1 else RIGHT
            made.append([words.id(said), 0])
        return made, [[-0.5, -0.25] for _ in made]

    return SimpleNamespace(
        num_generations=4,
        num_generations_eval=2,
        model=SimpleNamespace(training=True),
        state=SimpleNamespace(global_step=3),
        processing_class=words,
        max_completion_length=6,
        _tokenize_prompts=lambda prompts: ([[words.id(prompt)] for prompt in prompts], None, {}),
        _generate_single_turn=generate,
    )


@using("trl")
def test_trl_rollout_function_runs_tools_verifies_and_keeps_g_of_2g(module: Any) -> None:
    words = _Words()
    trainer = _trl_trainer(words, {"p": [CALL] * 4 + [WRONG] * 4, "q": [RIGHT] * 4 + [CALL] * 2 + [WRONG] * 2})
    truth = module.truths([{"prompt": "p", "answer": 42}, {"prompt": "q", "answer": "42"}])
    found = module.rollout_func(truth)(["p"] * 4 + ["q"] * 4, trainer)
    assert {"prompt_ids", "completion_ids", "logprobs", "env_mask", "roc_reward"} == set(found)
    assert found["roc_reward"][:4].count(1.0) == 2 and found["roc_reward"][4:].count(1.0) == 2  # at least two wrong ones stay
    called = found["roc_reward"].index(1.0)
    assert found["env_mask"][called] == [1, 1, 0, 1, 1] and found["logprobs"][called] == [-0.5, -0.25, 0.0, -0.5, -0.25]
    observed = words.decode(found["completion_ids"][called][2:3])
    assert observed == chat.observation(["42"], "")
    trainer = _trl_trainer(words, {"p": [CALL, WRONG]})
    trainer.model.training = False
    assert module.rollout_func(truth)(["p"] * 2, trainer)["roc_reward"] == [1.0, 0.0]  # all are scored, none selected
    assert module.reward(["x"], roc_reward=[1.0]) == [1.0]
    assert asyncio.run(module.verify_reward([RIGHT, WRONG], ["42", "42"])) == [1.0, 0.0]


@using("trl")
def test_trl_trains_a_tiny_model_with_tools(module: Any, tmp_path: Path) -> None:
    """Two steps of the real trainer; a model that knows nothing cannot be right, so the groups have equal rewards."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from grpo_roc import config
    from grpo_roc.model import make_tiny

    make_tiny(config.load("cpu_tiny"), tmp_path / "tiny", 0)
    rows = [{"prompt": chat.prompt(f"Compute {n}*7.", "short", ""), "answer": str(7 * n)} for n in range(4)]
    args = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", num_generations=2, max_steps=2,
        per_device_train_batch_size=4, max_completion_length=24, gradient_checkpointing=False, **module.LOSS,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(tmp_path / "tiny"),
        processing_class=AutoTokenizer.from_pretrained(tmp_path / "tiny"),
        reward_funcs=module.reward,
        rollout_func=module.rollout_func(module.truths(rows), turns=3),
        args=args,
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    assert trainer.state.global_step == 2 and "rewards/reward/mean" in trainer.state.log_history[0]


@using("trl")
def test_trl_accepts_the_options_of_the_loss(module: Any) -> None:
    from trl import GRPOConfig

    made = GRPOConfig(output_dir="x", use_cpu=True, bf16=False, num_generations=2, per_device_train_batch_size=2, **module.LOSS)
    assert (made.epsilon_high, made.beta) == (0.28, 0.0)


@using("skyrl")
def test_skyrl_environment_answers_calls_and_scores_the_end(module: Any) -> None:
    env = module.ExecMathEnv(None, {"reward_spec": {"ground_truth": "42"}, "max_turns": 4})
    heard = env.step(CALL)
    assert heard["observations"] == [{"role": "user", "content": "<tool_response>42</tool_response>"}] and not heard["done"]
    assert "not valid JSON" in env.step("<tool_call>{</tool_call>")["observations"][0]["content"]
    end = env.step(RIGHT)
    assert end["reward"] == 1.0 and end["done"] and end["metadata"]["outcomes"] == ["ok", "error"]


class _Router(BaseHTTPRequestHandler):
    """SGLang's router for one rollout: a tool call, then an answer."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.turn += 1  # type: ignore[attr-defined]
        text = CALL if self.server.turn == 1 else RIGHT  # type: ignore[attr-defined]
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]]}
        data = json.dumps({"text": text, "meta_info": meta}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@using("slime")
async def test_slime_generates_turns_masks_observations_and_scores_the_answer(module: Any) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Router)
    server.turn = 0  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        args = SimpleNamespace(sglang_router_ip="127.0.0.1", sglang_router_port=server.server_address[1])
        sample = await module.generate(args, SlimeSample(), {"temperature": 1.0, "max_new_tokens": 64})
    finally:
        server.shutdown()
        server.server_close()
    observed = chat.observation(["42"], "")
    count = len(observed.split())
    assert sample.tokens == [9, 7, 8, *[9] * count, 7, 8] and sample.loss_mask == [1, 1, *[0] * count, 1, 1]
    assert sample.response == CALL + observed + RIGHT and sample.status == SlimeSample.Status.COMPLETED
    assert sample.metadata["exec"] == {"outcomes": ["ok"], "turns": 2, "answers": 1, "answer": RIGHT}
    assert await module.reward_func(args, sample) == 1.0


@using("slime")
def test_slime_filter_keeps_half_of_each_group_and_normalises_over_it(module: Any) -> None:
    def sample(group: int, reward: float, *outcomes: str) -> SlimeSample:
        return SlimeSample(group, reward, {"outcomes": list(outcomes), "answers": 1, "turns": 2, "answer": None})

    groups = [
        [sample(n, 1.0, "ok") for _ in range(3)] + [sample(n, 1.0, "error") for _ in range(3)]
        + [sample(n, 0.0, "ok") for _ in range(2)]
        for n in range(2)
    ]  # fmt: skip
    groups[0][0].remove_sample = True  # its answer could not be verified
    module.roc_filter(None, groups)
    assert groups[0][0].remove_sample
    for group in groups:
        kept = [one for one in group if not one.remove_sample]
        assert len(kept) == 4 and sum(one.reward or 0 for one in kept) == 2
    flat = [one for group in groups for one in group]
    raw, gains = module.advantages(None, flat)
    assert raw == [one.reward for one in flat] and sum(gains) == pytest.approx(0)
    assert all(gain == 0 for one, gain in zip(flat, gains, strict=True) if one.remove_sample)


@using("openrlhf")
async def test_openrlhf_agent_steps_through_a_call_to_a_reward(module: Any) -> None:
    agent = module.AgentInstance()
    assert (await agent.reset({"observation": "p", "label": "42"}))["observation"] == "p"
    heard = await agent.step({"observation_text": "p", "action_text": CALL, "label": "42"})
    assert heard["environment_feedback"] == chat.observation(["42"], "") and not heard["done"]
    end = await agent.step({"observation_text": "", "action_text": RIGHT, "label": "42"})
    assert end["done"] and float(end["rewards"]) == 1.0 and float(end["extra_logs"]["tool_error_share"]) == 0.0


class _Engine:
    """vLLM's: the tokens of a turn end with `<|im_end|>`, its text does not."""

    def __init__(self, words: _Words, turns: list[list[str]]) -> None:
        self.words, self.turns, self.given = words, turns, []  # type: ignore[var-annotated]

    async def generate(self, tokens: list[int], sampling_params: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        self.given.append(self.words.decode(tokens))
        text = self.turns[0].pop(0) if len(tokens) == 1 else RIGHT
        if len(tokens) == 1 and not self.turns[0]:
            self.turns.pop(0)
        ids = [self.words.id(text), 0]
        logprobs = [{one: SimpleNamespace(logprob=-0.5)} for one in ids]
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, text=text, finish_reason="stop", logprobs=logprobs)])


@using("openrlhf")
async def test_openrlhf_executor_keeps_g_of_2g_and_ends_each_turn_once(module: Any) -> None:
    torch = importlib.import_module("torch")
    words = _Words()
    broken = CALL.replace("print(6 * 7)", "print(6 * ")
    turns = [[CALL], [broken], [broken], [RIGHT], [WRONG], [WRONG], [WRONG], [WRONG]]

    def tokenizer(text: str, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": [torch.tensor([words.id(text)] if text else [], dtype=torch.int64)]}

    tokenizer.convert_tokens_to_ids = words.id  # type: ignore[attr-defined]
    executor = module.AgentExecutor()
    engine = _Engine(words, turns)
    params = SimpleNamespace(max_tokens=None, logprobs=1)
    made = [
        executor.execute(
            prompt="p", label="42", sampling_params=params, max_length=64, hf_tokenizer=tokenizer, llm_engine=engine
        )
        for _ in range(4)
    ]
    found = await asyncio.gather(*made)
    assert sorted(one["reward"] for one in found) == [0.0, 0.0, 1.0, 1.0] and params.max_tokens is None
    assert len(engine.given) == 11 and not any(chat.END + chat.END in text for text in engine.given)
    assert any(CALL + chat.END + chat.observation(["42"], "") == text.removeprefix("p") for text in engine.given)
    assert all(one["observation_tokens"][-1] == 0 for one in found)


@using("verifiers")
async def test_verifiers_toolset_runs_and_task_scores(module: Any) -> None:
    config = module.ExecTaskConfig().tools
    assert await module.ExecToolset(config).run("print(6 * 7)") == "42"
    assert await module.score(RIGHT, "42") == 1.0 and await module.score(WRONG, "42") == 0.0
    assert len(module.ExecMathTask.toolsets(module.ExecTaskConfig())) == 1


@using("verifiers")
def test_prime_rl_group_scores_are_zero_for_half_of_a_group(module: Any) -> None:
    group = [roc.Rollout(float(number % 2), ["ok"], 1, 2) for number in range(8)]
    found = module.score_group(group, "s")
    assert sum(value == 0 for value in found) == 4 and sum(found) == pytest.approx(0)
    assert module.score_group([roc.Rollout(1.0, [], 1, 1)] * 4, "s") == [0.0] * 4


@using("nemo_gym")
async def test_nemo_gym_server_executes_and_verifies(module: Any) -> None:
    server = _gym_server(module)
    app = server.setup_webserver()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
        found = (await http.post("/execute_python", json={"code": "print(6 * 7)"})).raise_for_status().json()
        assert (found["output"], found["outcome"]) == ("42", "ok")
        for answer, reward in ((RIGHT, 1.0), (WRONG, 0.0)):
            body = {"responses_create_params": {"input": "p"}, "response": _gym_response(answer), "expected_answer": "42"}
            scored = (await http.post("/verify", json=body)).raise_for_status().json()
            assert (scored["reward"], scored["unknown"], scored["expected_answer"]) == (reward, False, "42")


def _gym_server(module: Any) -> Any:
    from unittest.mock import MagicMock

    from nemo_gym.base_resources_server import BaseResourcesServerConfig
    from nemo_gym.server_utils import ServerClient

    config = BaseResourcesServerConfig(host="127.0.0.1", port=0, entrypoint="", name="exec")
    return module.ExecResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))


def _gym_response(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": "r", "object": "response", "created_at": 0, "model": "x", "output": [message], "parallel_tool_calls": False,
        "tool_choice": "auto", "tools": [],
    }  # fmt: skip


@using("nemo_rl")
def test_nemo_rl_environment_is_an_actor_and_steps_a_batch_at_once(module: Any) -> None:
    module.register()
    registry = importlib.import_module("nemo_rl.environments.utils").ENV_REGISTRY
    assert registry[module.NAME] == module.ACTOR and module.ACTOR.rpartition(".")[0] == module.__name__
    environment = module.ExecEnvironment.options(runtime_env={}).remote({})
    logs = [[{"role": "assistant", "content": text}] for text in (CALL, RIGHT, WRONG)]
    found = environment.step(logs, [{"ground_truth": "42"}] * 3)
    assert found.observations[0]["content"] == chat.observation(["42"], "")
    assert found.rewards.tolist() == [0.0, 1.0, 0.0] and found.terminateds.tolist() == [False, True, True]


@using("tinker")
async def test_tinker_tool_runs_and_reward_verifies(module: Any) -> None:
    given = importlib.import_module("tinker_cookbook.tool_use.types").ToolInput(arguments={"code": "print(6 * 7)"})
    result = await module.ExecTool().python.run(given)
    assert result.messages[0]["content"] == "42" and result.metrics["tool_error"] == 0.0
    assert await module.reward_fn("42")([{"role": "assistant", "content": RIGHT}]) == (1.0, {"unknown": 0.0})


async def test_an_unavailable_service_is_infra_for_every_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    from exec_client import AsyncClient, Policy
    from grpo_roc.integrations import service

    gone = AsyncClient("http://127.0.0.1:9", policy=Policy(max_attempts=1))
    monkeypatch.setattr(service, "client", lambda: gone)
    assert (await service.run("print(1)")).outcome == "infra"
    assert await service.verify("1", "1") is None
    await gone.aclose()
