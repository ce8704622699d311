"""DeepSeek-V4's compressed attention from its class to logits, and what looks like it and isn't."""

from __future__ import annotations

import json
from types import MethodType

import numpy as np
import pytest
import torch
from adaptc.capture import hooks, recurrence
from adaptc.capture.pipeline import capture_module
from adaptc.errors import CaptureError, UnsupportedError
from adaptc.sources.accounting import recorded_reads
from adaptc.sources.described import DescribedSource
from every_class import served
from families import compile_family, forward, randomise, tokens_of
from tiny_configs import tiny

pytestmark = pytest.mark.usefixtures("kept_captures")


def build(*kinds: str):
    """A tiny model with a layer of each kind; the first routes by tokens."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    keys = tiny(DeepseekV4Config) | {"layer_types": list(kinds), "num_hidden_layers": len(kinds), "hc_mult": 2,
                                     "compress_rates": dict.fromkeys(tiny(DeepseekV4Config)["compress_rates"], 8),
                                     "mlp_layer_types": ["hash_moe", *["moe"] * len(kinds)][: len(kinds)]}
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**keys)).float().eval()
    randomise(model)
    return model


def test_it_gives_its_own_forward_on_every_path(tmp_path):
    """Entries of 8 tokens beside pages of 4, a choice of 4 entries: chunks, single tokens, a batch, a prefix found again.
    All kinds of layers are in ``every_class``."""
    model = build("compressed_sparse_attention")
    tokens, other = tokens_of(41, 0), tokens_of(11, 1)
    expected, _ = forward(model, list(tokens))
    model.save_pretrained(tmp_path / "model")
    compile_family(tmp_path / "model", tmp_path / "a.adapt", page_size=4, max_context=64)
    got, other_bits = served(tmp_path / "a.adapt", tokens, other)
    assert other_bits == []
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


def test_a_compressor_that_computes_something_else_stays_the_authors(monkeypatch):
    """Its parts are those of one that is known; what it gives on the example isn't. No trace with any number of tokens
    follows it then, which is an error with its line."""
    model = build("heavily_compressed_attention")
    layer = model.model.layers[0].self_attn.compressor
    kind, theirs = type(layer), type(layer).forward
    hooks.operators()
    with recurrence.installed(model):
        assert "forward" in vars(layer)

    def forward_of_another(self, *args, **kwargs):
        entries, seen = theirs(self, *args, **kwargs)
        return entries * 2, seen

    monkeypatch.setattr(kind, "forward", forward_of_another)
    with recurrence.installed(model):
        assert "forward" not in vars(layer) and "forward" in vars(model.model.layers[0].attn_hc)


def test_other_rows_that_are_appended_to_keys_are_refused_by_name(monkeypatch):
    """Entries under a mask of their own that no operator stands for."""
    model = build("heavily_compressed_attention")
    layer = model.model.layers[0].self_attn.compressor

    def appended(self, hidden_states, *args, **kwargs):
        rows = self.kv_proj(hidden_states).unsqueeze(1)
        return rows, rows.new_zeros(1, 1, 1, 1).expand(1, 1, rows.shape[2], rows.shape[2])

    monkeypatch.setattr(layer, "compress_rate", 8)
    del layer.position_bias  # so that it isn't taken for a compressor
    monkeypatch.setattr(layer, "forward", MethodType(appended, layer))
    with pytest.raises(CaptureError) as caught:
        capture_module(model, model.config, brief=False)
    said = str(caught.value)
    assert "isn't attention over rows and entries that adaptc has" in said and "model.layers.0.self_attn" in said


# ---- what published configurations say

OLD = {"model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [128, 4, 0, 0], "num_hash_layers": 1,
       "compress_rate_csa": 8, "compress_rate_hca": 16, "topk_method": "noaux_tc"}
"""Keys as the first files spell them; one layer more than there are, of those that guess further tokens."""


def test_old_spellings_are_accounted_for_where_what_they_became_is_read():
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(**OLD)
    with recorded_reads(config, OLD, "m") as reads:
        pass
    assert {"compress_ratios", "num_hash_layers", "compress_rate_csa"} <= set(reads.unread_keys())
    with recorded_reads(config, OLD, "m") as reads:
        kinds = [config.compress_rates.get(kind) for kind in config.layer_types[: config.num_hidden_layers]]
        assert (kinds, config.mlp_layer_types) == ([16, 8, None], ["hash_moe", "moe", "moe"])
    assert reads.unread_keys() == ()


def test_experts_may_lie_in_another_format_and_what_the_class_keeps_wide_is_left(tmp_path):
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    keys = DeepseekV4Config(**tiny(DeepseekV4Config)).to_dict()
    stated = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(keys | {"quantization_config": stated, "expert_dtype": "fp4"}))
    source = DescribedSource(tmp_path)
    with torch.device("meta"):
        source.built(DeepseekV4ForCausalLM(source.config))
    names = {name.removeprefix("model.layers.2."): format.name for name, format in source.formats.items()}
    assert names["mlp.experts.gate_up_proj"] == "mxfp4" and names["self_attn.q_a_proj.weight"] == "fp8_128x128"
    assert names["self_attn.compressor.kv_proj.weight"] == names["self_attn.sinks"] == source.dtype.name
    (tmp_path / "config.json").write_text(json.dumps(keys | {"quantization_config": stated, "expert_dtype": "int3"}))
    with pytest.raises(UnsupportedError, match="expert_dtype of .* is 'int3'"):
        DescribedSource(tmp_path)
