"""GGUF files of several families, written with the gguf package, against transformers' own reader of them."""

from __future__ import annotations

import families
import gguf
import numpy as np
import pytest

import adaptc

COMMON = dict(vocab_size=families.VOCABULARY, hidden_size=256, intermediate_size=96, num_hidden_layers=2,
              num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
"""Heads of 128: the reader leaves that default of some classes, whatever the file says."""

EPSILON = "attention.layer_norm_rms_epsilon"
ROWS = {
    "qwen2": ("qwen2", COMMON, {EPSILON: 1e-6}),
    "qwen3": ("qwen3", COMMON | dict(head_dim=128), {EPSILON: 1e-6, "attention.key_length": 128}),
    "phi3": ("phi3", COMMON | dict(pad_token_id=0), {EPSILON: 1e-5, "attention.sliding_window": 64}),
    "starcoder2": ("starcoder2", COMMON | dict(hidden_size=64, vocab_size=49152), {"attention.layer_norm_epsilon": 1e-5}),
    "gemma2": ("gemma2", COMMON | dict(head_dim=128, sliding_window=8, query_pre_attn_scalar=128),
               {EPSILON: 1e-6, "attention.key_length": 128, "attention.sliding_window": 8,
                "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
}


def write(path, name: str):
    model_type, keys, metadata = ROWS[name]
    model = families.build(model_type, keys, 0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], 2)
    writer = gguf.GGUFWriter(path, name)
    sizes = {"context_length": 64, "block_count": 2, "embedding_length": keys["hidden_size"], "feed_forward_length": 96,
             "attention.head_count": 2, "attention.head_count_kv": 1}
    for key, value in {**sizes, **metadata}.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{name}.{key}", value)
    if name != "starcoder2":  # has no such key: the reader leaves the class's own size
        writer.add_uint32(f"{name}.vocab_size", families.VOCABULARY)
    writer.add_uint32("tokenizer.ggml.padding_token_id", 0)
    tied = model.config.tie_word_embeddings
    for parameter, value in model.state_dict().items():
        if tied and parameter == "lm_head.weight":
            continue
        stem, _, suffix = parameter.rpartition(".")
        norm = name.startswith("gemma") and "norm" in parameter
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", value.numpy() + (1 if norm else 0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ROWS)
def test_as_transformers_reads_the_file(name, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    path = write(tmp_path / "m.gguf", name)
    families.compile_family(path, tmp_path / "a.adapt")
    module = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    for layer in module.model.layers if name == "gemma2" else ():
        layer.self_attn.scaling = 128**-0.5  # the reader leaves the 9B model's
    tokens = families.tokens_of(40, 1)
    with torch.inference_mode():
        expected = module(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    with adaptc.load(tmp_path / "a.adapt", threads=1) as session:
        logits = session.score(tokens)
        assert np.array_equal(session.score(tokens, chunk=1), logits)
    error = np.abs(logits - expected).max(-1) / np.abs(expected).max(-1)
    assert error.max() <= families.TOLERANCE
