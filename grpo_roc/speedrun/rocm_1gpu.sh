#!/bin/sh
# Qwen3-0.6B on one MI300X: the rollout server and the trainer share the GPU. Not tested on such a machine.
# Needs: models/Qwen3-0.6B-Base, data/sft.jsonl, the files of DAPO and AIME named below, and a service on port 8080 (make run).
set -eu
out=${1:-runs/rocm_1gpu}

# 1. Data. Each benchmark keeps a file of its own.
python -m grpo_roc prepare dapo "${DAPO:-downloads/dapo-math-17k.parquet}" --out data/dapo.jsonl
python -m grpo_roc prepare aime24 "${AIME24:-downloads/aime24.jsonl}" --out data/aime24.jsonl
python -m grpo_roc prepare aime25 "${AIME25:-downloads/aime25.jsonl}" --out data/aime25.jsonl
python -m grpo_roc prepare math500 "${MATH500:-downloads/math500.jsonl}" --out data/math500.jsonl

# 2. The format and the tool.
python -m grpo_roc sft --config rocm_1gpu --model models/Qwen3-0.6B-Base --out "$out/sft"

# 3. The rollout server. It sleeps during updates, and leaves room for the trainer's weights and optimizer.
VLLM_SERVER_DEV_MODE=1 VLLM_ROCM_USE_AITER=1 \
    vllm serve "$out/sft/model" --port 30000 --enable-scale-out --enable-sleep-mode --gpu-memory-utilization 0.8 --max-model-len 6144 &
trap 'kill $!' EXIT
until curl -sf http://127.0.0.1:30000/health; do sleep 2; done

# 4. Check everything once, then train.
python -m grpo_roc doctor --gpu --config rocm_1gpu
python -m grpo_roc rl --config rocm_1gpu --model "$out/sft/model" --out "$out/rl"

# 5. Every benchmark.
python -m grpo_roc eval --config rocm_1gpu --model "$out/rl/model" --json "$out/eval.json"
