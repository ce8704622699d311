"""Small GGUF files for tests, written with the gguf package: both architectures, any mix of formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, FEED, VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD = 256, 512, 64, 2, 4, 2, 64
CYCLE = ("q4_k", "q8_0", "q5_0", "q6_k", "q4_1", "f16", "q5_k", "q4_0", "bf16", "q5_1", "f32")

_COMMON = {
    "context_length": 128, "block_count": LAYERS, "embedding_length": HIDDEN, "feed_forward_length": FEED,
    "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5000.0, "vocab_size": VOCABULARY,
}
METADATA: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "rope.dimension_count": HEAD},
    "gemma3": {**_COMMON, "attention.key_length": HEAD, "attention.value_length": HEAD, "attention.sliding_window": 16},
}
_MATRICES = {
    "attn_q": (HEADS * HEAD, HIDDEN), "attn_k": (KV_HEADS * HEAD, HIDDEN), "attn_v": (KV_HEADS * HEAD, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD), "ffn_gate": (FEED, HIDDEN), "ffn_up": (FEED, HIDDEN),
    "ffn_down": (HIDDEN, FEED),
}
_VECTORS = {
    "llama": {"attn_norm": HIDDEN, "ffn_norm": HIDDEN},
    "gemma3": {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN,
               "attn_q_norm": HEAD, "attn_k_norm": HEAD},
}
_F16_LEVELS = {"q6_k": (208,), "q8_0": (0,), "q4_0": (0,), "q5_0": (0,)}


def shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    """The tensors of the tiny model, row-major."""
    result: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, shape in _MATRICES.items():
            result[f"blk.{layer}.{name}.weight"] = shape
        for name, size in _VECTORS[architecture].items():
            result[f"blk.{layer}.{name}.weight"] = (size,)
    return result


def stored(format: str, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Random stored values: float arrays, or blocks of random bytes with small finite f16 levels."""
    if format in ("f32", "f16"):
        return rng.normal(0, 0.05, shape).astype(np.float32 if format == "f32" else np.float16)
    kind = gguf.GGMLQuantizationType[format.upper()]
    if format == "bf16":
        return gguf.quants.quantize(rng.normal(0, 0.05, shape).astype(np.float32), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (int(np.prod(shape)) // block, size), dtype=np.uint8)
    for offset in _F16_LEVELS.get(format, (0, 2)):
        levels = rng.normal(0, 0.002, (len(raw), 1)).astype(np.float16)
        raw[:, offset : offset + 2] = levels.view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def write(
    path: Path,
    architecture: str = "llama",
    *,
    formats: Sequence[str] = CYCLE,
    metadata: Mapping[str, Any] = {},
    raw_metadata: Mapping[str, Any] = {},
    tensors: Mapping[str, np.ndarray | None] = {},
    named: str | None = None,
    seed: int = 0,
) -> Path:
    """Writes a tiny model. ``metadata`` (below the architecture) and ``tensors`` (float32) replace or add, None takes
    away; ``raw_metadata`` are full keys; ``named`` is the architecture that the file claims."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, named or architecture)
    for key, value in {**METADATA[architecture], **metadata}.items():
        if value is not None:
            add(writer, f"{named or architecture}.{key}", value)
    for key, value in raw_metadata.items():
        add(writer, key, value)
    matrices = 0
    for name, shape in shapes(architecture).items():
        if name in tensors:
            continue
        if len(shape) == 1:
            writer.add_tensor(name, rng.normal(1, 0.1, shape).astype(np.float32))
            continue
        format = formats[matrices % len(formats)]
        matrices += 1
        writer.add_tensor(name, stored(format, shape, rng), raw_dtype=gguf.GGMLQuantizationType[format.upper()])
    for name, values in tensors.items():
        if values is not None:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A metadata key, in the type of its value."""
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


def parameters(model: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """A transformers module's parameters (name → shape) and which share another's storage."""
    owners: dict[int, str] = {}
    found, tied = {}, {}
    for name, value in model.named_parameters(remove_duplicate=False):
        found[name] = tuple(value.shape)
        if id(value) in owners:
            tied[name] = owners[id(value)]
        owners.setdefault(id(value), name)
    return found, tied
