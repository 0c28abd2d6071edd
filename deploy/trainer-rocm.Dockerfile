# The trainer on AMD GPUs, in vLLM's own image: ROCm's torch and the rollout engine, with the client and the trainer. No service
# inside; see docs/rocm.md. Not built and not tested on a GPU.
#   docker build -f deploy/trainer-rocm.Dockerfile -t grpo-roc-rocm .
FROM vllm/vllm-openai-rocm:v0.32.0

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /app

# torch, transformers, safetensors, httpx and msgspec are the image's own, as vLLM needs them.
RUN pip install --no-cache-dir \
    "matplotlib==3.11.2" \
    "pyyaml==6.0.3" \
    "tensorboard==2.21.0" \
    "tqdm==4.70.1" \
    && python -c "import httpx, msgspec, safetensors, torch, transformers, vllm; assert torch.version.hip"

COPY exec_wire exec_wire
COPY exec_client exec_client
COPY grpo_roc grpo_roc

ENV PYTHONPATH=/app \
    HF_HUB_OFFLINE=1 \
    HSA_NO_SCRATCH_RECLAIM=1 \
    NCCL_MIN_NCHANNELS=112

ENTRYPOINT []
CMD ["python", "-m", "grpo_roc", "doctor", "--gpu", "--config", "rocm_8gpu"]
