"""Stand-ins of other projects' documented signatures, for machines without their packages.

They only check that an adapter is called and replies as the framework documents. With EXEC_REAL=NAME the real package is
required instead (`make test-integrations`).
"""

import importlib
import importlib.util
import inspect
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest

A, B, C = TypeVar("A"), TypeVar("B"), TypeVar("C")
PACKAGES = {
    "verl": "verl",
    "trl": "trl",
    "skyrl": "skyrl_gym",
    "openrlhf": "openrlhf",
    "verifiers": "verifiers",
    "nemo": "nemo_rl",
    "tinker": "tinker_cookbook",
}


def adapter(name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    """The adapter on the real package if installed, else on its stand-in; the test's report names which."""
    real = importlib.util.find_spec(PACKAGES[name]) is not None if name in PACKAGES else True
    if os.environ.get("EXEC_REAL") == name and not real:
        pytest.fail(f"{PACKAGES[name]} is not installed in this venv")
    request.node.add_report_section("call", "integration", f"{name}: {'real package' if real else 'stand-in'}")
    module = f"grpo_roc.integrations.{name}_adapter"
    if not real:
        monkeypatch.delitem(sys.modules, module, raising=False)
        for path, content in STAND_INS[name]().items():
            monkeypatch.setitem(sys.modules, path, _module(path, content))
    return importlib.import_module(module)


def _module(name: str, content: dict[str, Any]) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(content)
    return made


def _verl() -> dict[str, dict[str, Any]]:
    @dataclass
    class ToolResponse:
        text: str | None = None
        image: Any = None
        video: Any = None

    @dataclass
    class FunctionTool:
        name: str
        fn: Callable[..., Any]

        async def call(self, parameters: dict[str, Any]) -> Any:
            return await self.fn(**parameters)

    registry: dict[str, FunctionTool] = {}

    def function_tool(name: str) -> Callable[[Any], Any]:
        def register(fn: Any) -> Any:
            assert inspect.getdoc(fn) and "Args:" in fn.__doc__, "the schema is made from a Google docstring"
            registry[name] = FunctionTool(name, fn)
            return fn

        return register

    class BaseTool:
        def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
            self.config, self.tool_schema = config, tool_schema

    return {
        "verl": {},
        "verl.tools": {},
        "verl.tools.base_tool": {"BaseTool": BaseTool},
        "verl.tools.function_tool": {"function_tool": function_tool, "FUNCTION_TOOL_REGISTRY": registry},
        "verl.tools.schemas": {"ToolResponse": ToolResponse},
    }


def _skyrl() -> dict[str, dict[str, Any]]:
    class tool:
        def __init__(self, func: Callable[..., Any]) -> None:
            self.func, self.name = func, func.__name__

        def __get__(self, instance: Any, owner: Any) -> Any:
            return self if instance is None else lambda *args, **kwargs: self.func(instance, *args, **kwargs)

    class ToolGroup:
        def __init__(self, name: str) -> None:
            self.name = name

        def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, name)(*args, **kwargs)

    class BaseTextEnv:
        def __init__(self) -> None:
            self.turns, self.max_turns, self.tool_groups = 0, 1, []  # type: ignore[var-annotated]

        def init_tool_groups(self, tool_groups: list[Any]) -> None:
            self.tool_groups = tool_groups

        def _execute_tool(self, group: str, name: str, given: Any) -> Any:
            return next(one for one in self.tool_groups if one.name == group).execute_tool(name, *given)

    return {
        "skyrl_gym": {},
        "skyrl_gym.envs": {},
        "skyrl_gym.envs.base_text_env": {"BaseTextEnv": BaseTextEnv, "BaseTextEnvStepOutput": dict},
        "skyrl_gym.tools": {},
        "skyrl_gym.tools.core": {"ToolGroup": ToolGroup, "tool": tool},
    }


