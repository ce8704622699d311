"""What a model's files say that inference doesn't need, each with its reason. Everything not listed here must be used.

Keys are ``fnmatch`` patterns. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

_TRAINING = "used in training only"
_GENERATION = "a default of generation, which the caller decides"
_TEXT = "belongs to the tokenizer, which carries it itself"
_PROVENANCE = "says where the model comes from"
_STORAGE = "says how tensors are stored, which each tensor says itself"
_ENCODER = "of an encoder, which a decoder that stands alone doesn't have"
_MODALITY = "of an encoder of sound or images, which a sequence of tokens doesn't go through"
_ONE_SOURCE = "scores what earlier blocks of layers have added up, and before the first layer there is none"
_FURTHER = "layers that guess further tokens, which aren't part of the model's own forward"
_DENSE = "the width of dense layers, where there are any; another one shows in the tensors' shapes"
_EXPERTS = "the width of experts, where there are any; another one shows in the tensors' shapes"

CONFIG: Mapping[str, str] = {
    "initializer_range": _TRAINING,
    "attention_dropout": _TRAINING,
    "hidden_dropout": _TRAINING,
    "resid_pdrop": _TRAINING,
    "embd_pdrop": _TRAINING,
    "attn_pdrop": _TRAINING,
    "pretraining_tp": _TRAINING,
    "activation_dropout": _TRAINING,
    "embedding_dropout": _TRAINING,
    "residual_dropout": _TRAINING,
    "router_aux_loss_coef": _TRAINING,
    "aux_loss_alpha": _TRAINING,
    "seq_aux": _TRAINING,
    "ep_size": "how experts were spread over devices",
    "gradient_checkpointing": _TRAINING,
    "use_cache": "the compiled step always has a cache",
    "cache_implementation": "the compiled step has paged caches of its own",
    "model_type": "has chosen the configuration class",
    "architectures": _PROVENANCE,
    "auto_map*": "names code that comes with a checkpoint; without --trust-remote-code transformers' own class is run",
    "transformers_version": _PROVENANCE,
    "_name_or_path": _PROVENANCE,
    "name_or_path": _PROVENANCE,
    "_commit_hash": _PROVENANCE,
    "torch_dtype": _STORAGE,
    "dtype": _STORAGE,
    "max_position_embeddings": "bounds the context, which is an option of the compiler",
    "rope_parameters.max_position_embeddings": "bounds the context, which is an option of the compiler",
    "bos_token_id": _TEXT,
    "eos_token_id": _TEXT,
    "pad_token_id": _TEXT,
    "unk_token_id": _TEXT,
    "sep_token_id": _TEXT,
    "cls_token_id": _TEXT,
    "output_attentions": "asks for values that a compiled model doesn't return",
    "output_hidden_states": "asks for values that a compiled model doesn't return",
    "return_dict": "chooses a container of results",
    "classifier_dropout": _TRAINING,
    "is_decoder": "a causal language model is one",
    "intermediate_size": _DENSE,
    "intermediate_size_mlp": _DENSE,
    "dense_intermediate_size": _DENSE,
    "moe_intermediate_size": _EXPERTS,
    "shared_expert_intermediate_size": _EXPERTS,
    "num_nextn_predict_layers": "layers that guess further tokens, which aren't part of the model's own forward",
    "summary_*": "belongs to classification heads",
    "id2label.*": "names the classes of a classification head",
    "label2id.*": "names the classes of a classification head",
    "tf_legacy_loss": _TRAINING,
    "torchscript": "for another runtime",
    "use_bfloat16": _STORAGE,
    "add_cross_attention": _ENCODER,
    "tie_encoder_decoder": _ENCODER,
    "encoder_attention_heads": _ENCODER,
    "encoder_ffn_dim": _ENCODER,
    "encoder_layers": _ENCODER,
    "encoder_layerdrop": _ENCODER,
    "audio_config.*": _MODALITY,
    "audio_encoder_config.*": _MODALITY,
    "depth_decoder_config.*": "of a decoder of the sound within a step, which isn't part of the language model",
    "vision_config.*": _MODALITY,
    "image_token_id": "marks where a prompt has an image, and a sequence of tokens has none",
    "bigbird_pegasus:block_size": _ENCODER,
    "bailing_hybrid:first_k_dense_replace": "says what mlp_layer_types lists",
    "bailing_hybrid:layer_group_size": "says what layer_types lists",
    "granitemoehybrid:rope_parameters.*": "of a model with rope, which reads it if position_embedding_type says so",
    "lfm2:full_attn_idxs": "says what layer_types lists",
    "glm_moe_dsa:index_share_for_mtp_iteration": _FURTHER,
    "minimax_m3_vl_text:rotary_dim": "columns that turn, which transformers' class takes from partial_rotary_factor",
    "nemotron_h:mtp_layers_block_type": _FURTHER,
    "qwen3_5_*:mtp_num_hidden_layers": _FURTHER,
    "nemotron_h:time_step_limit": "a bound of time steps in the authors' first code; transformers' class has time_step_min",
    "zamba:attn_layer_offset": "says what layers_block_type lists",
    "zamba:attn_layer_period": "says what layers_block_type lists",
    "zamba:num_hidden_layers": "as many as layers_block_type lists",
    "zamba2:num_hidden_layers": "as many as layers_block_type lists",
    "zamba2:rope_parameters.*": "of a model with rope, which reads it if use_mem_rope says so",
    "zaya:rope_parameters.hybrid_sliding.*": "of layers with a window, which read it where there are any",
    "bigbird_pegasus:num_random_blocks": _ENCODER,
    "original_max_position_embeddings": "read from rope_parameters by the scalings that need it",
    "is_llama_config": _PROVENANCE,
    "rope_interleaved": "a flag of the authors' own training code; transformers' class always has halves",
    "do_sample": _GENERATION,
    "decoder_start_token_id": _GENERATION,
    "suppress_tokens": _GENERATION,
    "begin_suppress_tokens": _GENERATION,
    "forced_bos_token_id": _GENERATION,
    "forced_eos_token_id": _GENERATION,
    "temperature": _GENERATION,
    "top_k": _GENERATION,
    "top_p": _GENERATION,
    "max_length": _GENERATION,
    "repetition_penalty": _GENERATION,
    "diversity_penalty": _GENERATION,
    "early_stopping": _GENERATION,
    "encoder_no_repeat_ngram_size": _GENERATION,
    "length_penalty": _GENERATION,
    "min_length": _GENERATION,
    "no_repeat_ngram_size": _GENERATION,
    "num_beam_groups": _GENERATION,
    "num_beams": _GENERATION,
    "num_return_sequences": _GENERATION,
    "output_scores": _GENERATION,
    "remove_invalid_values": _GENERATION,
    "return_dict_in_generate": _GENERATION,
    "typical_p": _GENERATION,
    "task_specific_params.*": _GENERATION,
    "prefix": _TEXT,
    "attention_bias": "biases show in the tensors",
    "use_embedding_sharing": "a head that isn't tied shows in the tensors",
    "transformers.js_config*": "for another runtime",
}
"""Keys of config.json (dotted when nested), or of one model_type's alone, which then stands before a colon."""

