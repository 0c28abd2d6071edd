"""The curves of a run: panel, and in it metric and label. `plot` draws them as PNG, `view` in the browser."""

PANELS = {
    "reward": {"reward/mean": "all rollouts", "eval/reward": "held-out"},
    "tool errors in correct rollouts": {"err_in_pos": "share of calls"},
    "tokens": {"len/mean": "mean", "len/p95": "95th percentile"},
    "tool calls": {"calls/rollout": "per rollout"},
    "groups": {"groups/mixed": "mixed", "groups/all1": "all correct", "groups/all0": "all wrong"},
    "entropy": {"train/entropy": "nats per token"},
    "engine against trainer": {"mismatch/mean": "mean |Δ log p|", "mismatch/max": "largest", "mismatch/kl": "KL"},
    "seconds": {"time/gen": "generate", "time/tool_wait": "tools", "time/train": "learn", "time/verify": "verify"},
}
LOGARITHMIC = frozenset({"engine against trainer"})