def _openrlhf() -> dict[str, dict[str, Any]]:
    class AgentInstanceBase(ABC):
        @abstractmethod
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        @abstractmethod
        async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]: ...

    class MultiTurnAgentExecutor:
        def __init__(self, agent_instance_cls: Any) -> None:
            assert issubclass(agent_instance_cls, AgentInstanceBase)
            self.agent_instance_cls = agent_instance_cls

    agent = {"AgentInstanceBase": AgentInstanceBase, "MultiTurnAgentExecutor": MultiTurnAgentExecutor}
    return {"openrlhf": {}, "openrlhf.utils": {}, "openrlhf.utils.agent": agent}


def _verifiers() -> dict[str, dict[str, Any]]:
    class Toolset(Generic[A]):
        def __init__(self, config: Any = None) -> None:
            self.config = config

    class Task(Generic[A, B, C]):
        def __init__(self, data: Any, config: Any = None) -> None:
            self.data, self.config = data, config

    class TaskData:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

    def reward(weight: float) -> Callable[[Any], Any]:
        return lambda fn: fn

    v1 = {
        "Toolset": Toolset,
        "Task": Task,
        "TaskData": TaskData,
        "TaskConfig": type("TaskConfig", (), {}),
        "SharedToolsetConfig": type("SharedToolsetConfig", (), {}),
        "State": type("State", (), {}),
        "Trace": type("Trace", (), {}),
        "tool": lambda fn: fn,
        "reward": reward,
    }
    return {"verifiers": {"v1": _module("verifiers.v1", v1)}, "verifiers.v1": v1}


def _nemo() -> dict[str, dict[str, Any]]:
    class SimpleResourcesServer:
        def setup_webserver(self) -> Any:
            from fastapi import FastAPI

            return FastAPI()

    class BaseVerifyRequest(SimpleNamespace):
        def model_dump(self) -> dict[str, Any]:
            return {}

    @dataclass
    class EnvironmentReturn:
        observations: Any
        metadata: Any
        next_stop_strings: Any
        rewards: Any
        terminateds: Any
        answers: Any

    return {
        "nemo_gym": {},
        "nemo_gym.base_resources_server": {
            "SimpleResourcesServer": SimpleResourcesServer,
            "BaseVerifyRequest": BaseVerifyRequest,
            "BaseVerifyResponse": SimpleNamespace,
        },
        "nemo_rl": {},
        "nemo_rl.environments": {},
        "nemo_rl.environments.interfaces": {
            "EnvironmentInterface": type("EnvironmentInterface", (), {}),
            "EnvironmentReturn": EnvironmentReturn,
        },
    }


def _tinker() -> dict[str, dict[str, Any]]:
    @dataclass
    class ToolResult:
        messages: list[Any]
        should_stop: bool = False
        metrics: dict[str, float] = field(default_factory=dict)
        metadata: dict[str, Any] = field(default_factory=dict)

    def simple_tool_result(content: str, *, metrics: Any = None, metadata: Any = None) -> ToolResult:
        return ToolResult([{"role": "tool", "content": content}], False, metrics or {}, metadata or {})

    class tool:
        def __init__(self, fn: Callable[..., Any]) -> None:
            self.fn = fn

        def __get__(self, instance: Any, owner: Any) -> Any:
            async def run(given: Any) -> Any:
                return await self.fn(instance, **given.arguments)

            return SimpleNamespace(run=run)

    @dataclass
    class ToolInput:
        arguments: dict[str, Any]
        call_id: str | None = None

    use = {"ToolResult": ToolResult, "ToolInput": ToolInput, "simple_tool_result": simple_tool_result, "tool": tool}
    return {"tinker_cookbook": {}, "tinker_cookbook.tool_use": use, "tinker_cookbook.tool_use.types": use}


STAND_INS = {
    "verl": _verl,
    "skyrl": _skyrl,
    "openrlhf": _openrlhf,
    "verifiers": _verifiers,
    "nemo": _nemo,
    "tinker": _tinker,
    "trl": dict,
}
