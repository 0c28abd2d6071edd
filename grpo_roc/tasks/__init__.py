"""Tasks: problems with answers that can be verified, and demonstrations for SFT."""

from grpo_roc import config
from grpo_roc.tasks.arith import Arith
from grpo_roc.tasks.base import Task
from grpo_roc.tasks.math_jsonl import MathJsonl
from grpo_roc.tasks.reasoning import Reasoning

KINDS: dict[str, type[Task]] = {"arith": Arith, "math_jsonl": MathJsonl, "reasoning_gym": Reasoning}


def make_task(settings: config.Config) -> Task:
    return KINDS[settings.task.kind](settings.task, settings.chat)
