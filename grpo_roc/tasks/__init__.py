"""Tasks: problems with answers that can be verified, and demonstrations for SFT."""

from grpo_roc import config
from grpo_roc.tasks.arith import Arith
from grpo_roc.tasks.base import Task
from grpo_roc.tasks.math_jsonl import MathJsonl


def make_task(settings: config.Config) -> Task:
    kind = Arith if settings.task.kind == "arith" else MathJsonl
    return kind(settings.task, settings.chat)
