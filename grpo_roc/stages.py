"""Training in stages: short answers, longer ones, then only hard problems. Each stage ends by its trigger or its step limit.

plateau    the share of truncated rollouts has settled and the reward has stopped rising
solved     every rollout is correct for most prompts, so they teach nothing
eval_drop  the validation reward fell from its best by more than noise explains; the best checkpoint is kept
"""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from grpo_roc import config, metrics
from grpo_roc.env import Position
from grpo_roc.evaluate import EVAL_STEP, sample
from grpo_roc.grpo import Row
from grpo_roc.rollout import Limits, Trajectory
from grpo_roc.runs import Run, open_run

WINDOW = 10
_TRIGGER_FIELDS = ("clip_ratio", "reward/mean", "groups/mixed", "groups/all0", "groups/all1", "len/mean", "eval/problems")


async def run_stages(settings: config.Config, start: Path, out: Path, *, eval_problems: int | None = None) -> list[Row]:
    """Run all stages of the settings in order; `out/stages.md` is a table of them."""
    if not settings.stages:
        raise config.ConfigError("stages: the settings have none")
    async with open_run(settings, start, out, eval_problems) as run:
        _reload_hard(run)
        while run.state.stage < len(settings.stages):
            await _run_stage(run)
        run.save("model")
    found: list[Row] = run.state.history["stages"]
    if run.ranks.is_main:
        (out / "stages.md").write_text(table(found))
    return found


async def _run_stage(run: Run) -> None:
    """Train until the stage ends, then record its summary and a checkpoint. `history` holds the rows of a stage in progress."""
    number, stage, ranks = run.state.stage, run.settings.stages[run.state.stage], run.ranks
    limits = Limits(stage.turns, stage.max_response, run.settings.rl.temperature)
    finished: list[Row] = list(run.state.history.get("stages", []))
    rows: list[Row] = list(run.state.history.get("rows", []))
    if not rows:
        if stage.filter_8of8 and ranks.is_main:
            await _keep_hard(run, limits)
        if stage.reset_optimizer:
            run.learner.reset_optimizer()
        run.state = run.state._replace(
            history={"first": str((found := await run.validate()).score), "problems": found.problems}
        )
    end: End | None = None
    with run.progress(f"stage {number + 1}", stage.steps, len(rows)) as bar:
        while end is None:
            row = await run.step(stage.eval_every, limits, last=len(rows) + 1 == stage.steps) | {"stage": number + 1}
            rows.append({name: row[name] for name in _TRIGGER_FIELDS if name in row})
            end = ranks.broadcast(stage_end(stage, rows, run.state.history["problems"]) if ranks.is_main else None)
            run.log(row, bar)
            run.state = run.state._replace(history=run.state.history | {"rows": rows, "stages": finished})
            if run.state.step % run.settings.rl.checkpoint_every == 0 and end is None:
                await run.save_latest()
    await run.discard_rollouts()  # the next stage has other limits and problems
    rewards = {"reward_first": run.state.history["first"], "reward_last": str((await run.validate()).score)}
    if ranks.is_main:
        finished.append(_summary(number, stage, run, rows, end) | rewards)
        tqdm.write(f"stage {number + 1} ended after {len(rows)} steps by {end.by}: {end.why}")
    run.state = run.state._replace(stage=number + 1, history={"stages": finished})
    await run.save_latest()
    run.save(f"stage{number + 1}")