_DEEPSEEK_V3 = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_QWEN3_5 = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_use_dedicated_embeddings": False,
            "rope_parameters.mrope_interleaved": True}

ALWAYS: Mapping[str, Mapping[str, Any]] = {
    "cohere2": {"order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
                "rotary_pct": 1.0, "use_gated_activation": True, "use_parallel_block": True,
                "use_parallel_embedding": True},
    "deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax"},
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v4": {"topk_method": "noaux_tc"},
    "glm_moe_dsa": _DEEPSEEK_V3 | {"indexer_rope_interleave": True, "moe_router_dtype": "float32", "rope_interleave": True},
    "kimi_k2": _DEEPSEEK_V3,
    "opt": {"_remove_final_layer_norm": False},
    "qwen2": {"use_mrope": False},
    "qwen3_5_moe_text": _QWEN3_5 | {"mlp_only_layers": []},
    "qwen3_5_text": _QWEN3_5,
    "starcoder2": {"activation_function": "gelu", "attention_softmax_in_fp32": True, "mlp_type": "default",
                   "norm_type": "layer_norm", "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True},
}
"""What published files state of a model_type, and transformers' class does whatever they state. Another value is an
error. Starcoder2's ``activation_function`` is what the authors' training code calls ``hidden_act``."""

REPEATED: Mapping[str, tuple[str, ...]] = {
    "n_ctx": ("n_positions",),
    "hidden_act": ("hidden_activation",),
    "layer_norm_epsilon": ("norm_epsilon",),
    "sliding_window_size": ("sliding_window",),
    "experts_per_token": ("num_experts_per_tok",),
    "initial_context_length": ("rope_scaling.original_max_position_embeddings",
                               "rope_parameters.original_max_position_embeddings"),
}
"""Key → keys that say the same and are read: accounted for where the files give one of them the same value."""

CONFIG_ALIASES: Mapping[str, tuple[str, ...]] = {
    "rotary_emb_base": ("rope_parameters.rope_theta",),
    "rope_theta": ("rope_parameters.rope_theta", "rope_parameters.full_attention.rope_theta"),
    "rope_local_base_freq": ("rope_parameters.sliding_attention.rope_theta",),
    "rope_scaling.type": ("rope_parameters.rope_type", "rope_parameters.full_attention.rope_type"),
    "rope_scaling.*": ("rope_parameters.*", "rope_parameters.full_attention.*"),
    "rope_parameters.type": ("rope_parameters.rope_type",),
    "partial_rotary_factor": ("rope_parameters.partial_rotary_factor",),
    "use_sliding_window": ("layer_types", "sliding_window"),
    "max_window_layers": ("layer_types", "sliding_window"),
    "qk_head_dim": ("qk_nope_head_dim",),
    "first_k_dense_replace": ("mlp_layer_types",),
    "no_rope_layer_interval": ("no_rope_layers",),
    "full_attention_interval": ("layer_types",),
    "compress_ratios": ("layer_types",),
    "compress_rate_csa": ("compress_rates.compressed_sparse_attention",),
    "compress_rate_hca": ("compress_rates.heavily_compressed_attention",),
    "num_hash_layers": ("mlp_layer_types",),
    "sliding_window_pattern": ("layer_types",),
    "_sliding_window_pattern": ("layer_types",),
    "global_attn_every_n_layers": ("layer_types",),
    "local_attention": ("sliding_window",),
    "index_topk_freq": ("indexer_types",),
    "index_skip_topk_offset": ("indexer_types",),
}
"""Older spellings of keys → the names transformers reads them under; a ``*`` stands for the same text in both."""

