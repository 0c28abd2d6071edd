"""A run's folder without training: demonstrations of the toy are its rollouts; the trainer selects and records them."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer_harness import with_settings

from grpo_roc import chat, metrics
from grpo_roc.grpo import Selected, select
from grpo_roc.model import make_tokenizer
from grpo_roc.recorder import Kept, Recorder
from grpo_roc.rollout import Codec, Trajectory
from grpo_roc.tasks import make_task
from grpo_roc.tasks.arith import answer, call_text, error_text
from grpo_roc.tasks.base import Problem

STATUS = {"json": "parse_failure", "": "ok"}


class MadeUpRun:
    """Steps are written one after the other, as the trainer does it."""

    def __init__(self, folder: Path, *changes: str, first_step: int = 0) -> None:
        self.folder = folder
        self.settings = with_settings("rl.steps=40", "rl.group=8", "rl.prompts=4", *changes)
        self.task = make_task(self.settings)
        self.codec = Codec(make_tokenizer(self.task.texts, 512), self.settings.chat)
        self.metrics = metrics.Metrics(folder, first_step=first_step, board=False)
        self.recorder = Recorder(folder, self.settings, self.codec, first_step)

    def write(self, step: int, rollouts: Sequence[Trajectory] | None = None) -> Selected:
        rl = self.settings.rl
        made = self.rollouts(step) if rollouts is None else rollouts
        selected = select(made, rl, step)
        kept = [
            Kept(one, [abs(value) for value, own in zip(one.logprobs, one.mask, strict=True) if own])
            for one in selected.samples
        ]
        self.recorder.write(step, made, list(zip(selected.kept, kept, strict=True)))
        self.metrics.add({"step": step} | metrics.of_rollouts(made) | self._made_up(step, selected))
        return selected

    def rollouts(self, step: int) -> list[Trajectory]:
        rng = random.Random(f"rollouts:{step}")
        problems = self.task.batch(0, step, self.settings.rl.prompts)
        count = self.settings.rl.group * self.settings.rl.oversample
        return [self.rollout(rng, problem, group, n, step) for group, problem in enumerate(problems) for n in range(count)]

    def rollout(self, rng: random.Random, problem: Problem, group: int, sample: int, step: int) -> Trajectory:
        """Fewer bugs the later the step; in the first group of every fifth step all rollouts are right."""
        one = Trajectory(problem.id, problem.answer, group, sample, self.codec.prompt(problem.text), weight_version=step)
        easy = group == 0 and step % 5 == 0
        bug = "" if rng.random() < 0.5 + step / 90 else rng.choice(("paren", "name", "json", "operand"))
        self._say(one, rng, " run</reason>" + call_text(problem.id, bug) + chat.END)
        text = error_text(rng, bug, problem.id) if bug else problem.answer
        self._observe(one, text, "error" if bug else "ok", STATUS.get(bug, "runtime_error"))
        if bug and rng.random() < 0.7:
            self._say(one, rng, " fix</reason>" + call_text(problem.id) + chat.END)
            self._observe(one, problem.answer, "ok", "ok")
        right = easy or (one.outcomes[-1] == "ok" and rng.random() < 0.8)
        twice = 1 + (rng.random() < 0.15)
        self._say(one, rng, " done</reason>" + answer(problem.answer if right else "7") * twice + chat.END)
        one.answers, one.reward = twice, float(right)
        return one

    def _say(self, one: Trajectory, rng: random.Random, text: str) -> None:
        ids = self.codec.ids(text)
        self._add(one, ids, 1, [-(rng.expovariate(1.5) ** 2) for _ in ids])
        one.turns += 1

    def _observe(self, one: Trajectory, text: str, outcome: str, status: str) -> None:
        one.outcomes.append(outcome)
        one.statuses.append(status)
        ids = self.codec.observation([text])
        self._add(one, ids, 0, [0.0] * len(ids))

    def _add(self, one: Trajectory, ids: list[int], own: int, logprobs: list[float]) -> None:
        one.ids += ids
        one.mask += [own] * len(ids)
        one.logprobs += logprobs
        one.entropies += [min(3.0, 1.2 * abs(value)) for value in logprobs]

    def _made_up(self, step: int, selected: Selected) -> dict[str, Any]:
        row = {
            "groups/mixed": selected.mixed,
            "groups/all0": selected.all0,
            "groups/all1": selected.all1,
            "train/entropy": 0.9 * math.exp(-step / 30),
            "mismatch/mean": 2e-6 * (1 + step % 3),
            "mismatch/max": 4e-5 * (1 + step % 4),
            "mismatch/kl": 1e-9,
            "time/gen": 1.2,
            "time/tool_wait": 0.4,
            "time/train": 0.8 + 0.01 * (step % 7),
            "time/verify": 0.02,
            "time/step": 2.4,
        }
        return row | ({"eval/reward": 0.5 + step / 100} if step % 5 == 4 else {})
