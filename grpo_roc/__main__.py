"""python -m grpo_roc COMMAND: the command line."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from grpo_roc import config


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        settings = config.load(args.config, args.set) if hasattr(args, "config") else config.Config()
        return int(args.do(args, settings) or 0)
    except (config.ConfigError, FileNotFoundError, RuntimeError, ValueError) as error:
        print(f"grpo_roc: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m grpo_roc", description="GRPO-RoC on top of the execution service.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, do: object, words: str, *, configured: bool = True) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=words, description=words)
        one.set_defaults(do=do)
        if configured:
            one.add_argument("--config", default="tiny_cpu", help="a YAML file, or the name of one in grpo_roc/configs")
            one.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change one setting")
        return one

    one = add("make-tiny", _make_tiny, "a tiny model and tokenizer from scratch")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--seed", type=int, default=0)
    one = add("sft", _sft, "supervised start from demonstrations")
    one.add_argument("--model", type=Path, help="default: a tiny one is made")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--seed", type=int, default=0)
    one = add("rl", _rl, "GRPO-RoC; goes on where --out stopped")
    one.add_argument("--model", type=Path, help="the SFT model; default: model.path of the settings")
    one.add_argument("--out", type=Path, required=True)
    one = add("stages", _stages, "the stages of the settings, each until its trigger")
    one.add_argument("--model", type=Path)
    one.add_argument("--out", type=Path, required=True)
    one = add("eval", _eval, "held-out problems")
    one.add_argument("--model", type=Path, required=True)
    one.add_argument("--no-tool", action="store_true")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--trajectories", type=Path, help="write them to this JSONL file, as `entropy` reads it")
    one = add("demo", _demo, "SFT, RL, evaluation and a report, on a CPU")
    one.add_argument("--out", type=Path, default=Path("runs/demo"))
    one.add_argument("--seed", type=int, default=0)
    one = add("ab", _ab, "arms against each other: same start, seeds, number of updates")
    one.add_argument("--out", type=Path, default=Path("runs/ab"))
    one.add_argument("--model", type=Path, help="the SFT model; default: made in --out")
    one.add_argument("--arms", nargs="+", default=["grpo", "uniform", "roc"])
    one.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    one = add("scheduler", _scheduler, "static, least_inflight and dynamic on the same rollouts")
    one.add_argument("--out", type=Path, default=None)
    one.add_argument("--rollouts", type=int, default=192)
    one = add("plot", _plot, "PNGs of a run's metrics", configured=False)
    one.add_argument("run", type=Path)
    one = add("entropy", _entropy, "where the high-entropy tokens are: forking and reflection", configured=False)
    one.add_argument("trajectories", type=Path)
    one.add_argument("--out", type=Path, default=None, help="folder for entropy.md and entropy.html")
    one.add_argument("--count", type=int, default=64)
    one = add("doctor", _doctor, "device, engine and service in one round trip")
    one.add_argument("--gpu", action="store_true", help="fail without a GPU")
    return parser


def _make_tiny(args: argparse.Namespace, settings: config.Config) -> None:
    from grpo_roc import runs

    print(f"{args.out}: {runs.make_tiny(settings, args.out, args.seed):,} parameters")


def _sft(args: argparse.Namespace, settings: config.Config) -> None:
    from grpo_roc import runs

    start = args.model or (Path(settings.model.path) if settings.model.path else None)
    if start is None:
        start = args.out / "tiny"
        runs.make_tiny(settings, start, args.seed)
    print(runs.run_sft(settings, start, args.out, seed=args.seed))


def _start(args: argparse.Namespace, settings: config.Config) -> Path:
    start = args.model or Path(settings.model.path)
    if not (start / "config.json").is_file() and not settings.model.path:
        raise config.ConfigError(f"--model: there is no model in {start}; `python -m grpo_roc sft` makes one")
    return Path(start)


def _rl(args: argparse.Namespace, settings: config.Config) -> None:
    from grpo_roc import runs

    print(asyncio.run(runs.run_rl(settings, _start(args, settings), args.out)))


def _stages(args: argparse.Namespace, settings: config.Config) -> None:
    from grpo_roc import runs, stages

    print(stages.table(asyncio.run(runs.run_stages(settings, _start(args, settings), args.out))))


def _eval(args: argparse.Namespace, settings: config.Config) -> None:
    from grpo_roc import build, runs
    from grpo_roc.env import service_url
    from grpo_roc.experiments import entropy

    with service_url(settings.service) as url:
        found, rollouts = asyncio.run(runs.run_eval(settings, args.model, url=url, tools=not args.no_tool, seed=args.seed))
    print(json.dumps(found, indent=1))
    if args.trajectories:
        codec = build.codec(settings, build.tokenizer(args.model))
        entropy.write(args.trajectories, rollouts, codec)


def _demo(args: argparse.Namespace, settings: config.Config) -> int:
    from grpo_roc.experiments import demo

    return 0 if asyncio.run(demo.run(settings, args.out, seed=args.seed)) else 1


def _ab(args: argparse.Namespace, settings: config.Config) -> None:
    from grpo_roc.experiments import ab

    print(asyncio.run(ab.run(settings, args.out, args.model, args.arms, args.seeds)))


def _scheduler(args: argparse.Namespace, settings: config.Config) -> None:
    from grpo_roc.experiments import scheduler_bench

    print(scheduler_bench.run(settings, args.out, args.rollouts))


def _plot(args: argparse.Namespace, settings: config.Config) -> None:
    from grpo_roc.experiments import plots

    for path in plots.of_run(args.run):
        print(path)


def _entropy(args: argparse.Namespace, settings: config.Config) -> None:
    from grpo_roc.experiments import entropy

    print(entropy.report(args.trajectories, args.out, args.count))


def _doctor(args: argparse.Namespace, settings: config.Config) -> int:
    from grpo_roc import doctor

    return doctor.run(settings, need_gpu=args.gpu)


if __name__ == "__main__":
    sys.exit(main())
