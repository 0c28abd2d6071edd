"""python -m grpo_roc COMMAND: the command line."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_roc import config, prepare
from grpo_roc.view import server


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        settings = config.load(args.config, args.set) if "config" in args else config.Config()
        return _run(args, settings)
    except (config.ConfigError, FileNotFoundError, RuntimeError, ValueError) as error:
        print(f"grpo_roc: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m grpo_roc", description="GRPO-RoC on top of the execution service.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def add(name: str, text: str, *, configured: bool = True, out: str | None = None, seed: bool = False) -> Any:
        one = commands.add_parser(name, help=text, description=text)
        if configured:
            one.add_argument("--config", default="cpu_tiny", help="a YAML file, or the name of one in grpo_roc/configs")
            one.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change one setting")
        if out is not None:
            one.add_argument("--out", type=Path, default=Path(out) if out else None, required=not out)
        if seed:
            one.add_argument("--seed", type=int, default=0)
        return one

    add("make-tiny", "make a tiny model and tokenizer from scratch", out="", seed=True)
    one = add("sft", "train on demonstrations", out="", seed=True)
    one.add_argument("--model", type=Path, help="default: a new tiny model")
    for name, text in {"rl": "train with GRPO-RoC", "stages": "train in stages, each until its trigger"}.items():
        one = add(name, f"{text}; resumes from --out", out="")
        one.add_argument("--model", type=Path, help="the SFT model; default: model.path of the settings")
    one = add("eval", "evaluate a model on every benchmark: mean@k and its standard error", seed=True)
    one.add_argument("--model", type=Path, required=True)
    one.add_argument("--no-tool", action="store_true", help="answer every tool call with an error")
    one.add_argument("--json", type=Path, help="write the results to this file too")
    one.add_argument("--trajectories", type=Path, help="write the rollouts to this JSONL file, for `entropy`")
    _add_experiments(add)
    one = add("plot", "plot a run's metrics as PNG", configured=False)
    one.add_argument("run", type=Path)
    one = add("view", "show a run's curves and rollouts in the browser, also while it goes on", configured=False)
    one.add_argument("run", type=Path)
    one.add_argument("--port", type=int, default=8090, help="on 127.0.0.1; 0: any free one")
    one = add("entropy", "find high-entropy tokens: forking and reflection", configured=False)
    one.add_argument("trajectories", type=Path)
    one.add_argument("--out", type=Path, help="folder for entropy.md and entropy.html")
    one.add_argument("--count", type=int, default=64)
    one = add("prepare", "make a problem file from files of a published data set", configured=False, out="")
    one.add_argument("kind", choices=sorted(prepare.KINDS))
    one.add_argument("files", nargs="+", type=Path, help="parquet (needs pyarrow), JSON or JSONL")
    one = add("doctor", "check device, memory, engines and service")
    one.add_argument("--full", action="store_true", help="also engines against the trainer, collectives, speed and memory")
    one.add_argument("--gpu", action="store_true", help="--full, and fail without a GPU")
    one.add_argument("--model", type=Path, help="default: model.path of the settings, or a tiny model")
    one.add_argument("--ranks", type=int, help="ranks of the run to come; default: one per GPU")
    one.add_argument("--report", type=Path, help="write a Markdown report; default with --full: doctor.md")
    return parser


def _add_experiments(add: Callable[..., Any]) -> None:
    add("demo", "SFT, RL, evaluation and a report, on a CPU", out="runs/demo", seed=True)
    one = add("reasoning", "SFT and RL of a pretrained model on reasoning-gym, and a report; resumes", out="runs/reasoning")
    one.add_argument("--model", type=Path, help="default: model.path of the settings")
    one = add("ab", "compare arms with the same start, seeds and number of updates", out="runs/ab")
    one.add_argument("--model", type=Path, help="the SFT model; default: made in --out")
    one.add_argument("--arms", nargs="+", default=["grpo", "uniform", "roc"])
    one.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    one = add("ablation", "compare ways to select and to penalise, at three levels of noise; resumes", out="runs/ablation")
    one.add_argument("--model", type=Path, help="the SFT model; default: made in --out")
    one.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    one.add_argument("--page", type=Path, help="the Markdown page, with a plot beside it; default: ablation.md in --out")


def _run(args: argparse.Namespace, settings: config.Config) -> int:
    if args.command == "prepare":
        print(f"{args.out}: {prepare.prepare(args.kind, args.files, args.out)}")
        return 0
    if args.command == "view":
        server.serve(args.run, args.port)
        return 0
    # Imported here because torch takes seconds to import.
    from grpo_roc import doctor, model, runs, sft, stages

    match args.command:
        case "make-tiny":
            print(f"{args.out}: {model.make_tiny(settings, args.out, args.seed):,} parameters")
        case "sft":
            start = args.model or (Path(settings.model.path) if settings.model.path else None)
            if start is None:
                if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                    raise config.ConfigError("--model: several ranks cannot make one; use `python -m grpo_roc make-tiny`")
                start = args.out / "tiny"
                model.make_tiny(settings, start, args.seed)
            print(sft.run_sft(settings, start, args.out, seed=args.seed))
        case "rl":
            print(asyncio.run(runs.run_rl(settings, _start(args, settings), args.out)))
        case "stages":
            print(stages.table(asyncio.run(stages.run_stages(settings, _start(args, settings), args.out))))
        case "doctor":
            full = args.full or args.gpu
            report = args.report or (Path("doctor.md") if full else None)
            return doctor.run(settings, need_gpu=args.gpu, full=full, model=args.model, ranks=args.ranks, report=report)
        case _:
            return _run_experiment(args, settings)
    return 0


def _start(args: argparse.Namespace, settings: config.Config) -> Path:
    start = args.model or Path(settings.model.path)
    if not (start / "config.json").is_file() and not settings.model.path:
        raise config.ConfigError(f"--model: no model in {start}; make one with `python -m grpo_roc sft`")
    return Path(start)


def _run_experiment(args: argparse.Namespace, settings: config.Config) -> int:
    from grpo_roc.env import service_url
    from grpo_roc.evaluate import run_eval
    from grpo_roc.experiments import ab, ablation, demo, entropy, plots, reasoning

    match args.command:
        case "eval":
            with service_url(settings.service) as url:
                tools = not args.no_tool
                found = asyncio.run(run_eval(settings, args.model, url=url, tools=tools, seed=args.seed))
            print(found.table())
            if args.json:
                args.json.write_text(json.dumps(found.as_dict(), indent=1))
            if args.trajectories:
                entropy.write(args.trajectories, found.rollouts, settings, args.model)
        case "reasoning":
            print(reasoning.run(settings, _start(args, settings), args.out))
        case "demo":
            return 0 if asyncio.run(demo.run(settings, args.out, seed=args.seed)) else 1
        case "ab":
            print(asyncio.run(ab.run(settings, args.out, args.model, args.arms, args.seeds)))
        case "ablation":
            print(asyncio.run(ablation.run(settings, args.out, args.model, args.seeds, args.page)))
        case "plot":
            print(plots.of_run(args.run))
        case "entropy":
            print(entropy.report(args.trajectories, args.out, args.count))
    return 0


if __name__ == "__main__":
    sys.exit(main())
