"""Writes the rollouts of every step to the run's folder, in the format of `rollout_log.py`, within the settings' bounds."""

import json
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from grpo_roc import chat, config, roc, rollout_log
from grpo_roc.batches import Sample
from grpo_roc.rollout import Codec, Trajectory
from grpo_roc.rollout_log import Call, Group, Part, Rollout, Step, Verdict

MB = 1_000_000
_UNKNOWN_CHARACTER = "\ufffd"


class Kept(NamedTuple):
    """What the trainer knows of a rollout that it trained on."""

    sample: Sample
    entropies: list[float]  # of its generated tokens


class Recorder:
    """On resume, steps from `first_step` on are removed, because they run again."""

    def __init__(self, run: Path, settings: config.Config, codec: Codec, first_step: int = 0) -> None:
        self._run, self._rl, self._bounds = run, settings.rl, settings.record
        self._texts = _Texts(codec)
        folder = run / rollout_log.FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        (folder / rollout_log.SETTINGS).write_text(json.dumps(config.as_dict(settings), indent=1))
        for step in rollout_log.steps(run):
            if step >= first_step:
                rollout_log.path(run, step).unlink()

    def write(self, step: int, rollouts: Sequence[Trajectory], kept: Sequence[tuple[Trajectory, Kept]]) -> None:
        """Whole groups, until they need `record.step_mb`."""
        if not self._bounds.step_mb:
            return
        rule = "all" if self._rl.arm == "grpo" else "uniform" if self._rl.arm == "uniform" else self._rl.roc
        groups = [list(group) for _, group in groupby(rollouts, key=lambda one: one.group)]
        by_rollout = {id(one): facts for one, facts in kept}
        room = self._bounds.step_mb * MB
        with open(rollout_log.path(self._run, step), "wb") as file:
            room -= file.write(_line(Step(step, time.time(), self._rl.arm, rule, self._rl.eps, len(groups))))
            for group in groups:
                lines = b"".join(self._group(group, by_rollout))
                if len(lines) > room:
                    break
                room -= file.write(lines)
                file.flush()
        self._thin_out()

    def _group(self, rollouts: Sequence[Trajectory], kept: dict[int, Kept]) -> Iterator[bytes]:
        first = rollouts[0]
        known = [one for one in rollouts if one.reward is not None]
        correct = [one.correct for one in known]
        learned = [one.correct for one in rollouts if id(one) in kept]
        yield _line(
            Group(
                first.group,
                first.problem,
                first.truth,
                "".join(self._texts.of(first.prompt)),
                len(first.prompt),
                correct.count(False),
                correct.count(True),
                len(rollouts) - len(known),
                learned.count(False),
                learned.count(True),
            )
        )
        equal = roc.all_equal([one.reward or 0.0 for one in known])
        for one in rollouts:
            verdict: Verdict = "kept" if id(one) in kept else "equal" if equal else "not_drawn"
            yield _line(self._rollout(one, "unknown" if one.reward is None else verdict, kept.get(id(one))))

    def _rollout(self, one: Trajectory, verdict: Verdict, kept: Kept | None) -> Rollout:
        entropies = _spread(kept.entropies, one.mask) if kept else one.entropies if len(one.entropies) == len(one.ids) else []
        return Rollout(
            one.group,
            one.sample,
            verdict,
            one.reward,
            round(kept.sample.advantage, 4) if kept else None,
            one.tokens,
            one.turns,
            one.answers,
            one.truncated,
            one.outcomes,
            round(roc.tool_error_share(one.outcomes), 4),
            round(roc.format_penalty(one.answers, one.turns), 4),
            one.weight_version,
            round(one.tool_wait_s, 4),
            ("trainer" if kept else "engine") if entropies else "",
            self._parts(one, entropies),
        )

    def _parts(self, one: Trajectory, entropies: Sequence[float]) -> list[Part]:
        """Alternating turns of the model and observations. The outcomes are those of the calls, in their order."""
        outcomes = zip(one.outcomes, one.statuses, strict=True)
        parts: list[Part] = []
        for own, places in groupby(range(len(one.ids)), key=lambda place: one.mask[place]):
            at = list(places)
            tokens = self._texts.of([one.ids[place] for place in at])
            if not own:
                parts.append(Part("tool", tokens))
                continue
            calls = [_call(call, *next(outcomes, ("", ""))) for call in chat.read_turn("".join(tokens)).calls]
            logprobs = [round(one.logprobs[place], 3) for place in at]
            parts.append(Part("model", tokens, logprobs, [round(entropies[place], 3) for place in at if entropies], calls))
        return parts

    def _thin_out(self) -> None:
        """Over `record.total_mb`, remove the step whose neighbours are closest: those that stay are spread over the run."""
        steps = rollout_log.steps(self._run)
        sizes = {step: rollout_log.path(self._run, step).stat().st_size for step in steps}
        while sum(sizes.values()) > self._bounds.total_mb * MB and len(steps) > 2:
            place = min(range(1, len(steps) - 1), key=lambda n: steps[n + 1] - steps[n - 1])
            step = steps.pop(place)
            del sizes[step]
            rollout_log.path(self._run, step).unlink()


class _Texts:
    """The text of each token. A character that several tokens encode is the first one's, and the others have none."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._known: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        for token in {*ids} - self._known.keys():
            self._known[token] = self._codec.text([token])
        texts = [self._known[token] for token in ids]
        for broken, places in groupby(range(len(ids)), key=lambda place: _UNKNOWN_CHARACTER in texts[place]):
            if broken:
                first, *others = places
                texts[first] = self._codec.text(ids[first : first + 1 + len(others)])
                for place in others:
                    texts[place] = ""
        return texts


def _call(call: chat.ToolCall | chat.ParseFailure, outcome: str, status: str) -> Call:
    if isinstance(call, chat.ParseFailure):
        return Call(outcome, status, failure=call.why)
    return Call(outcome, status, call.code, call.stdin)


def _spread(values: Sequence[float], mask: Sequence[int]) -> list[float]:
    """The values of generated tokens, and 0 for observed ones."""
    left = iter(values)
    return [next(left) if own else 0.0 for own in mask]


def _line(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"