LAYER_KEYS: Mapping[str, str] = {
    "sliding_window": "sliding_attention",
    "*full_attention.*": "full_attention",
    "*sliding_attention.*": "sliding_attention",
    "*chunked_attention.*": "chunked_attention",
    "*linear_attention.*": "linear_attention",
    "*compressed_sparse_attention": "compressed_sparse_attention",
    "*heavily_compressed_attention": "heavily_compressed_attention",
    "deepseek_v4:index_*": "compressed_sparse_attention",
}
"""Keys, or one model_type's alone as in ``CONFIG``, that only layers of one type read, so that a model without such layers
has no use for them."""

METADATA: Mapping[str, str] = {
    "general.type": "a model; adapters and the like are refused",
    "general.name": _PROVENANCE,
    "general.author": _PROVENANCE,
    "general.version": _PROVENANCE,
    "general.organization": _PROVENANCE,
    "general.basename": _PROVENANCE,
    "general.finetune": _PROVENANCE,
    "general.description": _PROVENANCE,
    "general.quantized_by": _PROVENANCE,
    "general.size_label": _PROVENANCE,
    "general.license*": _PROVENANCE,
    "general.url": _PROVENANCE,
    "general.doi": _PROVENANCE,
    "general.uuid": _PROVENANCE,
    "general.repo_url": _PROVENANCE,
    "general.source.*": _PROVENANCE,
    "general.base_model.*": _PROVENANCE,
    "general.dataset.*": _PROVENANCE,
    "general.tags": _PROVENANCE,
    "general.languages": _PROVENANCE,
    "general.datasets": _PROVENANCE,
    "general.sampling.*": _GENERATION,
    "general.file_type": _STORAGE,
    "general.quantization_version": _STORAGE,
    "general.alignment": "read by the parser of the container",
    "*.rope.scaling.finetuned": _PROVENANCE,
    "split.*": "a file of one part; several parts are refused",
    "quantize.imatrix.*": _PROVENANCE,
    "tokenizer.chat_template.*": "an alternative template; the default one is kept",
    "tokenizer.chat_templates": "lists the alternative templates",
    "tokenizer.huggingface.json": "the same tokenizer in another form",
    "tokenizer.ggml.add_sep_token": "separators belong to encoders",
    "tokenizer.ggml.seperator_token_id": "separators belong to encoders",
    "tokenizer.ggml.cls_token_id": "belongs to encoders",
    "tokenizer.ggml.mask_token_id": "belongs to encoders",
    "tokenizer.ggml.token_type_count": "belongs to encoders",
    "tokenizer.ggml.fim_*_token_id": "fill-in-the-middle prompts are the caller's",
    "tokenizer.ggml.prefix_token_id": "fill-in-the-middle prompts are the caller's",
    "tokenizer.ggml.suffix_token_id": "fill-in-the-middle prompts are the caller's",
    "tokenizer.ggml.middle_token_id": "fill-in-the-middle prompts are the caller's",
}
"""Metadata keys of GGUF files."""

TENSORS: Mapping[str, str] = {
    "*rotary_emb.inv_freq": "computed from the configuration",
    "*.attn.bias": "a causal mask stored by old versions of transformers",
    "*.attn.masked_bias": "a causal mask stored by old versions of transformers",
    "rope_freqs.weight": "read into the configuration's rope parameters",
    "vision_tower.*": _MODALITY,
    "mm_projector.*": _MODALITY,
    "model.layers.0.self_attention_res_norm.weight": _ONE_SOURCE,
    "model.layers.0.self_attention_res_proj.weight": _ONE_SOURCE,
}
"""Tensors of either kind of file."""


def reason(table: Mapping[str, str], key: str) -> str | None:
    """Why ``key`` may go unused, or None when it must be used."""
    return next((why for pattern, why in table.items() if fnmatchcase(key, pattern)), None)


def aliases(key: str) -> tuple[str, ...]:
    """Names under which transformers may read the config.json key ``key``, itself first."""
    names = [key]
    for pattern, targets in CONFIG_ALIASES.items():
        if fnmatchcase(key, pattern):
            star = key[len(pattern) - 1 :] if pattern.endswith("*") else ""
            names.extend(target.replace("*", star) for target in targets)
    return tuple(names)
