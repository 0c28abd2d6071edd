"""A rehearsal of the GPU node on CPUs: `make rehearsal`.

Two vLLM servers, two FSDP2 ranks under torchrun, a real service, and the three stages of `rocm_8gpu.yaml` with its settings:
only sizes, addresses and data differ (`overrides`). Meanwhile an engine is killed and started again, a rank is killed, and the
run is resumed. Prints a table of what was checked; exits with 1 if anything is wrong.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from common import wait_until
from engine_harness import SEEDED, TOY, Vllm
from service_harness import serving
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from grpo_roc import config, doctor, metrics
from grpo_roc.engines.weights import SHARED
from grpo_roc.model import make_tiny
from grpo_roc.sft import run_sft
from grpo_roc.tasks import make_task

ROOT = Path(__file__).parents[2]
PATIENCE_S = 3600
STEPS = 3  # of each stage
RANKS = 2
LR = 1e-4
# (max_response, turns) of the stages; the file has 8192, 12288 and 12288 tokens.
LIMITS = [(160, 3), (240, 4), (300, 5)]

Check = tuple[str, str, bool]  # what was checked, what was found, and whether it is right
Row = dict[str, Any]


def overrides(data: Path, engines: list[str], service: str) -> list[str]:
    """Everything in which the rehearsal differs from `rocm_8gpu.yaml`."""
    served = ", ".join(f"{{kind: vllm, url: '{url}', max_len: 1024}}" for url in engines)
    benchmarks = ", ".join(f"{name}: {data}/{name}.jsonl" for name in ("aime24", "aime25", "math500"))
    return [
        "name=rehearsal",
        "threads=1",
        "model.path=" + str(data / "model"),
        f"engines=[{served}]",
        "scheduler.check_s=2",
        "scheduler.patience_s=600",
        "chat.system=short",
        f"chat.observation_chars={TOY.chat.observation_chars}",
        f"task.rl_file={data}/dapo.jsonl",
        f"task.eval_files={{{benchmarks}}}",
        "task.val_problems=4",
        "rl.prompts=2",
        "rl.group=4",
        f"rl.lr={LR}",
        "rl.warmup=1",
        "rl.micro_tokens=1024",
        "rl.checkpoint_every=1",
        "eval={problems: 2, samples: 2, val_samples: 2, temperature: 0.6, turns: 3, max_response: 240}",
        f"service.url={service}",
        "service.memory_mb=64",
        "service.concurrency=64",
    ]


def derive(data: Path, engines: list[str], service: str) -> config.Config:
    base = config.load("rocm_8gpu", overrides(data, engines, service))
    tree = config.as_dict(base)
    for stage, (response, turns) in zip(tree["stages"], LIMITS, strict=True):
        stage |= {"steps": STEPS, "min_steps": 1, "max_response": response, "turns": turns}
        stage["eval_every"] = 2 if stage["eval_every"] else 0
    (data / "settings.yaml").write_text(yaml.safe_dump(tree))
    return config.load(data / "settings.yaml")


def write_data(data: Path) -> None:
    """A model that knows the format, and problems in the files that the settings name."""
    make_tiny(TOY, data / "tiny")
    run_sft(TOY, data / "tiny", data / "sft")
    (data / "sft" / "model").rename(data / "model")
    task = make_task(TOY)
    split = {"dapo": task.batch(0, 0, 24), "aime24": task.benchmarks(6)["heldout"], "aime25": task.validation()[:6]}
    split["math500"] = task.benchmarks(12)["heldout"][6:]
    for name, problems in split.items():
        rows = [{"id": f"{name}/{n}", "problem": one.text, "answer": one.answer} for n, one in enumerate(problems)]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


class Trainer:
    """`torchrun … grpo_roc stages`, as docs/rocm.md starts it."""

    def __init__(self, data: Path, out: Path) -> None:
        self.out, self._log = out, data / "trainer.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
        command += ["-m", "grpo_roc", "stages", "--config", str(data / "settings.yaml"), "--out", str(out)]
        variables = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "PYTHONPATH": str(ROOT)}
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log, start_new_session=True)

    def rows(self) -> list[Row]:
        return metrics.read(self.out)

    def wait_for(self, stage: int, count: int) -> None:
        """Until so many steps of the stage are done."""
        self.wait_until(lambda: self._steps(stage) >= count, f"stage {stage}")

    def wait_until(self, true: Callable[[], bool], what: str) -> None:
        wait_until(lambda: true() or self.process.poll() is not None, what, PATIENCE_S)
        assert self.process.poll() is None, self._log.read_text()[-5000:]

    def _steps(self, stage: int) -> int:
        return sum(row["stage"] == stage for row in self.rows())

    def rank(self, number: int) -> int:
        """The pid of a rank."""
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if f"RANK={number}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return int(child)
        raise RuntimeError(f"rank {number} not found")

    def end(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


def rehearse(data: Path, engines: list[Vllm]) -> list[Check]:
    """Kill an engine, start it again, kill a rank, resume."""
    out, killed, resumed = data / "out", data / "killed", data / "resumed"
    first = Trainer(data, out)
    try:
        first.wait_for(1, 1)
        time.sleep(1)  # it generates
        engines[0].kill()
        first.wait_for(1, 2)
        engines[0].start()
        first.wait_for(2, 1)
        main = first.rank(0)
        os.kill(first.rank(1), signal.SIGKILL)
    finally:
        ended = first.end()
    for left in SHARED.glob(f"grpo-roc-{main}-*"):  # its last weights
        shutil.rmtree(left, ignore_errors=True)
    before = first.rows()
    print(f"a rank was killed after {len(before)} steps", flush=True)
    copy_checkpoint(out, killed)
    engines[0].wait()
    second = Trainer(data, out)
    try:
        second.wait_until(lambda: step_of(out) > step_of(killed), "a checkpoint after the resume")
        copy_checkpoint(out, resumed)
        print(f"resumed at step {step_of(killed)}; step {step_of(resumed) - 1} is done", flush=True)
    finally:
        code = second.end()
    labels = [engine.label() for engine in engines]
    print((out / "stages.md").read_text())
    return [
        ("the run ended when a rank was killed", f"exit code {ended}", ended != 0),
        ("the resumed run ended well", f"exit code {code}", code == 0),
        *check_resume(killed, resumed, before, second.rows()),
        *check_run(out, second.rows(), labels),
    ]


def copy_checkpoint(out: Path, to: Path) -> None:
    """A run may replace it meanwhile."""

    def copied() -> bool:
        shutil.rmtree(to, ignore_errors=True)
        with contextlib.suppress(OSError):  # also shutil.Error
            shutil.copytree(out / "latest", to)
            return True
        return False

    wait_until(copied, "a whole checkpoint", 60)


def state_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return found


def step_of(folder: Path) -> int:
    folder = folder / "latest" if (folder / "latest").exists() else folder
    with contextlib.suppress(OSError):  # it is being replaced
        return int(state_of(folder)["step"])
    return 0


def read_shards(folder: Path) -> dict[str, Any]:
    """What all ranks wrote."""
    with tempfile.TemporaryDirectory() as whole:
        dcp_to_torch_save(folder, f"{whole}/found.pt")
        found: dict[str, Any] = torch.load(f"{whole}/found.pt", weights_only=True)
    return found


def updates_of(checkpoint: Path) -> int:
    """How many updates its optimizer has made."""
    return max(int(one["step"]) for one in read_shards(checkpoint / "optimizer_shards")["state"].values())


def check_resume(killed: Path, resumed: Path, before: list[Row], rows: list[Row]) -> list[Check]:
    """`killed` and `resumed`: the checkpoint that the run resumed from, and the next one."""
    began, next_ = step_of(killed), step_of(resumed)
    old, new = updates_of(killed), updates_of(resumed)
    trained = sum("train/tokens" in row for row in rows[began:next_])
    weights = [read_shards(folder / "shards") for folder in (killed, resumed)]
    moved = max(float((weights[1][name] - one).abs().max()) for name, one in weights[0].items())
    return [
        (
            "steps were made after the resume, and those before it were kept",
            f"{began} kept, {len(rows) - began} made, at step {began} of stage {state_of(killed)['stage'] + 1}",
            0 < began < len(rows) and rows[:began] == before[:began] and not [row for row in rows[began:] if row in before],
        ),
        ("its optimizer is the checkpoint's", f"{old} updates, then {new}", 0 < old < new == old + trained),
        # An update moves a weight by about the learning rate at most; from the first model it would be more.
        ("its weights are the checkpoint's", f"moved by {moved:.1e}, learning rate {LR}", 0 < moved < 1.5 * LR * (new - old)),
    ]


def check_run(out: Path, rows: list[Row], labels: list[str]) -> list[Check]:
    steps = [int(row["step"]) for row in rows]
    finished = state_of(out / "latest")["history"]["stages"]
    trained = [row for row in rows if "train/tokens" in row]
    return [
        ("every stage ended", ", ".join(f"{one['stage']}: {one['by']}" for one in finished), len(finished) == 3),
        ("every step was done once, in order", f"{len(steps)} steps", steps == list(range(len(steps)))),
        ("no rollout lost its reward", f"{sum(row['infra'] for row in rows):.0f} lost", not any(row["infra"] for row in rows)),
        ("tools were called", f"{sum(row['calls'] for row in rows):.0f} calls", all(row["calls"] > 0 for row in rows)),
        (
            "both engines have the last weights",
            " ".join(labels),
            len(set(labels)) == 1 and labels[0].startswith(f"{len(steps)}-"),
        ),
        (
            "engine and trainer agree",
            f"mean |Δ log p| {max((row['mismatch/mean'] for row in trained), default=9):.4f} at most, {len(trained)} updates",
            bool(trained) and all(row["mismatch/mean"] < 0.1 for row in trained),
        ),
        ("the best policy was kept by validation", str((out / "best").exists()), (out / "best" / "model.safetensors").exists()),
    ]


def main() -> int:
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, serving() as service:
        data = Path(folder)
        write_data(data)
        print(f"model and data after {time.monotonic() - began:.0f} s", flush=True)
        one, two = (
            Vllm(data / "model", make_folder(data / name), "--dtype", "bfloat16", *SEEDED, nice=0) for name in ("one", "two")
        )
        with one, two:
            for engine in (one, two):
                engine.wait()
            print(f"engines ready after {time.monotonic() - began:.0f} s", flush=True)
            settings = derive(data, [one.url, two.url], service.url)
            try:
                failed = doctor.run(settings, need_gpu=False, full=True, ranks=RANKS)
                found = [("doctor finds nothing wrong", f"exit code {failed}", failed == 0), *rehearse(data, [one, two])]
            except BaseException:
                if (log := data / "trainer.log").exists():
                    print(log.read_text()[-8000:])
                raise
    print("\n".join(metrics.table(["checked", "found", ""], [[*one[:2], "ok" if one[2] else "**FAIL**"] for one in found], 3)))
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if all(right for *_, right in found) else 1


if __name__ == "__main__":
    sys.exit(main())
