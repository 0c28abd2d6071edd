#!/bin/sh
# The method on two CPU cores: a model of 0.4 M parameters from scratch. Minutes. `make train-demo` does the same, with a report.
set -eu
out=${1:-runs/cpu_tiny}

# 1. A model that knows the format and the tool. The run starts a service of its own.
python -m grpo_roc sft --config cpu_tiny --out "$out/sft"

# 2. GRPO-RoC. Called again, it resumes.
python -m grpo_roc rl --config cpu_tiny --model "$out/sft/model" --out "$out/rl"

# 3. Held-out problems, with the tool and without it.
python -m grpo_roc eval --config cpu_tiny --model "$out/rl/model"
python -m grpo_roc eval --config cpu_tiny --model "$out/rl/model" --no-tool
python -m grpo_roc plot "$out/rl"
