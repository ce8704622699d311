"""A configuration key that no modelling code reads is an error, whichever way it is spelt."""

from __future__ import annotations

import json

import families
import pytest
import torch
from tiny_gguf import write

from adaptc.errors import InputError
from adaptc.sources import open_source

torch.set_num_threads(1)

COMMON = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              vocab_size=80, max_position_embeddings=64, head_dim=16)
# As their authors publish them, but for the sizes: old spellings, training and generation keys.
LLAMA = dict(
    COMMON, model_type="llama", architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0,
    bos_token_id=1, eos_token_id=2, hidden_act="silu", initializer_range=0.02, mlp_bias=False, pretraining_tp=1,
    rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=True, torch_dtype="bfloat16",
    transformers_version="4.43.0", use_cache=True,
    rope_scaling={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                  "original_max_position_embeddings": 32},
)
GEMMA3 = dict(
    COMMON, model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], attention_bias=False, attention_dropout=0.0,
    attn_logit_softcapping=None, final_logit_softcapping=None, bos_token_id=2, eos_token_id=[1, 106], pad_token_id=0,
    hidden_activation="gelu_pytorch_tanh", initializer_range=0.02, query_pre_attn_scalar=16, rms_norm_eps=1e-6,
    rope_local_base_freq=10000.0, rope_theta=1000000.0, rope_scaling=None, sliding_window=8, torch_dtype="bfloat16",
    sliding_window_pattern=2, use_bidirectional_attention=False, use_cache=True, transformers_version="4.55.0",
)


STATED = {
    "gpt2": dict(n_ctx=64, resid_pdrop=0.1, summary_activation=None, summary_first_dropout=0.1, summary_type="cls_index",
                 task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}}),
    "opt": dict(activation_dropout=0.0, dropout=0.1, init_std=0.02, layerdrop=0.0, prefix="</s>",
                _remove_final_layer_norm=False),
    "gpt_neox": dict(rotary_emb_base=10000, use_parallel_residual=True, classifier_dropout=0.1),
    "starcoder2": dict(activation_function="gelu", attention_softmax_in_fp32=True, embedding_dropout=0.1,
                       layer_norm_epsilon=1e-5, norm_epsilon=1e-5, mlp_type="default", norm_type="layer_norm",
                       residual_dropout=0.1, scale_attention_softmax_in_fp32=True, scale_attn_weights=True),
    "deepseek_v2": dict(aux_loss_alpha=0.001, auto_map={"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, ep_size=1,
                        moe_layer_freq=1, scoring_func="softmax", seq_aux=True, norm_topk_prob=False, pretraining_tp=1),
    "deepseek_v3": dict(aux_loss_alpha=0.001, ep_size=1, moe_layer_freq=1, scoring_func="sigmoid", seq_aux=True,
                        topk_method="noaux_tc", num_nextn_predict_layers=1),
    "cohere2": dict(order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj", rotary_pct=1.0,
                    use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True,
                    use_parallel_embedding=True, cache_implementation="hybrid"),
    "gpt_oss": dict(experts_per_token=2, initial_context_length=16, swiglu_limit=7.0, router_aux_loss_coef=0.9),
    "gemma2": dict(cache_implementation="hybrid", hidden_act="gelu_pytorch_tanh", sliding_window_size=8),
    "phi3": dict(auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}, original_max_position_embeddings=64,
                 attention_bias=False, embd_pdrop=0.0),
    "qwen2": dict(use_mrope=False),
    "smollm3": dict(max_window_layers=28, pretraining_tp=2, use_sliding_window=False),
}
"""What the published files of families state beside what transformers writes."""


def family(name):
    from transformers import AutoConfig

    row = families.FAMILIES[name]
    return json.loads(AutoConfig.for_model(row.model_type, **row.keys).to_json_string()) | STATED[name]


@pytest.mark.parametrize("name", STATED)
def test_what_published_files_state_is_accounted_for(tmp_path, name):
    traced(tmp_path, family(name)).check()


@pytest.mark.parametrize("name, key, value", [
    ("gpt2", "n_ctx", 32), ("starcoder2", "norm_type", "rms_norm"), ("deepseek_v2", "moe_layer_freq", 2),
    ("deepseek_v3", "scoring_func", "softmax"), ("cohere2", "use_parallel_block", False),
    ("gpt_oss", "experts_per_token", 4), ("gemma2", "hidden_act", "silu"),
])
def test_it_is_an_error_where_it_states_another_model(tmp_path, name, key, value):
    with pytest.raises(InputError, match=f"reads '{key}' of the configuration"):
        traced(tmp_path, family(name) | {key: value}).check()


BIGCODE = dict(model_type="gpt_bigcode", n_embd=32, n_head=4, n_layer=1, n_positions=64, vocab_size=80,
               multi_query=True, num_key_value_heads=1)
