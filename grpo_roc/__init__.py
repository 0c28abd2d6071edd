"""A reference GRPO-RoC trainer on top of the execution service.

One training step is `grpo.train_step`; from there read `rollout`, `roc`, `learner` and `loss`, then `runs` for a whole run. The
same code trains a toy on two CPU cores and, through `engines/vllm.py` or `engines/sglang.py`, a real model on GPUs. Not
included: KL and entropy terms, reward models, tensor parallel training, images.
"""
