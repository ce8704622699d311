"""How llama.cpp's converter stored each architecture that adaptc reads from GGUF: one row an architecture.

Sources: convert_hf_to_gguf.py and src/llama-model.cpp of https://github.com/ggml-org/llama.cpp; the metadata keys not
listed here are taken from transformers' own table (``GGUF_CONFIG_MAPPING``), tensor names from the ``gguf`` package.
Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Metadata = Mapping[str, Any]
"""Metadata below the architecture's prefix, e.g. ``block_count``."""


@dataclass(frozen=True)
class Architecture:
    """One value of ``general.architecture``.

    model_type    transformers' name of the same architecture
    tensor_names  member of ``gguf.MODEL_ARCH`` whose tensor names the file uses
    keys          metadata key → configuration key, beyond transformers' table
    same_as       metadata key → key that it must agree with when both are there
    heads         regular expression of parameter names → configuration key that counts its heads: rows of a head
                  are stored with its two rotary halves interleaved
    offsets       regular expression of parameter names → what to add to stored values
    derived       configuration keys computed from metadata, for what the converter left to llama.cpp's code
    """

    model_type: str
    tensor_names: str
    keys: Mapping[str, str] = field(default_factory=dict)
    same_as: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, str] = field(default_factory=dict)
    offsets: Mapping[str, float] = field(default_factory=dict)
    derived: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    """Attention's scale: llama.cpp recognises the 27B model by its 46 layers and divides by width/heads there."""
    if metadata["block_count"] == 46:
        return {"query_pre_attn_scalar": metadata["embedding_length"] // metadata["attention.head_count"]}
    return {"query_pre_attn_scalar": metadata["attention.key_length"]}


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    """Attention's scale: llama.cpp recognises the 27B model by its 62 layers and divides by width/heads there."""
    if metadata["block_count"] == 62:
        return {"query_pre_attn_scalar": metadata["embedding_length"] // metadata["attention.head_count"]}
    return {"query_pre_attn_scalar": metadata["attention.key_length"]}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        model_type="llama",
        tensor_names="LLAMA",
        keys={"attention.key_length": "head_dim"},
        same_as={"attention.key_length": "rope.dimension_count", "attention.value_length": "rope.dimension_count"},
        heads={
            r"\.self_attn\.q_proj\.(weight|bias)$": "num_attention_heads",
            r"\.self_attn\.k_proj\.(weight|bias)$": "num_key_value_heads",
        },
    ),
    "qwen2": Architecture(model_type="qwen2", tensor_names="QWEN2"),
    "qwen3": Architecture(
        model_type="qwen3",
        tensor_names="QWEN3",
        keys={"attention.key_length": "head_dim"},
        same_as={"attention.value_length": "attention.key_length", "rope.dimension_count": "attention.key_length"},
    ),
    "phi3": Architecture(model_type="phi3", tensor_names="PHI3", keys={"attention.sliding_window": "sliding_window"}),
    "starcoder2": Architecture(model_type="starcoder2", tensor_names="STARCODER2", keys={"rope.freq_base": "rope_theta"}),
    "gemma2": Architecture(
        model_type="gemma2",
        tensor_names="GEMMA2",
        keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        same_as={"attention.value_length": "attention.key_length", "rope.dimension_count": "attention.key_length"},
        offsets={r"norm\.weight$": -1.0},
        derived=_gemma2,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        tensor_names="GEMMA3",
        keys={
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        same_as={"attention.value_length": "attention.key_length", "rope.dimension_count": "attention.key_length"},
        offsets={r"norm\.weight$": -1.0},
        derived=_gemma3,
    ),
}

ROPE_SCALINGS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "linear": {"factor": "factor"},
    "yarn": {"factor": "factor", "original_context_length": "original_max_position_embeddings"},
}
"""``rope.scaling.type`` → the keys below ``rope.scaling.`` that it needs, and transformers' names for them."""

DIGIT_SPLITTERS = ("smollm", "starcoder", "refact", "command-r")
"""Values of ``tokenizer.ggml.pre`` that split each digit off before the GPT-2 pattern, which transformers' conversion
doesn't know."""

GPT2_SPLITTERS = ("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling")
"""Values of ``tokenizer.ggml.pre`` that mean the plain GPT-2 pattern."""

END_OF_TURN = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<turn|>", "<|endoftext|>")
"""Tokens that end a turn where a chat template uses them and the tokenizer holds them as special."""


def rope_frequency_factors(rope: Mapping[str, Any], theta: float, dimensions: int) -> list[float]:
    """What Llama 3's scaling divides each rotary frequency by, as the converter stores it in ``rope_freqs.weight``."""
    context = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for i in range(0, dimensions, 2):
        wavelength = 2 * math.pi * theta ** (i / dimensions)
        smooth = min(max((context / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def llama3_scaling(factors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """The rope parameters whose factors are ``factors``: {} for all ones, None when Llama 3's rule gives no such.

    The file keeps only the factors. Every published Llama 3 has the frequency bounds and the context below.
    """
    if all(factor == 1 for factor in factors):
        return {}
    rope = {
        "rope_type": "llama3",
        "factor": float(max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = rope_frequency_factors(rope, theta, 2 * len(factors))
    close = all(math.isclose(got, want, rel_tol=1e-4) for got, want in zip(factors, expected))
    return rope if close else None
