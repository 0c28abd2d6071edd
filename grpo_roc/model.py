"""Models and tokenizers: load them from a folder, or make tiny ones from scratch, without a download, in the same file layout.

The tiny tokenizer has one token for each tag, constant part of a tool call, number of up to three digits and word of the toy's
texts. It spells everything else in bytes, so it can encode any text.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grpo_roc import chat, config
from grpo_roc.distributed import Device
from grpo_roc.tasks import make_task

PIECES = r"\p{N}{1,3}| ?\p{L}+|\n| +|[^\p{L}\p{N}\s]|\s"
PAD = "<|endoftext|>"
COPY_GAIN = 0.3


def load_tokenizer(folder: str | Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder))


def load_model(folder: str | Path, settings: config.Model, device: Device) -> Any:
    """In fp32, because AdamW's steps are smaller than bf16 resolves. On a GPU, FSDP computes in bf16."""
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation=settings.attn)
    if settings.grad_ckpt:
        checkpoint_layers(model)
    return model.to(device.torch)


def checkpoint_layers(model: Any) -> None:
    """Keep only the layers' inputs. transformers 6 has only the first of the names, its first versions 5 only the second."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


def make_optimizer(model: Any, settings: config.Sft | config.Rl) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay)


def make_tiny(settings: config.Config, out: Path, seed: int = 0) -> int:
    """Write a tiny model and its tokenizer to `out`; returns the number of parameters."""
    tokenizer = make_tokenizer(make_task(settings).texts, settings.max_len)
    model = make_model(settings.model, len(tokenizer), settings.max_len, seed)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def make_tokenizer(texts: Iterable[str], max_len: int) -> PreTrainedTokenizerFast:
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    words = sorted({piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)})
    numbers = [f"{n:0{width}d}" for width in (2, 3) for n in range(10**width)]
    names = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *numbers, *words])
    vocabulary = {name: number for number, name in enumerate(names)}
    # No merges: a piece is one token or spelled in bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, chat.START, chat.END])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*chat.TAGS, *chat.CALL_PARTS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=chat.END,
        pad_token=PAD,
        chat_template=chat.TEMPLATE,
        model_max_length=max_len,
        clean_up_tokenization_spaces=False,
    )


def make_model(shape: config.Model, vocabulary: int, max_len: int, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.hidden // shape.heads,
            max_position_embeddings=max_len,
            tie_word_embeddings=True,
            initializer_range=0.02,
            attn_implementation=shape.attn,
        )
    )
    _prepare_copying(model)
    return model


@torch.no_grad()
def _prepare_copying(model: Qwen3ForCausalLM) -> None:
    """Initialise every head so that it outputs the token it attends to: O·V starts as a projection.

    After Trockman and Kolter, arXiv 2305.09828. With a random start and without pretraining, a model of this size needs many
    minutes until it learns to copy a token.
    """
    width = model.config.hidden_size
    model.model.embed_tokens.weight.normal_(0, width**-0.5)
    for layer in model.model.layers:
        attention = layer.self_attn
        rows = torch.linalg.qr(torch.randn(width, attention.v_proj.weight.shape[0]))[0].T  # (kv_heads * D, C), orthonormal
        attention.v_proj.weight.copy_(rows * COPY_GAIN)
        heads = rows.view(-1, attention.head_dim, width).repeat_interleave(attention.num_key_value_groups, 0)
        attention.o_proj.weight.copy_(heads.reshape(-1, width).T * COPY_GAIN)
