"""Tiny configurations of any causal language model class of transformers, by the names of configuration keys.

Every key that gives a size gets a small one; of layers, the first of each kind stays. What a key means is the same in
all families that have it, so most need no row of their own; ``SPECIAL`` has what a family says in its own words.
Windows, chunks, choices of experts and of keys are shorter than ``LENGTH``, the tokens of a test, so that all of them
are at work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LENGTH = 41
"""Tokens of a test's sequence."""

VOCABULARY = 128
HIDDEN, HEADS, KV_HEADS, HEAD = 64, 4, 2, 16
POSITIONS = 256
WINDOW = 8

SIZES: Mapping[str, int] = {
    name: size
    for names, size in (
        ("hidden_size hidden_size_global d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim input_embedding_size "
         "output_embedding_size lru_width attention_hidden_size adapter_in_dim adapter_input_size "
         "adapter_out_dim", HIDDEN),
        ("intermediate_size intermediate_size_mlp ffn_dim encoder_ffn_dim decoder_ffn_dim dff dim_ff d_inner "
         "ffn_hidden_size feed_forward_size dense_intermediate_size n_inner", 96),
        ("moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
         "shared_intermediate_size moe_shared_expert_intermediate_size moe_latent_size expert_ffn_hidden_size "
         "q_lora_rank kv_lora_rank dim_model_base rel_extent", 32),
        ("num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
         "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads "
         "num_query_groups linear_num_value_heads linear_num_heads", HEADS),
        ("linear_num_key_heads n_groups o_groups", 2),
        ("index_n_heads", 8),  # with few, many scores are 0, and which of them are chosen is open
        ("dim_head d_head attention_head_size kv_channels qk_nope_head_dim v_head_dim linear_key_head_dim "
         "linear_value_head_dim linear_head_dim mamba_d_head mamba_d_state mamba_head_dim ssm_state_size state_size "
         "index_head_dim swa_head_dim o_lora_rank hc_lowrank hidden_size_per_layer_input router_hidden_size", HEAD),
        ("qk_rope_head_dim rotary_dim laurel_rank gated_norm_rank loop_gate_rank mamba_dt_rank time_step_rank", 8),
        ("qk_head_dim", 24),
        ("mamba_n_heads mamba_num_heads", 8),
        ("mamba_d_ssm", 128),
        ("vocab_size vocab_size_per_layer_input unpadded_vocab_size d_vocab", VOCABULARY),
        ("max_position_embeddings n_positions n_ctx max_target_positions max_seq_len context_length model_max_length",
         POSITIONS),
        ("original_max_position_embeddings", 64),
        ("num_experts num_local_experts n_routed_experts moe_num_experts", 8),
        ("num_experts_per_tok num_experts_per_token moe_k moe_topk n_group num_expert_group zero_expert_num", 2),
        ("n_layers_per_attn_res_block n_shared_experts num_shared_experts moe_num_shared_experts topk_group first_k_dense_replace num_dense_layers "
         "max_window_layers moe_layer_start_index attn_layer_offset expert_layer_offset", 1),
        ("attn_layer_period expert_layer_period layer_group_size global_attn_every_n_layers sliding_window_pattern "
         "_sliding_window_pattern full_attention_interval index_topk_blocks", 2),
        ("sliding_window sliding_window_size attention_chunk_size attention_window_size window_size local_attention "
         "keep_window_size index_topk local_attention_window_len", WINDOW),
        ("index_block_size", 4),
        ("mamba_chunk_size chunk_size block_size", 16),
        ("num_nextn_predict_layers num_mtp_layers", 0),
    )
    for name in names.split()
}  # fmt: skip
"""Key → size. One that is smaller by default stays, as does one that a family leaves out (None)."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
          "num_encoder_layers", "num_decoder_layers", "num_blocks")
"""Keys that count layers."""

PERIODIC = ("attn_layer_period", "layer_group_size", "first_k_dense_replace", "full_attention_interval", "block_types",
            "interleave_moe_layer_step")
"""Keys by which layers differ where no list says which is of what kind; four layers have all kinds then."""

EXACT = ("chunk_size", "n_group", "num_expert_group", "rotary_dim")
"""Sizes that are set even where the default is smaller."""

IDS = {"pad_token_id": 0, "bos_token_id": 1}
"""Special tokens whose default lies beyond the vocabulary; any other one becomes 2."""

_SLIDING_FULL = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA_4 = _SLIDING_FULL | {"per_layer_config": {"1": {"head_dim": 32}}, "head_dim": HEAD, "num_attention_heads": HEADS,
                            "num_key_value_heads": KV_HEADS}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}

_LINEAR_FULL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}

SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": _SLIDING_FULL | {"rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
             "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": HIDDEN}, "num_key_value_heads": 2},
    "deepseek_v4": {"head_dim": 64, "qk_rope_head_dim": 8, "partial_rotary_factor": 0.125,
                    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    "doge": {"sliding_window": None, "num_key_value_heads": KV_HEADS},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon": {"new_decoder_architecture": True},
    "falcon_h1": {"mamba_d_head": 16, "mamba_n_heads": 8, "mamba_d_ssm": 128},
    "gemma3n_text": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
                     "num_kv_shared_layers": 2, "intermediate_size": [96] * 4,
                     "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]},
    "gemma4_text": _GEMMA_4 | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    "gemma4_unified_text": _GEMMA_4,
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "inkling2_loop_text": {"loop_layer_index_start": 1, "loop_layer_index_end": 2},
    "granitemoehybrid": _LINEAR_FULL,
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "full_attn_idxs": [1]},
    "llama4_text": {"num_hidden_layers": 3, "moe_layers": [0, 2], "no_rope_layers": [1, 1, 0], "floor_scale": WINDOW,
                    "layer_types": ["chunked_attention"] * 2 + ["full_attention"], "num_experts_per_tok": 2},
    "minimax_m3_vl_text": {"index_n_heads": KV_HEADS, "layer_types": ["full_attention", "minimax_m3_sparse"],
                           "mlp_layer_types": ["dense", "sparse"],
                           "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "hidden_size": HIDDEN, "expand": 2, "n_groups": 2, "state_size": 16,
               "num_hidden_layers": 2},
    "nemotron_h": {"sliding_window": None},
    "qwen4_exp_text": {"indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": WINDOW,
                  "indexer_compress_ratio": 4},
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (16, 16), "attn_layers": ["local", "lsh"],
                 "num_hidden_layers": 2},
    "xlstm": {"hidden_size": HIDDEN, "num_heads": HEADS, "num_hidden_layers": 2, "num_blocks": 2,
              "vocab_size": VOCABULARY},
    "xmod": {"default_language": "en_XX", "languages": ["de_DE", "en_XX"]},
    "zaya": {"num_hidden_layers": 2, "layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": WINDOW},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 128,
              "attention_head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "n_mamba_heads": 2},
    "zamba2": {"mamba_headdim": 16, "n_mamba_heads": 8, "mamba_expand": 2, "attention_hidden_size": 128,
               "attention_head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4,
               "layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "mamba_ngroups": 1,
               "mamba_d_state": 16, "adapter_rank": 8},
}
"""model_type → keys of families whose own words or rules among keys need saying."""


def tiny(config_class: type) -> dict[str, Any]:
    """Keys of a tiny configuration of ``config_class``, those of configurations inside it among them."""
    default = config_class()
    keys = {key: _attribute(default, key) for key in default.to_dict()}
    inner = {name: getattr(default, name, None) for name in getattr(config_class, "sub_configs", {})}
    small: dict[str, Any] = {name: {"model_type": config.model_type} | tiny(type(config))
                             for name, config in inner.items() if config is not None}
    counts = [key for key in LAYERS if isinstance(keys.get(key), int)]
    layers = keys.get("num_hidden_layers") or (keys[counts[0]] if counts else 0)
    small |= _layers(keys, counts, layers)
    if keys.get("use_sliding_window") is False:
        small |= {"use_sliding_window": True, "sliding_window": WINDOW}
        small.pop("layer_types", None)  # follows from the window
    elif "sliding_window" in keys and not keys["sliding_window"] and not keys.get("layer_types"):
        small["sliding_window"] = WINDOW
    small |= {key: value for key, value in _sizes(keys).items() if key not in small}
    small |= _heads(keys, small.get("num_attention_heads", HEADS))
    for key, value in keys.items():
        if key.endswith("_token_id"):
            if isinstance(value, int) and value >= VOCABULARY:
                small[key] = IDS.get(key, 2)
            elif isinstance(value, (list, tuple)):
                small[key] = 2
    if "is_decoder" in keys and not keys.get("is_encoder_decoder"):
        small["is_decoder"] = True
    return small | SPECIAL.get(default.model_type, {})


def _attribute(config, key: str) -> Any:
    try:
        return getattr(config, key, None)
    except Exception:  # a property of a configuration may raise what it likes where it has no meaning
        return config.to_dict()[key]


def _layers(keys: Mapping[str, Any], counts: list[str], layers: int) -> dict[str, Any]:
    """The first layer of each kind: how many there are, and the lists that have an entry a layer."""
    lists = {key: value for key, value in keys.items()
             if isinstance(value, (list, tuple)) and layers > 2 and len(value) == layers}
    plain = [value for value in lists.values() if all(isinstance(x, (str, int, bool)) for x in value)]
    first: dict[tuple, int] = {}
    for i in range(layers):
        first.setdefault(tuple(str(value[i]) for value in plain), i)
    chosen = sorted(first.values())[:6]
    if len(chosen) < 2:
        chosen = list(range(min(layers, 2)))
    named = any(key in lists for key in ("layer_types", "mlp_layer_types", "layers_block_type"))
    if not named and any(key in keys for key in PERIODIC):
        chosen = list(range(min(layers, 4)))
    return dict.fromkeys(counts, len(chosen)) | {key: [value[i] for i in chosen] for key, value in lists.items()}


def _sizes(keys: Mapping[str, Any]) -> dict[str, Any]:
    small = {}
    for key, size in SIZES.items():
        value = keys.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (value == 0 and key != "mamba_d_ssm"):
            continue
        small[key] = size if value >= size or key in EXACT else value
    return small


def _heads(keys: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """Key heads as many as query heads, one, or half of them, as by default; widths of heads."""
    small: dict[str, Any] = {}
    given = keys.get("num_key_value_heads")
    if "num_key_value_heads" in keys and given is None:
        small["num_key_value_heads"] = KV_HEADS
    elif isinstance(given, int):
        small["num_key_value_heads"] = 1 if given == 1 else heads if given == keys.get("num_attention_heads") else KV_HEADS
    for key in ("num_kv_heads", "swa_num_key_value_heads"):
        if isinstance(keys.get(key), int):
            small[key] = KV_HEADS
    latent = "qk_rope_head_dim" in keys and "kv_lora_rank" in keys
    if "head_dim" in keys:
        small["head_dim"] = 8 if latent and isinstance(keys["head_dim"], int) else HEAD
    if isinstance(keys.get("global_head_dim"), int):
        small["global_head_dim"] = HEAD
    return small
