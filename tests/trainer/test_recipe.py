"""The configurations load, the scripts call commands that exist, and the table of hyperparameters says what the files say."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_roc import config
from grpo_roc.__main__ import _parser

ROOT = Path(__file__).parents[2]
CONFIGS = ["cpu_reasoning", "cpu_smollm2", "cpu_tiny", "rocm_1gpu", "rocm_8gpu"]
SCRIPTS = ROOT / "grpo_roc" / "speedrun"
PAGE = (ROOT / "docs" / "recipe.md").read_text()


def test_every_configuration_has_a_script_and_a_row() -> None:
    assert sorted(file.stem for file in config.CONFIGS.glob("*.yaml")) == CONFIGS
    assert sorted(file.stem for file in SCRIPTS.glob("*.sh")) == CONFIGS
    assert all(f"| `{name}` |" in PAGE for name in CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_valid_and_fits_its_engines(name: str) -> None:
    settings = config.load(name)
    limits = [(settings.rl.max_response, settings.rl.turns)] if not settings.stages else []
    limits += [(stage.max_response, stage.turns) for stage in settings.stages]
    limits.append((settings.eval.max_response, settings.eval.turns))
    assert all(response < settings.max_len and turns > 1 for response, turns in limits)
    assert settings.rl.clip == (0.2, 0.28) and settings.rl.oversample == 2 and settings.rl.loss_norm == "batch"
    if settings.task.kind == "math_jsonl":
        assert set(settings.task.eval_files) == {"aime24", "aime25", "math500"} and settings.task.verify_kind == "math"
    if settings.stages:
        assert settings.rl.steps <= sum(stage.steps for stage in settings.stages)


def commands(script: Path) -> list[list[str]]:
    text = script.read_text().replace("\\\n", " ")
    lines = [
        line.strip() for line in text.splitlines() if re.search(r"(?:^|\s)-m grpo_roc ", line) and not line.startswith("#")
    ]
    return [shlex.split(line.partition("-m grpo_roc ")[2]) for line in lines]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_script_is_shell_and_calls_commands_that_exist(name: str) -> None:
    script = SCRIPTS / f"{name}.sh"
    subprocess.run(["sh", "-n", str(script)], check=True)
    called = [_parser().parse_args(command) for command in commands(script)]
    assert {"sft", "rl", "eval", "reasoning"} & {one.command for one in called} and all(
        one.config == name for one in called if "config" in one
    )
    for one in called:
        if "set" in one:
            config.load(one.config, one.set)
    prepared = {str(one.out) for one in called if one.command == "prepare"}
    task = config.load(name).task
    if task.kind == "math_jsonl":
        assert {task.rl_file, *task.eval_files.values()} <= prepared


ROWS = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", PAGE, re.M)


@pytest.mark.parametrize(("setting", "here"), [(row[0], row[3]) for row in ROWS if "." in row[0]])
def test_the_table_says_what_the_configuration_says(setting: str, here: str) -> None:
    value: Any = config.as_dict(config.load("rocm_8gpu"))
    for part in setting.split("."):
        value = value[int(part) if part.isdigit() else part]
    told = yaml.safe_load(here)
    assert (list(value) if isinstance(value, tuple) else value) == told, setting


def test_the_table_has_every_setting_of_the_method() -> None:
    ours = {"arm", "turns", "max_response", "micro_tokens", "packing", "lockstep", "eval_every", "checkpoint_every", "seed"}
    assert set(config.Rl.__struct_fields__) - ours == {row[0].removeprefix("rl.") for row in ROWS if row[0].startswith("rl.")}
