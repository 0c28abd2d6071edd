"""RL runs: open or resume one, train step by step, evaluate now and then, write checkpoints."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tqdm import tqdm

from grpo_roc import checkpoint, config, metrics, sharded
from grpo_roc.distributed import Ranks, use_device
from grpo_roc.engines import make_engine
from grpo_roc.engines.base import Engine
from grpo_roc.engines.weights import Weights
from grpo_roc.env import service_url, tool_env
from grpo_roc.evaluate import Score, evaluate, problem_means, score
from grpo_roc.grpo import Row, push_weights, train_step
from grpo_roc.learner import Learner
from grpo_roc.model import load_tokenizer
from grpo_roc.overlap import Rollouts
from grpo_roc.recorder import Recorder
from grpo_roc.rollout import Actor, Codec, Limits
from grpo_roc.tasks import make_task


async def run_rl(settings: config.Config, start: Path, out: Path, *, eval_problems: int | None = None) -> Path:
    """Train the model in `start`, or resume from `out/latest`; the result is in `out/model`, the best policy in `out/best`.

    `eval_problems`: use only so many validation problems.
    """
    async with open_run(settings, start, out, eval_problems) as run:
        with run.progress(settings.rl.arm, settings.rl.steps, run.state.step) as bar:
            while run.state.step < settings.rl.steps:
                last = run.state.step + 1 == settings.rl.steps
                run.log(await run.step(settings.rl.eval_every, last=last), bar)
                if run.state.step % settings.rl.checkpoint_every == 0:
                    await run.save_latest()
        run.save("model")
    return out / "model"


HABITS = ("err_in_pos", "len/mean", "answers>1", "no_tool")


class Validation(NamedTuple):
    score: Score
    problems: list[float | None]  # mean reward of each
    metrics: dict[str, float]  # of its rollouts

    def row(self) -> Row:
        """`eval/problems` is not logged: stages compare it with that of an earlier validation."""
        habits = {f"eval/{name}": self.metrics[name] for name in HABITS}
        return {"eval/reward": self.score.mean, "eval/se": self.score.error or 0.0, "eval/problems": self.problems} | habits


class Run:
    """An open RL run. Only rank 0 has an engine, an actor and a log."""

    def __init__(self, settings: config.Config, start: Path, out: Path, eval_problems: int | None) -> None:
        self.settings, self.out, self._eval_problems = settings, out, eval_problems
        self.ranks = Ranks(settings.parallel, use_device(settings))
        latest = sharded.find_latest(out, self.ranks)
        source = self._source = latest or start
        self.state = checkpoint.load_state(latest, settings) if latest else checkpoint.State()
        self.tokenizer = load_tokenizer(source)
        self.model: Any = sharded.open_model(source, settings.model, self.ranks)
        self.learner = Learner(self.model, settings.rl, self.ranks, settings.model.logit_rows)
        if latest:
            sharded.load_optimizer(latest, self.model, self.learner.optimizer, self.ranks)
        self._waiting = checkpoint.load_rollouts(latest) if latest and self.ranks.is_main else b""
        self.task = make_task(settings)
        self.engine: Engine | None = None
        self.actor: Actor | None = None
        self.rollouts: Rollouts | None = None
        self._log: metrics.Metrics | None = None
        self._recorder: Recorder | None = None
        if self.ranks.is_main:
            self._log = metrics.Metrics(out, first_step=self.state.step)
            self._recorder = Recorder(out, settings, Codec(self.tokenizer, settings.chat), self.state.step)

    async def open_engine(self) -> None:
        """Engines get the weights of this run, whatever they were started with. Collective: every rank must call it."""
        weights = self.ranks.gather_weights(self.model)
        if self.ranks.is_main:
            self.engine = make_engine(self.settings, self._source, weights, lockstep=self.settings.rl.lockstep)
            await self.engine.update_weights(Weights(weights, self.state.step))

    def open_actor(self, actor: Actor) -> None:
        self.actor, self.rollouts = actor, Rollouts(actor, self.settings.rl)
        self.rollouts.restore(self._waiting)

    async def step(self, eval_every: int, limits: Limits | None = None, *, last: bool = False) -> Row:
        """One training step, and after every `eval_every` steps a validation; the best policy by it is kept in `best`."""
        rl, rollouts, recorder = self.settings.rl, self.rollouts, self._recorder
        row = await train_step(self.state.step, rl, self.task, self.learner, rollouts, limits, last=last, recorder=recorder)
        self.state = self.state._replace(step=self.state.step + 1)
        if eval_every and self.state.step % eval_every == 0:
            found = await self.validate()
            row |= found.row()
            if found.score.mean > self.state.best:
                self.state = self.state._replace(best=found.score.mean)
                self.save("best")
        return row

    async def validate(self) -> "Validation":
        """On the validation problems and never on a benchmark; the same on every rank."""
        if self.settings.rl.overlap != "none":  # the engines have the weights from before the last update
            if self.rollouts is not None:
                await self.rollouts.finish()
            self.ranks.barrier()
            await push_weights(self.learner, self.actor, self.state.step)
        found = None
        if self.actor is not None:
            settings = msgspec.structs.replace(self.settings.eval, samples=self.settings.eval.val_samples)
            problems = self.task.validation()[: self._eval_problems]
            rollouts = (await evaluate(self.actor, {"validation": problems}, settings, seed=self.settings.rl.seed)).rollouts
            found = Validation(score(rollouts), problem_means(rollouts), metrics.of_rollouts(rollouts))
        return self.ranks.broadcast(found)

    async def save_latest(self) -> None:
        """Write the checkpoint from which a run resumes. Collective: every rank must call it."""
        rollouts = await self.rollouts.encode() if self.rollouts is not None else b""
        self._save("latest", self.learner.optimizer, rollouts)

    def save(self, name: str) -> None:
        """Write the model to `out/name`. Collective: every rank must call it."""
        self._save(name, None)

    def _save(self, name: str, optimizer: Any, rollouts: bytes = b"") -> None:
        folder, model, state = self.out / name, self.model, self.state
        sharded.save(folder, self.ranks, model, optimizer, self.tokenizer, state, self.settings, rollouts)

    async def discard_rollouts(self) -> None:
        if self.rollouts is not None:
            await self.rollouts.discard()

    def progress(self, name: str, steps: int, done: int) -> Any:
        return tqdm(total=steps, initial=done, desc=name, disable=not self.ranks.is_main)

    def log(self, row: Row, bar: Any) -> None:
        if self._log is not None:
            self._log.add({name: value for name, value in row.items() if name != "eval/problems"})
            bar.set_postfix_str(metrics.line(row))
            bar.update()

    async def aclose(self) -> None:
        if self._log is not None:
            self._log.close()
        if self.engine is not None:
            await self.engine.aclose()


@contextlib.asynccontextmanager
async def open_run(settings: config.Config, start: Path, out: Path, eval_problems: int | None) -> AsyncIterator[Run]:
    async with contextlib.AsyncExitStack() as stack:
        run = Run(settings, start, out, eval_problems)
        stack.push_async_callback(run.aclose)
        await run.open_engine()
        if run.engine is not None:
            url = stack.enter_context(service_url(settings.service))
            env = await stack.enter_async_context(tool_env(settings, url))
            run.open_actor(Actor(run.engine, env, Codec(run.tokenizer, settings.chat)))
            stack.push_async_callback(run.discard_rollouts)  # they need the environment
        yield run
