"""Stand-ins of projects that are on no package index, made from the signatures in their sources.

They only check that an adapter is called and replies as the framework expects. All other adapters are tested with the real
package, in `make test-integrations`, which sets EXEC_REAL=NAME.
"""

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

PACKAGES = {
    "verl": "verl",
    "trl": "trl",
    "skyrl": "skyrl_gym",
    "openrlhf": "openrlhf",
    "verifiers": "verifiers",
    "nemo_gym": "nemo_gym",
    "nemo_rl": "nemo_rl.environments",
    "slime": "slime.rollout",
    "tinker": "tinker_cookbook",
}


def adapter(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The adapter on the real package; on its stand-in if it has one. Else the test is skipped."""
    module = f"grpo_roc.integrations.{name}_adapter"
    if _installed(PACKAGES[name]):
        return importlib.import_module(module)
    if os.environ.get("EXEC_REAL") == name:
        pytest.fail(f"{PACKAGES[name]} is not installed in this venv")
    if name not in STAND_INS:
        pytest.skip(f"{PACKAGES[name]} is not installed: `make test-integrations` runs this")
    monkeypatch.delitem(sys.modules, module, raising=False)
    for path, content in STAND_INS[name]().items():
        monkeypatch.setitem(sys.modules, path, _module(path, content))
    return importlib.import_module(module)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent
        return False


def _module(name: str, content: dict[str, Any]) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(content)
    return made


def _nemo_rl() -> dict[str, dict[str, Any]]:
    @dataclass
    class EnvironmentReturn:
        observations: Any
        metadata: Any
        next_stop_strings: Any
        rewards: Any
        terminateds: Any
        answers: Any

    @dataclass
    class Actor:
        """What `ray.remote` makes of a class: it has `options` and `remote`, and cannot be called."""

        made: Any

        def options(self, **kwargs: Any) -> Any:
            return self

        def remote(self, *args: Any) -> Any:
            return self.made(*args)

    registered: dict[str, str] = {}
    interfaces = {"EnvironmentInterface": type("EnvironmentInterface", (), {}), "EnvironmentReturn": EnvironmentReturn}
    return {
        "ray": {"remote": Actor},
        "nemo_rl": {},
        "nemo_rl.distributed": {},
        "nemo_rl.distributed.ray_actor_environment_registry": {"ACTOR_ENVIRONMENT_REGISTRY": {}},
        "nemo_rl.distributed.virtual_cluster": {"PY_EXECUTABLES": SimpleNamespace(SYSTEM="python")},
        "nemo_rl.environments": {},
        "nemo_rl.environments.interfaces": interfaces,
        "nemo_rl.environments.utils": {"register_env": registered.__setitem__, "ENV_REGISTRY": registered},
    }


class SlimeSample:
    """slime's `Sample`, as far as the adapter uses it, with the checks of `append_response_tokens`."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"

    def __init__(self, group: int = 0, reward: float | None = None, state: dict[str, Any] | None = None) -> None:
        self.group_index, self.reward, self.label, self.prompt = group, reward, "42", "p"
        self.tokens: list[int] = []
        self.response, self.response_length, self.remove_sample = "", 0, False
        self.loss_mask: list[int] = []
        self.rollout_log_probs: list[float] = []
        self.status = self.Status.PENDING
        self.metadata: dict[str, Any] = {} if state is None else {"exec": state}

    def append_response_tokens(
        self, args: Any, *, tokens: Any, log_probs: Any = None, trainable: bool = True, meta_info: Any = None, text: Any = None
    ) -> None:
        if trainable and log_probs is None:
            raise ValueError("trainable tokens need log-probabilities")
        if not trainable and log_probs is not None:
            raise ValueError("tokens that are not trainable have no log-probabilities")
        self.response += text or ""
        self.tokens += tokens
        self.response_length += len(tokens)
        self.loss_mask += [int(trainable)] * len(tokens)
        self.rollout_log_probs += log_probs or [0.0] * len(tokens)
        if meta_info is not None:
            reasons = {"length": self.Status.TRUNCATED, "abort": self.Status.ABORTED, "stop": self.Status.COMPLETED}
            self.status = reasons[meta_info["finish_reason"]["type"]]


def _slime() -> dict[str, dict[str, Any]]:
    class Tokenizer:
        """One token per word of the text."""

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            assert not add_special_tokens
            return {"input_ids": [9] * len(text.split())}

    state = {"GenerateState": lambda args: SimpleNamespace(tokenizer=Tokenizer())}
    return {"slime": {}, "slime.rollout": {}, "slime.rollout.sglang_rollout": state}


STAND_INS = {"nemo_rl": _nemo_rl, "slime": _slime}