BART = dict(
    model_type="bart", d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48, vocab_size=80,
    max_position_embeddings=64, encoder_layers=3, encoder_attention_heads=8, encoder_ffn_dim=32, encoder_layerdrop=0.1,
    decoder_start_token_id=2, forced_eos_token_id=2, id2label={"0": "no", "1": "yes"}, label2id={"no": 0, "yes": 1})
BERT = dict(
    model_type="modernbert-decoder", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    vocab_size=80, max_position_embeddings=64, local_attention=8, global_attn_every_n_layers=2, cls_token_id=1,
    pad_token_id=0)


@pytest.mark.parametrize("config", [BIGCODE, BART, BERT], ids=lambda config: config["model_type"])
def test_keys_that_classes_derive_others_from_and_those_of_other_parts_are_accounted_for(tmp_path, config):
    traced(tmp_path, config).check()


def test_what_a_class_derives_is_an_error_where_the_key_states_another(tmp_path):
    with pytest.raises(InputError, match="reads 'num_key_value_heads' of the configuration"):
        traced(tmp_path, BIGCODE | dict(num_key_value_heads=2)).check()


def traced(folder, config):
    """The reads of building a module and running it once, as capture does."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    return run(open_source(folder), AutoModelForCausalLM)


def run(source, auto):
    with source.account_config() as reads:
        module = auto.from_config(source.config).eval()
        with torch.no_grad():
            module(torch.arange(12)[None], use_cache=False)
    return reads


@pytest.mark.parametrize("config", [LLAMA, GEMMA3], ids=["llama", "gemma3"])
def test_published_configurations_are_read_completely(tmp_path, config):
    reads = traced(tmp_path, config)
    assert reads.unread_keys() == ()
    reads.check()


@pytest.mark.parametrize("config", [LLAMA, GEMMA3], ids=["llama", "gemma3"])
def test_current_spellings_are_read_completely(tmp_path, config):
    from transformers import AutoConfig

    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved and "rope_theta" not in saved
    traced(tmp_path, saved).check()


@pytest.mark.parametrize("config", [LLAMA, GEMMA3], ids=["llama", "gemma3"])
def test_a_key_that_nothing_reads_is_named(tmp_path, config):
    reads = traced(tmp_path, {**config, "attention_temperature": 0.7})
    with pytest.raises(InputError, match=f"reads 'attention_temperature' of the configuration of {tmp_path.name}"):
        reads.check()


@pytest.mark.parametrize("key, value, unread", [
    ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 32, "wobble": 2.0}, "rope_scaling.wobble"),
    ("rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "low_freq_factor": 1.0},
     "rope_parameters.low_freq_factor"),
])
def test_a_nested_key_that_nothing_reads_is_named(tmp_path, key, value, unread):
    config = {name: stated for name, stated in LLAMA.items() if not name.startswith("rope_")}
    assert traced(tmp_path, {**config, key: value}).unread_keys() == (unread,)


def test_keys_nested_twice_are_accounted_one_by_one(tmp_path):
    config = {name: stated for name, stated in GEMMA3.items() if not name.startswith("rope_")}
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "wobble": 1}}
    reads = traced(tmp_path, {**config, "rope_parameters": rope})
    assert reads.unread_keys() == ("rope_parameters.sliding_attention.wobble",)


def test_keys_of_layer_types_that_the_model_lacks_are_idle(tmp_path):
    assert traced(tmp_path, {**GEMMA3, "sliding_window_pattern": 6}).unread_keys() == ()
    only_full = {**GEMMA3, "layer_types": ["full_attention"] * 2}
    del only_full["sliding_window_pattern"]
    assert traced(tmp_path, only_full).unread_keys() == ()
    # an index of keys belongs to layers of a type in one family, and asks in any other for what nobody computes
    assert traced(tmp_path, {**only_full, "index_topk": 8}).unread_keys() == ("index_topk",)


def test_other_configurations_reads_do_not_count(tmp_path):
    from transformers import GPT2Config

    source = open_source(write(tmp_path / "m.gguf"))
    with source.account_config() as reads:
        _ = GPT2Config().n_head, GPT2Config().vocab_size
    assert "num_attention_heads" in reads.unread_keys() and "vocab_size" in reads.unread_keys()


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_metadata_of_gguf_files_are_read_completely(tmp_path, architecture):
    from transformers import AutoModelForCausalLM

    source = open_source(write(tmp_path / "m.gguf", architecture))
    run(source, AutoModelForCausalLM).check()


def test_access_is_restored_after_the_block():
    from transformers import LlamaConfig, PreTrainedConfig

    before = PreTrainedConfig.__getattribute__
    from adaptc.sources.accounting import recorded_reads

    with pytest.raises(RuntimeError):
        with recorded_reads(LlamaConfig(), {}, "x"):
            assert PreTrainedConfig.__getattribute__ is not before
            raise RuntimeError
    assert PreTrainedConfig.__getattribute__ is before
