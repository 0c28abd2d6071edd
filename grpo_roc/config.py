"""The settings of a run: one schema for the toy on a CPU and for a GPU node.

Unknown keys and wrong types are refused with their path. `--set rl.lr=1e-5` changes one value.
"""

import contextlib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, field

Positive = Annotated[int, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
CONFIGS = Path(__file__).parent / "configs"


class ConfigError(Exception):
    """Invalid settings; the message names the key."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Model(Section, frozen=True):
    path: str = ""  # folder with a model and its tokenizer; empty: make a tiny one
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    attn: str = "sdpa"
    grad_ckpt: bool = False  # keep only the layers' inputs, and compute the rest again in the backward pass
    logit_rows: int = 2048  # the most tokens whose logits are in memory at once; 0: all of a micro-batch
    hidden: Positive = 96
    layers: Positive = 3
    heads: Positive = 4
    kv_heads: Positive = 2
    ffn: Positive = 192


class Parallel(Section, frozen=True):
    kind: Literal["none", "ddp", "fsdp2"] = "none"  # torchrun sets the number of ranks


class Engine(Section, frozen=True):
    kind: Literal["local", "vllm", "sglang"] = "local"
    url: str = ""  # `{0..3}` stands for four engines
    max_len: Positive = 512
    capacity: Positive = 1 << 16  # tokens of KV cache (local only; the others report theirs)
    slots: Positive = 512  # requests that run at once (local only)
    prefill_tokens: Positive = 8192  # per step (local only)
    linear: Literal["fp32", "int8"] = "fp32"  # int8: faster, and inexact; set rl.is_cap (local only)
    weights: Literal["files", "nccl", "ipc"] = "files"  # how new ones come (not local); see engines/direct.py
    workers: Positive = 1  # GPUs of one engine, for nccl: tensor times pipeline parallel


class Scheduler(Section, frozen=True):
    mode: Literal["static", "least_inflight", "dynamic"] = "dynamic"
    reserve: Literal["safe", "adaptive"] = "safe"
    util: Annotated[float, Meta(gt=0, le=1)] = 0.95
    colocated: bool = False  # the engines' GPUs are the trainer's: engines sleep during the update
    poll_s: float = 0.5  # between two looks at the engines' load, while rollouts wait for room
    check_s: float = 30.0  # an engine that does not answer two checks in a row is lost until it does
    patience_s: float = 3600.0  # how long rollouts wait while no engine answers


class Noise(Section, frozen=True):
    """Faults injected between the service and the model; (seed, step, rollout, call) decides where."""

    fault_rate: Share = 0.0  # share of calls that are not run; the model reads a transient error and may retry
    corrupt_rate: Share = 0.0  # share of ok results whose numbers are changed


class Chat(Section, frozen=True):
    system: Literal["short", "full"] = "full"
    opening: str = "<reason>"
    observation_chars: Positive = 2000


class Task(Section, frozen=True):
    kind: Literal["arith", "math_jsonl", "reasoning_gym"] = "arith"
    problems: list[str] = field(default_factory=lambda: ["mod"])  # arith: kinds of problems, drawn with equal probability
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)  # reasoning_gym: its data sets and their options
    demonstrated: list[str] = field(default_factory=list)  # reasoning_gym: data sets of demonstrations; empty: all
    pool: int = 0  # not math_jsonl: size of a fixed set of problems; 0: new problems at every step
    rl_file: str = ""
    sft_file: str = ""
    eval_file: str = ""
    eval_files: dict[str, str] = field(default_factory=dict)  # instead of eval_file: a file by benchmark
    val_file: str = ""  # validation; empty: problems of rl_file, which are not trained on
    val_problems: Positive = 256  # at most; and at most a tenth of rl_file
    first_bug: Share = 0.45  # not math_jsonl: share of demonstrations that begin with a bug
    first_guess: Share = 0.13  # not math_jsonl: share that guess the answer
    verify_kind: Literal["math", "exact", "numeric"] = "numeric"


class Sft(Section, frozen=True):
    steps: Positive = 800
    batch: Positive = 32
    micro: Positive = 8
    lr: float = 2e-3
    warmup: int = 50
    final_lr: Share = 0.05
    weight_decay: float = 0.01
    log_every: Positive = 20


class Rl(Section, frozen=True):
    arm: Literal["roc", "uniform", "grpo"] = "roc"
    roc: Literal["inverse", "topk", "uniform"] = "inverse"
    eps: float = 0.05
    error_penalty: Annotated[float, Meta(ge=0, lt=1)] = (
        0.0  # subtracted from the reward, times the share of tool errors; the paper has none
    )
    min_neg: int = 2
    min_pos: int = 2
    prompts: Positive = 8
    group: Positive = 8
    oversample: Positive = 2
    steps: Positive = 70
    lr: float = 2e-4
    warmup: int = 5
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    clip: tuple[float, float] = (0.2, 0.28)
    loss_norm: Literal["batch", "group", "seq"] = "batch"
    std_advantage: bool = True
    updates_per_rollout: Positive = 1
    is_cap: float = 0.0  # cap of importance weights, trainer against engine; 0: off
    temperature: float = 1.0
    turns: Positive = 5
    max_response: Positive = 256
    micro_tokens: Positive = 4096
    packing: bool = False  # several samples in one row, which saves padding
    lockstep: bool = True
    overlap: Literal["none", "one_step_off"] = "none"  # one_step_off: make the next step's rollouts during the update
    eval_every: int = 0
    checkpoint_every: Positive = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.overlap != "none" and not self.is_cap:
            raise ValueError("overlap: rollouts of older weights need importance weights; set rl.is_cap, for example to 2")


class Eval(Section, frozen=True):
    problems: Positive = 1024  # of each benchmark, at most
    samples: Positive = 1
    val_samples: Positive = 1  # of each validation problem
    temperature: float = 1.0
    turns: Positive = 5
    max_response: Positive = 256


class Stage(Section, frozen=True):
    steps: Positive
    max_response: Positive
    turns: Positive
    min_steps: int = 10
    end: Literal["cap", "plateau", "solved", "eval_drop"] = "cap"
    clip_ratio: tuple[float, float] = (0.08, 0.12)  # plateau: smoothed share of truncated rollouts within this range …
    reward_slope: float = 0.002  # … and rise of the reward per step, over ten steps, below this
    solved_share: float = 0.7  # solved: share of groups with only correct rollouts above this
    filter_8of8: bool = False  # drop problems that the policy solves in 8 of 8 rollouts
    reset_optimizer: bool = False
    eval_every: int = 0
    eval_drop_se: float = 3.5  # eval_drop: standard errors of the paired difference


class Service(Section, frozen=True):
    url: str = ""  # empty: the run starts a service of its own
    timeout_s: float = 4.0
    memory_mb: int = 256
    deadline_s: float = 60.0
    patience_s: float = 900.0  # how long a call is retried while the service is unavailable
    concurrency: Positive = 2048


class Record(Section, frozen=True):
    """How many rollouts `rollouts/` in the run's folder has, for `python -m grpo_roc view`."""

    step_mb: Annotated[float, Meta(ge=0)] = 16.0  # of one step: whole groups, until they are as large; 0: none
    total_mb: Annotated[float, Meta(ge=0)] = 512.0  # of all steps: beyond it, steps in between are removed


class Config(Section, frozen=True):
    name: str = "run"
    model: Model = Model()
    parallel: Parallel = Parallel()
    engines: list[Engine] = field(default_factory=lambda: [Engine()])
    scheduler: Scheduler = Scheduler()
    chat: Chat = Chat()
    task: Task = Task()
    sft: Sft = Sft()
    rl: Rl = Rl()
    eval: Eval = Eval()
    stages: list[Stage] = field(default_factory=list)
    noise: Noise = Noise()
    service: Service = Service()
    record: Record = Record()
    threads: int = 0  # torch's threads on a CPU; 0: torch's default

    def __post_init__(self) -> None:
        if self.scheduler.colocated and self.rl.overlap != "none":
            raise ValueError(
                "scheduler.colocated: engines that sleep during the update make no rollouts meanwhile; set rl.overlap=none"
            )

    @property
    def max_len(self) -> int:
        return max(engine.max_len for engine in self.engines)


def load(path: str | Path | None, changes: list[str] | None = None) -> Config:
    """Read a file (a path, or a name in `configs/`) and apply `a.b=c` changes."""
    tree: dict[str, Any] = {}
    if path is not None:
        tree = yaml.safe_load(_find(path).read_text()) or {}
    for change in changes or []:
        _put(tree, change)
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path or 'settings'}: {error}") from error


def _find(path: str | Path) -> Path:
    for candidate in (Path(path), CONFIGS / path, CONFIGS / f"{path}.yaml"):
        if candidate.is_file():
            return candidate
    known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
    raise ConfigError(f"config {path} not found; built-in configs: {known}")


def _put(tree: dict[str, Any], change: str) -> None:
    name, equals, value = change.partition("=")
    if not equals:
        raise ConfigError(f"--set takes a.b=value, not {change!r}")
    *parents, last = name.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = yaml.safe_load(value)
    if isinstance(tree[last], str):
        with contextlib.suppress(ValueError):
            tree[last] = float(value)  # YAML 1.1 reads 1e-5 as a string


def as_dict(config: Config) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(config)
    return tree


def with_rl(config: Config, **changes: Any) -> Config:
    return msgspec.structs.replace(config, rl=msgspec.structs.replace(config.rl, **changes))
