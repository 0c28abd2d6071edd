#!/bin/sh
# Qwen3-14B on 8 x MI300X: rollout servers on GPUs 0-3, the trainer on 4-7, three stages. Not tested on such a machine.
# Needs: models/Qwen3-14B-sft (SFT of this size needs another framework: docs/rocm.md), the files of DAPO, AIME and MATH-500
# named below, and a service on port 8080 on other cores (docs/rocm.md).
set -eu
out=${1:-runs/rocm_8gpu}
model=${MODEL:-models/Qwen3-14B-sft}

# 1. Data. Each benchmark keeps a file of its own.
python -m grpo_roc prepare dapo "${DAPO:-downloads/dapo-math-17k.parquet}" --out data/dapo.jsonl
python -m grpo_roc prepare aime24 "${AIME24:-downloads/aime24.jsonl}" --out data/aime24.jsonl
python -m grpo_roc prepare aime25 "${AIME25:-downloads/aime25.jsonl}" --out data/aime25.jsonl
python -m grpo_roc prepare math500 "${MATH500:-downloads/math500.jsonl}" --out data/math500.jsonl

# 2. Four rollout servers.
servers=
trap 'kill $servers' EXIT
for i in 0 1 2 3; do
    HIP_VISIBLE_DEVICES=$i VLLM_SERVER_DEV_MODE=1 VLLM_ROCM_USE_AITER=1 \
        vllm serve "$model" --port 3000$i --enable-scale-out --max-model-len 32768 &
    servers="$servers $!"
done
for i in 0 1 2 3; do
    until curl -sf http://127.0.0.1:3000$i/health; do sleep 2; done
done

# 3. Check everything once, then train in stages.
export HIP_VISIBLE_DEVICES=4,5,6,7
python -m grpo_roc doctor --gpu --config rocm_8gpu
torchrun --nproc_per_node 4 -m grpo_roc stages --config rocm_8gpu --model "$model" --out "$out"

# 4. Every benchmark.
python -m grpo_roc eval --config rocm_8gpu --model "$out/model" --json "$out/eval.json"
