"""docs/results/scheduler.md and its plot, from the rows of bench_scheduler.py: python tests/engines/scheduler_page.py ROWS"""

import json
import statistics
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

from grpo_roc import roofline
from grpo_roc.roofline import QWEN3_06B, QWEN3_14B

RESULTS = Path(__file__).parents[2] / "docs" / "results"
Row = dict[str, Any]


def table(head: list[str], rows: list[list[Any]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell) for cell in row) + " |" for row in cells]


def paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 138, break_long_words=False, break_on_hyphens=False)


def spread(values: list[float], digits: int = 0) -> str:
    """The mean, and the values it is of."""
    each = ", ".join(f"{value:,.{digits}f}" for value in values)
    return f"{statistics.fmean(values):,.{digits}f} ({each})" if len(values) > 1 else each


def grouped(rows: list[Row]) -> dict[tuple[int, str], list[Row]]:
    found: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["load"], row["arm"]].append(row)
    return found


def measured(rows: list[Row]) -> list[str]:
    head = ["rollouts", "policy", "wall s", "CPU s of the servers", "preemptions", "idle share", "prefilled tokens"]
    columns = [("wall_s", 0), ("cpu_s", 0), ("preemptions", 0), ("idle", 2), ("prefilled", 0)]
    cells = []
    for (load, arm), runs in grouped(rows).items():
        cells.append([load, f"`{arm}`", *(spread([float(run[name]) for run in runs], digits) for name, digits in columns)])
    return table(head, cells)


def verdicts(rows: list[Row]) -> list[str]:
    """For every load, the fastest policy, and each that is slower, in CPU seconds and wall seconds."""
    found, lines = grouped(rows), []
    for load in sorted({load for load, _ in found}):
        means = {arm: statistics.fmean(run["wall_s"] for run in runs) for (of, arm), runs in found.items() if of == load}
        best = min(means, key=lambda arm: means[arm])
        others = ", ".join(f"`{arm}` {means[arm] / means[best]:.2f}" for arm in means if arm != best)
        lines.append(f"- {load} rollouts: `{best}` was the fastest. Wall time of the others beside it: {others}.")
    return lines


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6))
    found = grouped(rows)
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    for axis, (name, title) in zip(
        axes, {"wall_s": "wall time, s", "preemptions": "preemptions", "idle": "idle share"}.items(), strict=True
    ):
        for arm in arms:
            loads = sorted(load for load, of in found if of == arm)
            axis.plot(loads, [statistics.fmean(run[name] for run in found[load, arm]) for load in loads], "o-", label=arm)
        axis.set(title=title, xlabel="rollouts", ylim=(0, None))
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def computed() -> list[str]:
    capacity = roofline.kv_capacity(QWEN3_14B)
    lines = [
        "## Computed: an MI300X",
        "",
        paragraph(f"""`grpo_roc/roofline.py` computes this from the model's shape and from AMD's data sheet (192
            GB, 5.3 TB/s, 1,307
            TFLOPS in bf16). It assumes {roofline.BANDWIDTH_SHARE:.0%} of the bandwidth,
            {roofline.FLOPS_SHARE:.0%} of the FLOPS,
            and that an engine may use 0.9 of the memory. Nothing of it was measured."""),
        "",
        *table(
            ["model", "weights", "KV cache per token", "tokens of KV cache", "prefill of 8,192 tokens"],
            [
                [
                    name,
                    f"{shape.weight_bytes / 1e9:.1f} GB",
                    f"{shape.kv_bytes:,} B",
                    f"{roofline.kv_capacity(shape):,}",
                    f"{roofline.prefill_s(shape, 8192):.2f} s",
                ]
                for name, shape in {"Qwen3-14B": QWEN3_14B, "Qwen3-0.6B": QWEN3_06B}.items()
            ],
        ),
        "",
        "Tokens per second of one engine with Qwen3-14B, by running requests and cached tokens of each; `-` does not fit:",
        "",
    ]
    contexts = (1024, 2048, 4096, 8192, 12288)
    rows = [[batch, *(_speed(batch, context, capacity) for context in contexts)] for batch in (1, 16, 64, 128, 256, 512, 1024)]
    lines += table(["requests", *(f"{context:,} tokens" for context in contexts)], rows)
    told = ", ".join(f"{capacity // context:,} of {context:,}" for context in contexts)
    end = f"""One engine's cache is full with this many rollouts of this average length: {told} tokens.
        `rocm_8gpu` makes 32 rollouts for each of 128 prompts on four engines: 1,024 per engine. The cache holds all of them
        only while the rollouts in progress have at most {capacity // 1024:,} tokens on average. With responses of thousands of
        tokens, the KV cache is the limit at this load: about {capacity // 4096:,} rollouts of 4,096 tokens run at a time.
        Recomputing a preempted rollout of 8,192 tokens takes
        {roofline.prefill_s(QWEN3_14B, 8192):.2f} s. In this time the engine would have generated about
        {roofline.prefill_s(QWEN3_14B, 8192) * roofline.decode_tokens_per_s(QWEN3_14B, 64, 8192):,.0f} tokens."""
    return [*lines, "", paragraph(end)]


def _speed(batch: int, context: int, capacity: int) -> str:
    return f"{roofline.decode_tokens_per_s(QWEN3_14B, batch, context):,.0f}" if batch * context <= capacity else "-"


def page(rows: list[Row]) -> str:
    lines = [
        "# The scheduler's policies",
        "",
        "The first part is for measurements on small real servers. The second is computed, for a GPU that was not there.",
        "",
        "## Measured: two vLLM servers with small caches",
        "",
    ]
    if rows:
        setup = """`make bench-scheduler`: vLLM 0.32 for CPUs, SmolLM2-135M in bf16, two servers with 2,048 tokens
            of KV cache each, on
            two cores. Prompts of 160 tokens, eight rollouts each; one to four turns with tool calls of 0.1 to 1 s
            between them. The
            longest response has 256 tokens. Means over seeds, and each seed. *Idle*: share of the time in which
            an engine had no
            request. *Prefilled*: tokens that were not in the prefix cache when a turn began."""
        picture = "![wall time, preemptions and idle share by number of rollouts](scheduler.png)"
        lines += [paragraph(setup), "", *measured(rows), "", picture, "", *verdicts(rows)]
    else:
        lines += ["Not measured yet: no figure here. `make bench-scheduler` measures it and writes this part."]
    return "\n".join([*lines, "", *computed(), ""])


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()] if len(sys.argv) > 1 else []
    if rows:
        plot(rows, RESULTS / "scheduler.png")
    (RESULTS / "scheduler.md").write_text(page(rows))


if __name__ == "__main__":
    main()
