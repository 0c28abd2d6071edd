"""A reference GRPO-RoC trainer on top of the execution service.

Read in this order: `config`, `chat`, `rollout`, `roc`, `loss`, `grpo`. The same code runs a toy on two CPU cores and, through
`engines/vllm.py` or `engines/sglang.py`, a real model on GPUs. Left out on purpose: KL and entropy terms, reward models,
tensor parallel training, images.
"""
