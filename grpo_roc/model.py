"""A model and a tokenizer from nothing: no download, a few hundred thousand parameters, the file layout of a real one.

The tokenizer knows whole words: tags, the constant parts of a tool call, numbers of up to three digits, the words of the toy's
texts. Everything else falls apart into bytes, so any text can be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grpo_roc import chat
from grpo_roc.config import Model

PIECES = r"\p{N}{1,3}| ?\p{L}+|\n| +|[^\p{L}\p{N}\s]|\s"
PAD = "<|endoftext|>"
COPY_GAIN = 0.3


def make_tokenizer(texts: Iterable[str], max_len: int) -> PreTrainedTokenizerFast:
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words = sorted({piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)})
    numbers = [f"{n:0{width}d}" for width in (2, 3) for n in range(10**width)]
    names = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *numbers, *words])
    vocabulary = {name: number for number, name in enumerate(names)}
    # No merges: a piece is either known as a whole or spelled in bytes.
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


def make_model(shape: Model, vocabulary: int, max_len: int, seed: int) -> Qwen3ForCausalLM:
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
    _ready_to_copy(model)
    return model


@torch.no_grad()
def _ready_to_copy(model: Qwen3ForCausalLM) -> None:
    """What a head looks at, it begins by saying: O·V starts as a projection (after Trockman and Kolter, arXiv 2305.09828).

    Left to chance, a model of this size needs many minutes to find out that a token can be copied at all, and there is no
    pretraining here that would have taught it.
    """
    width = model.config.hidden_size
    model.model.embed_tokens.weight.normal_(0, width**-0.5)
    for layer in model.model.layers:
        attention = layer.self_attn
        rows = torch.linalg.qr(torch.randn(width, attention.v_proj.weight.shape[0]))[0].T  # (kv_heads * D, C), orthonormal
        attention.v_proj.weight.copy_(rows * COPY_GAIN)
        heads = rows.view(-1, attention.head_dim, width).repeat_interleave(attention.num_key_value_groups, 0)
        attention.o_proj.weight.copy_(heads.reshape(-1, width).T * COPY_GAIN)


def make_tiny(folder: Path, shape: Model, texts: Iterable[str], *, max_len: int, seed: int = 0) -> int:
    """A folder as AutoModel and AutoTokenizer like it; the number of parameters."""
    tokenizer = make_tokenizer(texts, max_len)
    model = make_model(shape, len(tokenizer), max_len, seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
