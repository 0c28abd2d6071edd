"""Whole runs: SFT, RL, stages, evaluation; what the commands do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from tqdm import tqdm

from grpo_roc import build, checkpoint, config, metrics, sft, stages
from grpo_roc import model as tiny
from grpo_roc.device import Device, pick
from grpo_roc.distributed import Team
from grpo_roc.engines.base import Engine
from grpo_roc.engines.local import LocalEngine
from grpo_roc.engines.scheduler import Scheduler
from grpo_roc.env import ToolEnv, service_url, tool_env
from grpo_roc.evaluate import EVAL_STEP, evaluate, sample
from grpo_roc.grpo import GrpoLoop, Learner
from grpo_roc.rollout import Limits, Trajectory
from grpo_roc.tasks.base import Task

Row = dict[str, Any]
SFT_CHECKPOINT_EVERY = 200


def prepare(settings: config.Config) -> Device:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return pick(settings.model.dtype)


def make_tiny(settings: config.Config, out: Path, seed: int = 0) -> int:
    longest = max(engine.max_len for engine in settings.engines)
    return tiny.make_tiny(out, settings.model, build.task(settings).texts, max_len=longest, seed=seed)


# -- SFT ------------------------------------------------------------------------------------------------------------------


def run_sft(settings: config.Config, start: Path, out: Path, *, seed: int = 0) -> Path:
    """From the model in `start`; the trained one is in `out/model`."""
    device = prepare(settings)
    latest = checkpoint.latest(out / "latest")
    state = checkpoint.load_state(latest, settings) if latest else checkpoint.State()
    source = latest or start
    tokenizer = build.tokenizer(start)
    model = build.model(source, settings.model, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.sft.lr, betas=(0.9, 0.95), weight_decay=settings.sft.weight_decay
    )
    if latest:
        optimizer.load_state_dict(checkpoint.load_optimizer(latest))
    rows = metrics.Metrics(out, first_step=state.step, board=False)

    def save(step: int, folder: Path) -> None:
        checkpoint.save(
            folder,
            model_config=model.config,
            weights=model.state_dict(),
            tokenizer=tokenizer,
            optimizer=optimizer.state_dict(),
            state=checkpoint.State(step),
            settings=settings,
        )

    with tqdm(total=settings.sft.steps, initial=state.step, desc="sft", unit="step") as bar:

        def report(step: int, row: dict[str, float]) -> None:
            bar.update()
            bar.set_postfix_str(f"loss {row['sft/loss']:.3f} lr {row['sft/lr']:.1e}")
            if step % settings.sft.log_every == 0 or step + 1 == settings.sft.steps:
                rows.add({"step": step} | row)
            if (step + 1) % SFT_CHECKPOINT_EVERY == 0 and step + 1 < settings.sft.steps:
                save(step + 1, out / "latest")

        sft.train(
            model,
            build.codec(settings, tokenizer),
            build.task(settings),
            settings.sft,
            seed=seed,
            max_len=max(engine.max_len for engine in settings.engines),
            first_step=state.step,
            optimizer=optimizer,
            report=report,
        )
    save(settings.sft.steps, out / "model")
    return out / "model"


# -- RL -------------------------------------------------------------------------------------------------------------------


class Session:
    """Everything that an RL run has open."""

    def __init__(self, settings: config.Config, source: Path, team: Team) -> None:
        self.settings, self.team, self.source = settings, team, source
        self.tokenizer = build.tokenizer(source)
        self.codec = build.codec(settings, self.tokenizer)
        self.model = team.wrap(build.model(source, settings.model, team.device))
        self.learner = Learner(self.model, settings.rl, team)
        self.task: Task = build.task(settings)
        self.engine: Engine | None = None
        weights = team.weights(self.model)
        if team.leads:
            engines = build.engines(settings, source, weights)
            self.engine = engines[0] if settings.rl.lockstep else Scheduler(engines, settings.scheduler)

    def loop(self, env: ToolEnv | None) -> GrpoLoop:
        return GrpoLoop(self.settings, self.learner, codec=self.codec, task=self.task, engine=self.engine, env=env)

    def save(self, folder: Path, state: checkpoint.State) -> None:
        weights = self.team.weights(self.model)
        optimizer = self.team.optimizer_state(self.model, self.learner.optimizer)
        if self.team.leads:
            checkpoint.save(
                folder,
                model_config=self.model.config,
                weights=weights,
                tokenizer=self.tokenizer,
                optimizer=optimizer,
                state=state,
                settings=self.settings,
            )

    async def eval_reward(self, env: ToolEnv, problems: int) -> dict[str, float]:
        assert self.engine is not None
        few = msgspec.structs.replace(self.settings.eval, problems=problems, samples=1)
        found, _ = await evaluate(
            self.task.heldout(problems), few, engine=self.engine, env=env, codec=self.codec, seed=self.settings.rl.seed
        )
        return found


@contextlib.asynccontextmanager
async def _environment(settings: config.Config, team: Team) -> AsyncIterator[ToolEnv | None]:
    if not team.leads:
        yield None
        return
    with service_url(settings.service) as url:
        async with tool_env(settings, url) as env:
            yield env


def _resume(settings: config.Config, start: Path, out: Path) -> tuple[Path, checkpoint.State, Path | None]:
    latest = checkpoint.latest(out / "latest")
    return (latest, checkpoint.load_state(latest, settings), latest) if latest else (start, checkpoint.State(), None)


class Opened(NamedTuple):
    """A run that has begun, or goes on where it stopped."""

    session: Session
    state: checkpoint.State
    rows: metrics.Metrics | None  # of who leads
    env: ToolEnv | None


@contextlib.asynccontextmanager
async def _opened(settings: config.Config, start: Path, out: Path) -> AsyncIterator[Opened]:
    team = Team(settings.parallel, prepare(settings))
    source, state, latest = _resume(settings, start, out)
    session = Session(settings, source, team)
    if latest:
        team.load_optimizer(session.model, session.learner.optimizer, checkpoint.load_optimizer(latest))
    rows = metrics.Metrics(out, first_step=state.step) if team.leads else None
    try:
        async with _environment(settings, team) as env:
            yield Opened(session, state, rows, env)
    finally:
        if rows is not None:
            rows.close()
        if session.engine is not None:
            await session.engine.aclose()


async def run_rl(settings: config.Config, start: Path, out: Path, *, eval_problems: int = 256) -> Path:
    """From the model in `start`, or from where `out` stopped; the trained one is in `out/model`, the best in `out/best`."""
    async with _opened(settings, start, out) as (session, state, rows, env):
        loop = session.loop(env)
        with tqdm(total=settings.rl.steps, initial=state.step, desc=settings.rl.arm, disable=not session.team.leads) as bar:
            for step in range(state.step, settings.rl.steps):
                row = await loop.step(step)
                state = await _after_step(session, env, settings.rl.eval_every, eval_problems, row, state, out)
                if rows is not None:
                    rows.add(row)
                    bar.set_postfix_str(metrics.line(row))
                    bar.update()
                if (step + 1) % settings.rl.checkpoint_every == 0:
                    session.save(out / "latest", state)
        session.save(out / "model", state)
    return out / "model"


async def _after_step(
    session: Session, env: ToolEnv | None, every: int, problems: int, row: Row, state: checkpoint.State, out: Path
) -> checkpoint.State:
    """Look at held-out problems now and then; the best policy is kept."""
    state = state._replace(step=row["step"] + 1)
    if not every or state.step % every:
        return state
    if env is not None:
        row["eval/reward"] = (await session.eval_reward(env, problems))["reward/mean"]
    reward = session.team.everyone(row.get("eval/reward"))
    if reward > state.best:
        state = state._replace(best=reward)
        session.save(out / "best", state)
    return state


# -- stages ---------------------------------------------------------------------------------------------------------------


async def run_stages(
    settings: config.Config, start: Path, out: Path, *, eval_problems: int = 256, say: Callable[[str], None] = tqdm.write
) -> list[Row]:
    """All stages of the settings, one after the other; a table of them is in `out/stages.md`."""
    if not settings.stages:
        raise config.ConfigError("stages: there are none in these settings")
    async with _opened(settings, start, out) as (session, state, rows, env):
        found: list[Row] = list(state.history.get("stages", []))
        loop = session.loop(env)
        _use_pool(session, loop, out)
        for number in range(state.stage, len(settings.stages)):
            state = await _run_stage(session, loop, number, state, rows, out, eval_problems, found, say)
        session.save(out / "model", state)
    if session.team.leads:
        (out / "stages.md").write_text(stages.table(found))
    return found


def _use_pool(session: Session, loop: GrpoLoop, out: Path) -> None:
    """After a resume in or after the filter: the problems that were hard then."""
    path = out / "hard.jsonl"
    if path.exists():
        wanted = {json.loads(line)["id"] for line in path.read_text().splitlines()}
        session.task = session.task.with_problems([one for one in session.task.pool if one.id in wanted])
        loop.task = session.task


async def _run_stage(
    session: Session,
    loop: GrpoLoop,
    number: int,
    state: checkpoint.State,
    rows: metrics.Metrics | None,
    out: Path,
    eval_problems: int,
    found: list[Row],
    say: Callable[[str], None],
) -> checkpoint.State:
    stage, team, env = session.settings.stages[number], session.team, loop.env
    own: list[Row] = list(state.history.get("rows", []))
    limits = Limits(stage.turns, stage.max_response, session.settings.rl.temperature)
    if not own:
        if stage.filter_8of8 and team.leads:
            await _keep_hard(session, loop, limits, state.step, out, say)
        if stage.reset_optimizer:
            session.learner.reset_optimizer()
        if env is not None:
            state = state._replace(history={"first": (await session.eval_reward(env, eval_problems))["reward/mean"]})
    verdict: stages.Ended | None = None
    with tqdm(total=stage.steps, initial=len(own), desc=f"stage {number + 1}", disable=not team.leads) as bar:
        while verdict is None:
            row = await loop.step(state.step, limits)
            row["stage"] = number + 1
            state = await _after_step(session, env, stage.eval_every, eval_problems, row, state, out)
            own.append({name: row[name] for name in _TRIGGER_FIELDS if name in row})
            verdict = team.everyone(stages.ended(stage, own) if team.leads else None)
            if rows is not None:
                rows.add(row)
                bar.set_postfix_str(metrics.line(row))
                bar.update()
            state = state._replace(history=state.history | {"rows": own, "stages": found})
            if state.step % session.settings.rl.checkpoint_every == 0 and verdict is None:
                session.save(out / "latest", state)
    if env is not None:
        found.append(_summary(number, stage, session, own, verdict))
        found[-1]["reward_first"] = state.history["first"]
        found[-1]["reward_last"] = (await session.eval_reward(env, eval_problems))["reward/mean"]
        say(f"stage {number + 1} ended after {len(own)} steps by {verdict.by}: {verdict.why}")
    state = state._replace(stage=number + 1, history={"stages": found})
    session.save(out / "latest", state)
    session.save(out / f"stage{number + 1}", state)
    return state


_TRIGGER_FIELDS = ("clip_ratio", "reward/mean", "groups/mixed", "groups/all0", "groups/all1", "len/mean", "eval/reward")


def _summary(number: int, stage: config.Stage, session: Session, own: list[Row], verdict: stages.Ended) -> Row:
    tenth = max(1, min(5, len(own) // 2))
    return {
        "stage": number + 1,
        "problems": len(session.task.pool) or "new ones",
        "max_response": stage.max_response,
        "turns": stage.turns,
        "steps": len(own),
        "tokens_first": sum(row["len/mean"] for row in own[:tenth]) / tenth,
        "tokens_last": sum(row["len/mean"] for row in own[-tenth:]) / tenth,
        "by": verdict.by,
        "why": verdict.why,
    }


async def _keep_hard(
    session: Session, loop: GrpoLoop, limits: Limits, step: int, out: Path, say: Callable[[str], None]
) -> None:
    """Eight rollouts of every problem; those solved eight times are dropped."""
    assert session.engine is not None and loop.env is not None
    pool = session.task.pool
    rollouts = await sample(
        pool,
        8,
        engine=session.engine,
        env=loop.env,
        codec=session.codec,
        limits=limits,
        seed=session.settings.rl.seed,
        step=2 * EVAL_STEP + step,
    )
    hard = stages.still_hard(pool, rollouts)
    if not hard:
        say("every problem was solved eight times of eight; the pool stays as it is")
        return
    (out / "hard.jsonl").write_text("".join(json.dumps(problem._asdict()) + "\n" for problem in hard))
    say(f"{len(pool) - len(hard)} of {len(pool)} problems were solved 8 of 8 and are dropped")
    session.task = session.task.with_problems(hard)
    loop.task = session.task


# -- evaluation -----------------------------------------------------------------------------------------------------------


async def run_eval(
    settings: config.Config, model: Path, *, url: str, tools: bool = True, seed: int = 0
) -> tuple[dict[str, float], list[Trajectory]]:
    """Without injected faults."""
    device = prepare(settings)
    its = build.model(model, settings.model, device)
    tokenizer = build.tokenizer(model)
    engines = build.engines(settings, model, its.state_dict())
    engine = engines[0] if isinstance(engines[0], LocalEngine) else Scheduler(engines, settings.scheduler)
    async with tool_env(settings, url, noise=config.Noise()) as env:
        found = await evaluate(
            build.task(settings).heldout(settings.eval.problems),
            settings.eval,
            engine=engine,
            env=env,
            codec=build.codec(settings, tokenizer),
            seed=seed,
            tools=tools,
        )
    await engine.aclose()
    return found
