"""How llama.cpp's converter stored each architecture that adaptc reads from GGUF: one row an architecture.

Sources: convert_hf_to_gguf.py and src/llama-model.cpp of https://github.com/ggml-org/llama.cpp; the metadata keys not
listed here are taken from transformers' own table (``GGUF_CONFIG_MAPPING``), tensor names from the ``gguf`` package.
Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    reader        transformers' key of the architecture's metadata (in GGUF_CONFIG_MAPPING), where it isn't GGUF's own
    variants      metadata key → the row to take instead where the file has that key and it isn't 0
    heads         regular expression of parameter names → configuration key that counts its heads: rows of a head
                  are stored with its two rotary halves interleaved
    transposed    regular expression of the parameters that are stored with their last two axes exchanged
    halves        how the tensors of ``HALVES`` were cut in two: "stacked" (the first half of each expert's rows, and
                  the second) or "alternating" (even rows and odd ones)
    one_row       regular expression of the tensors that are matrices of one row, stored as vectors
    offsets       regular expression of parameter names → what to add to stored values
    derived       configuration keys computed from metadata, for what the converter left to llama.cpp's code
    turned        configuration key of the share of a head's columns that rope turns, of a model that may turn a part
    rope          rope parameters that no metadata say, of an architecture whose files must say how positions are
                  scaled
    unread        why transformers' own reader gives another model, or none ("" when it gives this one)
    """

    model_type: str
    tensor_names: str
    reader: str = ""
    variants: Mapping[str, "Architecture"] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    same_as: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, str] = field(default_factory=dict)
    transposed: str = ""
    halves: str = "stacked"
    one_row: str = ""
    offsets: Mapping[str, float] = field(default_factory=dict)
    derived: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}
    turned: str = ""
    rope: Mapping[str, Any] = field(default_factory=dict)
    unread: str = ""


ZERO_IS_NONE = ("attention.sliding_window",)
"""Keys of which 0 says that there is none: the format has no other word for it."""

PARAMETERS: Mapping[str, str] = {
    r"^model\.layers\.(\d+)\..*\bexperts\.gate_up_proj$": r"blk.\1.ffn_gate_up_exps.weight",
    r"^model\.layers\.(\d+)\..*\bexperts\.gate_up_proj_bias$": r"blk.\1.ffn_gate_up_exps.bias",
    r"\bexperts\.down_proj$": "experts.down_proj.weight",
    r"\bexperts\.down_proj_bias$": "experts.down_proj.bias",
    r"\.sinks$": ".sinks.weight",
}
"""Regular expression of parameter names → the tensor's name, or the one by which the ``gguf`` package finds it."""

HALVES: Mapping[str, tuple[str, str]] = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
"""Tensor of a block, as modelling code and newer files have it → the two that most files have in its place."""


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


_LLAMA = Architecture(
    model_type="llama",
    tensor_names="LLAMA",
    keys={"attention.key_length": "head_dim"},
    same_as={"attention.key_length": "rope.dimension_count", "attention.value_length": "rope.dimension_count"},
    heads={
        r"\.self_attn\.q_proj\.(weight|bias)$": "num_attention_heads",
        r"\.self_attn\.k_proj\.(weight|bias)$": "num_key_value_heads",
    },
)

_MIXTRAL = replace(
    _LLAMA,
    model_type="mixtral",
    keys={**_LLAMA.keys, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    unread="it takes experts of the architecture 'llama' for a Llama without them",
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": replace(_LLAMA, variants={"expert_count": _MIXTRAL}),
    "qwen2": Architecture(model_type="qwen2", tensor_names="QWEN2"),
    "qwen3": Architecture(
        model_type="qwen3",
        tensor_names="QWEN3",
        keys={"attention.key_length": "head_dim"},
        same_as={"attention.value_length": "attention.key_length"},
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        tensor_names="QWEN2MOE",
        reader="qwen2_moe",
        keys={
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        one_row=r"\.ffn_gate_inp_shexp\.weight$",
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        tensor_names="QWEN3MOE",
        reader="qwen3_moe",
        keys={"expert_feed_forward_length": "moe_intermediate_size"},
        same_as={"attention.value_length": "attention.key_length"},
        derived=lambda metadata: {"norm_topk_prob": True},
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        tensor_names="GPT_OSS",
        reader="gpt_oss",
        keys={"attention.key_length": "head_dim", "attention.sliding_window": "sliding_window"},
        same_as={
            "attention.value_length": "attention.key_length",
            "expert_feed_forward_length": "feed_forward_length",
        },
        transposed=r"\bexperts\.(gate_up|down)_proj$",
        halves="alternating",
        rope={"truncate": False},
        unread="it misreads the scaling of rotary positions, and has no names for the experts",
    ),
    "gpt2": Architecture(
        model_type="gpt2",
        tensor_names="GPT2",
        keys={"context_length": "n_positions", "feed_forward_length": "n_inner"},
        transposed=r"\.(c_attn|c_proj|c_fc)\.weight$",
    ),
    "phi3": Architecture(
        model_type="phi3",
        tensor_names="PHI3",
        keys={
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        turned="partial_rotary_factor",
    ),
    "starcoder2": Architecture(model_type="starcoder2", tensor_names="STARCODER2", keys={"rope.freq_base": "rope_theta"}),
    "gemma2": Architecture(
        model_type="gemma2",
        tensor_names="GEMMA2",
        keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        same_as={"attention.value_length": "attention.key_length"},
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
        same_as={"attention.value_length": "attention.key_length"},
        offsets={r"norm\.weight$": -1.0},
        derived=_gemma3,
    ),
}

ROPE_SCALINGS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    },
}
"""``rope.scaling.type`` → the keys below ``rope.scaling.`` that it has, and transformers' names for them."""

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
