"""Small Hugging Face directories for tests: real transformers classes, random weights, a real tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"
VOCABULARY = 320

LLAMA = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=1,
    eos_token_id=2, pad_token_id=0,
)
GEMMA3 = LLAMA | dict(
    num_hidden_layers=4, sliding_window=8, query_pre_attn_scalar=16,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
)


def write(folder: Path, family: str = "llama", *, seed: int = 0, **changes) -> Path:
    """A model directory of ``family`` ("llama" or "gemma3_text"); ``changes`` are config keys."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    base = {"llama": LLAMA, "gemma3_text": GEMMA3}[family]
    config = AutoConfig.for_model(family, **(base | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # logits that aren't flat
            scale = 0.1 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter.ndim == 1 and "norm" in name))
    model.save_pretrained(folder)
    _tokenizer(folder)
    return folder


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<|user|>", "<|system|>", "<|assistant|>", "<|end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(special + letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
        "add_bos_token": False, "chat_template": TEMPLATE,
    }))
