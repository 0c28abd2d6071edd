# The trainer on AMD GPUs: ROCm's torch, the client, the trainer. No service inside; see docs/rocm.md. Not tested on a GPU.
#   docker build -f deploy/trainer-rocm.Dockerfile -t grpo-roc-rocm .
FROM rocm/pytorch:rocm7.2.1_ubuntu24.04_py3.12_pytorch_release_2.9.1

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /app

# torch is the image's own: the extra would pull another build over it.
RUN pip install --no-cache-dir \
    "httpx==0.28.1" \
    "matplotlib==3.11.2" \
    "msgspec==0.22.0" \
    "pyyaml==6.0.3" \
    "safetensors==0.8.0" \
    "tensorboard==2.21.0" \
    "tqdm==4.70.1" \
    "transformers==5.22.2"

COPY exec_wire exec_wire
COPY exec_client exec_client
COPY grpo_roc grpo_roc

ENV PYTHONPATH=/app \
    HF_HUB_OFFLINE=1 \
    HSA_NO_SCRATCH_RECLAIM=1 \
    NCCL_MIN_NCHANNELS=112

CMD ["python", "-m", "grpo_roc", "doctor", "--gpu", "--config", "rocm_8gpu"]
