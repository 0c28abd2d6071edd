"""Every adapter makes a tool call, and scores an answer, in a live service."""

import asyncio
import importlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from stand_ins import adapter

from grpo_roc import chat, roc

CALL = f"<tool_call>{json.dumps({'name': chat.TOOL, 'arguments': {'code': 'print(6 * 7)', 'input': ''}})}</tool_call>"
RIGHT, WRONG = "<answer>\\boxed{42}</answer>", "<answer>\\boxed{41}</answer>"


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return adapter(request.param, monkeypatch, request)


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


@using("verl")
def test_verl_router_has_every_method_of_the_protocol(module: Any) -> None:
    if "verl.workers" not in sys.modules and not getattr(sys.modules["verl"], "__file__", None):
        pytest.skip("the protocol is in the real package")
    protocol = importlib.import_module("verl.workers.rollout.router").RequestLoadBalancer
    from grpo_roc.integrations.verl_router import KvRouter

    wanted = {name for name in vars(protocol) if not name.startswith("_")}
    assert wanted <= set(dir(KvRouter))


@using("trl")
def test_trl_rollout_function_keeps_g_of_2g_with_masks(module: Any) -> None:
    async def sample(prompt: Any, count: int, trainer: Any) -> list[Any]:
        assert await module.tool("print(6 * 7)") == "42"
        clean = module.Rollout([1], [2, 3], [-1.0, 0.0], [1, 0], 1.0, ["ok"], 1, 2)
        wrong = clean._replace(reward=0.0)
        return [clean if number % 2 else wrong for number in range(count)]

    trainer = SimpleNamespace(num_generations=4, state=SimpleNamespace(global_step=3))
    found = module.rollout_func(sample)(["p", "p", "p", "p", "q", "q", "q", "q"], trainer)
    assert {"prompt_ids", "completion_ids", "logprobs", "env_mask", "roc_reward"} == set(found)
    assert len(found["roc_reward"]) == 8 and sum(found["roc_reward"]) == 4
    assert module.reward(["x"], roc_reward=[1.0]) == [1.0]
    assert asyncio.run(module.verify_reward([RIGHT, WRONG], ["42", "42"])) == [1.0, 0.0]


@using("trl")
def test_trl_accepts_the_options_of_the_loss(module: Any) -> None:
    try:
        from trl import GRPOConfig
    except ImportError:
        pytest.skip("the options are in the real package")
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


class _Sample:
    """slime's, as far as the adapter uses it."""

    def __init__(self, group: int = 0, reward: float = 0.0, outcomes: tuple[str, ...] = ()) -> None:
        self.tokens, self.response, self.label, self.metadata = [1, 2], "", "42", None  # type: ignore[var-annotated]
        self.trainable: list[bool] = []
        self.group_index, self.reward, self.remove_sample = group, reward, False
        if outcomes:
            self.metadata = {"exec": {"outcomes": list(outcomes), "answers": 1, "turns": 2}}

    def append_response_tokens(self, args: Any, *, tokens: Any, log_probs: Any, trainable: bool, meta_info: Any) -> None:
        assert len(tokens) == len(log_probs)
        self.tokens += tokens
        self.trainable += [trainable] * len(tokens)


async def test_slime_generate_masks_observations() -> None:
    from grpo_roc.integrations import slime_adapter

    server = HTTPServer(("127.0.0.1", 0), _Router)
    server.turn = 0  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        tokenizer = SimpleNamespace(encode=lambda text, **kwargs: [9] * text.count("<tool_response>42</tool_response>"))
        args = SimpleNamespace(sglang_router_ip="127.0.0.1", sglang_router_port=server.server_address[1], tokenizer=tokenizer)
        sample = await slime_adapter.generate(args, _Sample(), {"temperature": 1.0})
    finally:
        server.shutdown()
        server.server_close()
    assert sample.tokens == [1, 2, 7, 8, 9, 7, 8] and sample.trainable == [True, True, False, True, True]
    assert sample.metadata["exec"] == {"outcomes": ["ok"], "turns": 2, "answers": 1}
    sample.response = RIGHT
    assert await slime_adapter.reward_func(args, sample) == 1.0


def test_slime_filter_keeps_half_and_normalises_over_it() -> None:
    from grpo_roc.integrations import slime_adapter

    group = [_Sample(0, 1.0, ("ok",)) for _ in range(3)] + [_Sample(0, 1.0, ("error", "ok")) for _ in range(3)]
    group += [_Sample(0, 0.0, ("ok",)) for _ in range(2)]
    slime_adapter.roc_filter(None, group)
    kept = [one for one in group if not one.remove_sample]
    assert len(kept) == 4 and sum(one.reward for one in kept) == 2
    raw, gains = slime_adapter.advantages(None, group)
    assert raw == [one.reward for one in group] and sum(gains) == pytest.approx(0)
    assert all(gain == 0 for one, gain in zip(group, gains, strict=True) if one.remove_sample)


@using("openrlhf")
async def test_openrlhf_agent_steps_through_a_call_to_a_reward(module: Any) -> None:
    agent = module.AgentExecutor().agent_instance_cls()
    assert (await agent.reset({"observation": "p", "label": "42"}))["observation"] == "p"
    heard = await agent.step({"observation_text": "p", "action_text": CALL, "label": "42"})
    assert "<tool_response>42</tool_response>" in heard["environment_feedback"] and not heard["done"]
    end = await agent.step({"observation_text": "", "action_text": RIGHT, "label": "42"})
    assert end["done"] and float(end["rewards"]) == 1.0 and float(end["extra_logs"]["tool_error_share"]) == 0.0


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


@using("nemo")
async def test_nemo_gym_server_executes_and_verifies(module: Any) -> None:
    server = module.ExecResourcesServer()
    found = await server.execute_python(module.ExecuteRequest(code="print(6 * 7)"))
    assert (found.output, found.outcome) == ("42", "ok")
    assert "/execute_python" in {route.path for route in server.setup_webserver().routes}
    message = SimpleNamespace(type="message", content=[SimpleNamespace(text=RIGHT)])
    body = importlib.import_module("nemo_gym.base_resources_server").BaseVerifyRequest(
        response=SimpleNamespace(output=[message]), verifier_metadata={"expected_answer": "42"}
    )
    assert (await server.verify(body)).reward == 1.0


@using("nemo")
def test_nemo_rl_environment_steps_a_batch_at_once(module: Any) -> None:
    logs = [[{"role": "assistant", "content": text}] for text in (CALL, RIGHT, WRONG)]
    found = module.ExecEnvironment().step(logs, [{"ground_truth": "42"}] * 3)
    assert found.observations[0]["content"] == "<tool_response>42</tool_response>"
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