def _summary(number: int, stage: config.Stage, run: Run, rows: list[Row], end: "End") -> Row:
    lengths = [row["len/mean"] for row in rows]
    few = max(1, min(5, len(rows) // 2))
    return {
        "stage": number + 1,
        "problems": len(run.task.pool) or "new ones",
        "max_response": stage.max_response,
        "turns": stage.turns,
        "steps": len(rows),
        "tokens_first": statistics.fmean(lengths[:few]),
        "tokens_last": statistics.fmean(lengths[-few:]),
        "by": end.by,
        "why": end.why,
    }


class _Tried:
    """The problems that were tried at this step, and how many of their rollouts were wrong, in an append-only file."""

    def __init__(self, path: Path, step: int) -> None:
        self._path, self._step = path, step
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # a killed process leaves half a line
        path.write_text("".join(whole))
        rows = [json.loads(line) for line in whole]
        self.wrong: dict[str, int] = {row["id"]: row["wrong"] for row in rows if row["step"] == step}

    def add(self, name: str, rollouts: Sequence[Trajectory]) -> None:
        self.wrong[name] = sum(one.reward is not None and not one.correct for one in rollouts)
        with open(self._path, "a") as file:
            file.write(json.dumps({"step": self._step, "id": name, "wrong": self.wrong[name]}) + "\n")


async def _keep_hard(run: Run, limits: Limits) -> None:
    """Make eight rollouts of every problem and drop the problems that all eight solve.

    `filter.jsonl` gets a row per problem as soon as its rollouts are done; a resumed run tries only the others.
    """
    assert run.actor is not None
    pool, step = run.task.pool, run.state.step
    tried = _Tried(run.out / "filter.jsonl", step)
    left = [problem for problem in pool if problem.id not in tried.wrong]
    async for rollouts in sample(run.actor, left, 8, limits, Position(run.settings.rl.seed, 2 * EVAL_STEP + step)):
        for number in sorted({one.group for one in rollouts}):
            tried.add(left[number].id, [one for one in rollouts if one.group == number])
    hard = [problem for problem in pool if tried.wrong[problem.id]]
    if not hard:
        tqdm.write("every problem was solved in 8 of 8 rollouts; no problem is dropped")
        return
    (run.out / "hard.jsonl").write_text("".join(json.dumps(problem._asdict()) + "\n" for problem in hard))
    tqdm.write(f"{len(pool) - len(hard)} of {len(pool)} problems were solved in 8 of 8 rollouts and are dropped")
    run.task = run.task.with_problems(hard)


def _reload_hard(run: Run) -> None:
    """After a resume: keep the problems that an earlier stage found to be hard."""
    path = run.out / "hard.jsonl"
    if path.exists():
        wanted = {json.loads(line)["id"] for line in path.read_text().splitlines()}
        run.task = run.task.with_problems([one for one in run.task.pool if one.id in wanted])


class End(NamedTuple):
    by: str  # "cap" or the trigger's name
    why: str


Means = Sequence[float | None]  # the mean reward of each validation problem


def stage_end(stage: config.Stage, rows: Sequence[Row], first: Means = ()) -> End | None:
    """Why the stage with these rows ends now; None: it continues. `first`: the validation at its start."""
    if stage.end == "eval_drop":
        found = [first, *(row["eval/problems"] for row in rows if "eval/problems" in row)]
        why = _eval_drop(stage, [means for means in found if means]) if "eval/problems" in rows[-1] else ""
    else:
        why = _TRIGGERS[stage.end](stage, rows) if len(rows) >= WINDOW else ""
    if why and len(rows) >= stage.min_steps:
        return End(stage.end, why)
    if len(rows) >= stage.steps:
        return End("cap", f"{stage.steps} steps are done")
    return None


def _plateau(stage: config.Stage, rows: Sequence[Row]) -> str:
    clip = rows[0]["clip_ratio"]
    for row in rows[1:]:
        clip += 0.2 * (row["clip_ratio"] - clip)
    rise = statistics.linear_regression(range(WINDOW), [row["reward/mean"] for row in rows[-WINDOW:]]).slope
    low, high = stage.clip_ratio
    if low <= clip <= high and rise < stage.reward_slope:
        return f"truncated share {clip:.3f} within {low}-{high} and reward slope {rise:+.4f} < {stage.reward_slope}"
    return ""


def _solved(stage: config.Stage, rows: Sequence[Row]) -> str:
    last = rows[-5:]
    groups = sum(row["groups/mixed"] + row["groups/all0"] + row["groups/all1"] for row in last)
    share = sum(row["groups/all1"] for row in last) / groups
    if share > stage.solved_share:
        return f"{share:.2f} of the prompts had only correct rollouts (> {stage.solved_share})"
    return ""


def _eval_drop(stage: config.Stage, found: Sequence[Means]) -> str:
    """Compare the last validation with the best one, problem by problem: what problems have in common cancels out.

    The best of several is lucky too, so that two standard errors would end a quarter of the stages by noise.
    """
    if len(found) < 2:
        return ""
    best = max(found[:-1], key=lambda means: metrics.mean(_known(means)))
    drops = [was - now for was, now in zip(best, found[-1], strict=True) if was is not None and now is not None]
    if len(drops) < 2:
        return ""
    drop, error = statistics.fmean(drops), statistics.stdev(drops) / math.sqrt(len(drops))
    if drop <= max(0.0, stage.eval_drop_se * error):
        return ""
    was, now = (metrics.mean(_known(means)) for means in (best, found[-1]))
    return (
        f"validation reward fell from {was:.3f} to {now:.3f}: {drop:.3f} ± {error:.3f}, more than {stage.eval_drop_se} errors"
    )


def _known(means: Means) -> list[float]:
    return [mean for mean in means if mean is not None]


_TRIGGERS = {"cap": lambda stage, rows: "", "plateau": _plateau, "solved": _solved}


def table(found: Sequence[Row]) -> str:
    """One line per stage, as a Markdown table."""
    head = ["stage", "problems", "max response", "turns", "steps", "mean tokens", "validation reward", "ended by"]
    rows = [
        [
            *(row[name] for name in ("stage", "problems", "max_response", "turns", "steps")),
            f"{row['tokens_first']:.1f} → {row['tokens_last']:.1f}",
            f"{row['reward_first']} → {row['reward_last']}",
            f"{row['by']}: {row['why']}",
        ]
        for row in found
    ]
    return "\n".join([*metrics.table(head, rows, len(head)), ""])
