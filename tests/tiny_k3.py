"""A scaled-down Kimi K3 as its files are published: names, keys, dtypes and packing; random weights, realistic gates.

``write`` makes the folder; ``Reference`` computes its logits from the formulas, straightforwardly, in float64 numpy,
and shares nothing with ``models/kimi_k3.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

TEXT = dict(
    activation_situ_beta=4.0, activation_situ_linear_beta=25.0, attn_res_block_size=2, first_k_dense_replace=1,
    hidden_act="situ", hidden_size=64, initializer_range=0.02, intermediate_size=96, kv_lora_rank=32,
    latent_moe_use_norm=True, max_position_embeddings=4096, mla_use_nope=True, mla_use_output_gate=True,
    model_type="kimi_linear", moe_intermediate_size=64, moe_layer_freq=1, moe_renormalize=True,
    moe_router_activation_func="sigmoid", num_attention_heads=4, num_expert_group=1, num_experts=16,
    num_experts_per_token=4, num_hidden_layers=5, num_key_value_heads=4, num_nextn_predict_layers=0,
    num_shared_experts=2, q_lora_rank=48, qk_nope_head_dim=16, qk_rope_head_dim=8, rms_norm_eps=1e-05,
    routed_expert_hidden_size=32, routed_scaling_factor=1.0, tie_word_embeddings=False, topk_group=1,
    topk_method="noaux_tc", use_grouped_topk=True, v_head_dim=16, vocab_size=128,
    linear_attn_config=dict(full_attn_layers=[4, 5], gate_lower_bound=-5.0, head_dim=16, kda_layers=[1, 2, 3],
                            num_heads=4, short_conv_kernel_size=4, use_full_rank_gate=True),
)  # fmt: skip
"""What the model computes by. Both kinds of layers, the last one full attention, three blocks of which the last layer
opens one."""

UNUSED = dict(
    _name_or_path="", add_cross_attention=False, architectures=["KimiLinearForCausalLM"],
    auto_map={"AutoConfig": "configuration_kimi_k3.KimiLinearConfig",
              "AutoModel": "modeling_kimi_linear.KimiLinearModel",
              "AutoModelForCausalLM": "modeling_kimi_linear.KimiLinearForCausalLM"},
    bad_words_ids=None, begin_suppress_tokens=None, bos_token_id=126, chunk_size_feed_forward=0,
    cross_attention_hidden_size=None, decoder_start_token_id=None, diversity_penalty=0.0, do_sample=False,
    dtype="bfloat16", early_stopping=False, encoder_no_repeat_ngram_size=0, eos_token_id=127,
    exponential_decay_length_penalty=None, finetuning_task=None, forced_bos_token_id=None, forced_eos_token_id=None,
    id2label={"0": "LABEL_0", "1": "LABEL_1"}, is_decoder=False, is_encoder_decoder=False,
    label2id={"LABEL_0": 0, "LABEL_1": 1}, length_penalty=1.0, max_length=20, min_length=0, no_repeat_ngram_size=0,
    num_beam_groups=1, num_beams=1, num_return_sequences=1, output_attentions=False, output_hidden_states=False,
    output_scores=False, pad_token_id=125, prefix=None, problem_type=None, pruned_heads={},
    remove_invalid_values=False, repetition_penalty=1.0, return_dict=True, return_dict_in_generate=False,
    sep_token_id=None, suppress_tokens=None, task_specific_params=None, temperature=1.0, tf_legacy_loss=False,
    tie_encoder_decoder=False, tokenizer_class=None, top_k=50, top_p=1.0, torchscript=False,
    transformers_version="4.56.2", typical_p=1.0, use_bfloat16=False, use_cache=True,
)  # fmt: skip
"""What else the published files state: provenance, and defaults of generation and of training."""

PACKED = dict(
    config_groups={"group_0": dict(
        format="mxfp4-pack-quantized", input_activations=None, output_activations=None, targets=["Linear"],
        weights=dict(actorder=None, block_structure=None, dynamic=False, group_size=32, num_bits=4, observer="minmax",
                     observer_kwargs={}, scale_dtype="torch.uint8", strategy="group", symmetric=True, type="float",
                     zp_dtype=None))},
    format="mxfp4-pack-quantized", global_compression_ratio=None,
    ignore=["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
            "re:.*vision_tower.*", "re:.*mm_projector.*"],
    kv_cache_scheme=None, quant_method="compressed-tensors", quantization_status="compressed",
)  # fmt: skip

VISION = dict(
    _attn_implementation="flash_attention_2", activation_func="gelu_pytorch_tanh", attn_bias=False,
    init_pos_emb_height=64, init_pos_emb_time=4, init_pos_emb_width=64, linear_bias=False, merge_kernel_size=[2, 2],
    merge_type="sd2_tpool", mlp_type="mlp2", mm_hidden_size=16, mm_projector_type="patchmergerv2", norm_type="rmsnorm",
    patch_embed_proj_bias=False, patch_size=14, pos_emb_interpolation_mode="bilinear", pos_emb_type="divided_fixed",
    projector_hidden_act="gelu", projector_ln_eps=1e-05, qkv_hidden_size=16, text_hidden_size=64, vt_hidden_size=16,
    vt_intermediate_size=32, vt_num_attention_heads=2, vt_num_hidden_layers=1,
)  # fmt: skip


def config(**changes: Any) -> dict[str, Any]:
    """``config.json`` with the published keys; ``changes`` are keys of the text model."""
    return dict(
        architectures=["KimiK3ForConditionalGeneration"],
        auto_map={"AutoConfig": "configuration_kimi_k3.KimiK3Config",
                  "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
                  "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration"},
        bos_token_id=126, dtype="bfloat16", eos_token_id=127, ignore_index=-100,
        image_placeholder="<|kimi_image_placeholder|>", media_placeholder_token_id=124, model_type="kimi_k3",
        pad_token_id=125, text_config=TEXT | UNUSED | dict(quantization_config=PACKED) | changes,
        tie_word_embeddings=False, vision_config=VISION,
    )  # fmt: skip


def write(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A model folder, in two files; ``changes`` are keys of the text model."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    stated = config(**changes)
    (folder / "config.json").write_text(json.dumps(stated))
    tensors = dict(_tensors(stated["text_config"], np.random.default_rng(seed)))
    names = sorted(tensors)
    where = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def _tensors(c: dict[str, Any], random: np.random.Generator) -> Iterator[tuple[str, Any]]:
    """Name → torch tensor, in the dtype that published files have it in."""
    import torch

    def kept(values: np.ndarray, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, np.float32)).to(dtype)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return kept(random.normal(size=(rows, columns)) * 1.5 * min(columns, 64) ** -0.5)

    def norm(size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return kept(1 + 0.1 * random.normal(size=size), dtype)

    def packed(rows: int, columns: int) -> dict[str, torch.Tensor]:
        middle = round(np.log2(0.5 * min(columns, 64) ** -0.5))
        codes = random.integers(0, 256, (rows, columns // 2), np.uint8)
        scales = random.integers(126 + middle, 129 + middle, (rows, columns // 32), np.uint8)
        return {"weight_packed": torch.from_numpy(codes), "weight_scale": torch.from_numpy(scales)}

    hidden, linear, heads = c["hidden_size"], c["linear_attn_config"], c["num_attention_heads"]
    width, inner = linear["head_dim"], linear["num_heads"] * linear["head_dim"]
    nope, shared, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    latent, middle = c["routed_expert_hidden_size"], c["moe_intermediate_size"]

    def delta() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "qkv":
            yield f"{name}_proj.weight", matrix(inner, hidden)
            yield f"{name}_conv1d.weight", kept(random.normal(size=(inner, 1, linear["short_conv_kernel_size"])) * 0.7,
                                                torch.float32)
        yield "f_a_proj.weight", matrix(width, hidden)
        yield "f_b_proj.weight", 0.25 * matrix(inner, width)
        yield "b_proj.weight", matrix(linear["num_heads"], hidden)
        yield "g_proj.weight", matrix(inner, hidden)
        yield "o_proj.weight", matrix(hidden, inner)
        yield "o_norm.weight", norm(width, torch.float32)
        rates = np.zeros(2 * linear["num_heads"])  # as published, where 96 of 128 are live
        rates[: linear["num_heads"]] = np.log(random.uniform(0.63, 2.74, linear["num_heads"]))
        yield "A_log", kept(rates, torch.float32)
        yield "dt_bias", kept(random.normal(-1.3, 1.2, inner), torch.float32)

    def full() -> Iterator[tuple[str, torch.Tensor]]:
        yield "q_a_proj.weight", matrix(c["q_lora_rank"], hidden)
        yield "q_a_layernorm.weight", norm(c["q_lora_rank"])
        yield "q_b_proj.weight", matrix(heads * (nope + shared), c["q_lora_rank"])
        yield "kv_a_proj_with_mqa.weight", matrix(c["kv_lora_rank"] + shared, hidden)
        yield "kv_a_layernorm.weight", norm(c["kv_lora_rank"])
        yield "kv_b_proj.weight", matrix(heads * (nope + value), c["kv_lora_rank"])
        yield "g_proj.weight", matrix(heads * value, hidden)
        yield "o_proj.weight", matrix(hidden, heads * value)

    def mlp(size: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield "gate_proj.weight", matrix(size, hidden)
        yield "up_proj.weight", matrix(size, hidden)
        yield "down_proj.weight", matrix(hidden, size)

    def experts() -> Iterator[tuple[str, torch.Tensor]]:
        yield "gate.weight", matrix(c["num_experts"], hidden)
        yield "gate.e_score_correction_bias", kept(0.1 * random.normal(size=c["num_experts"]), torch.float32)
        yield "routed_expert_down_proj.weight", matrix(latent, hidden)
        yield "routed_expert_norm.weight", norm(latent)
        yield "routed_expert_up_proj.weight", matrix(hidden, latent)
        yield from ((f"shared_experts.{name}", t) for name, t in mlp(c["num_shared_experts"] * middle))
        for e in range(c["num_experts"]):
            for name, shape in (("w1", (middle, latent)), ("w3", (middle, latent)), ("w2", (latent, middle))):
                yield from ((f"experts.{e}.{name}.{part}", t) for part, t in packed(*shape).items())

    prefix = "language_model."
    yield f"{prefix}model.embed_tokens.weight", kept(random.normal(size=(c["vocab_size"], hidden)))
    yield f"{prefix}lm_head.weight", matrix(c["vocab_size"], hidden)
    yield f"{prefix}model.norm.weight", norm(hidden)
    for name in ("model.output_attn_res", *(f"model.layers.{i}.{name}" for i in range(c["num_hidden_layers"])
                                            for name in ("self_attention_res", "mlp_res"))):
        yield f"{prefix}{name}_norm.weight", norm(hidden)
        yield f"{prefix}{name}_proj.weight", matrix(1, hidden)
    for i in range(c["num_hidden_layers"]):
        at = f"{prefix}model.layers.{i}."
        yield f"{at}input_layernorm.weight", norm(hidden)
        yield f"{at}post_attention_layernorm.weight", norm(hidden)
        yield from ((f"{at}self_attn.{name}", t) for name, t in (delta() if i + 1 in linear["kda_layers"] else full()))
        dense = i < c["first_k_dense_replace"]
        yield from ((f"{at}{'mlp' if dense else 'block_sparse_moe'}.{name}", t)
                    for name, t in (mlp(c["intermediate_size"]) if dense else experts()))
    yield "vision_tower.encoder.blocks.0.wqkv.weight", matrix(48, 16)
    yield "mm_projector.proj.0.weight", matrix(64, 64)
    yield "mm_projector.proj.2.weight", matrix(64, 64)


# ---- the reference


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


class Reference:
    """float64 from a folder's own files. ``decays`` are the log-decays of every KDA layer run last, [T, H, K] each,
    ``margins`` by how much each token's last chosen expert scores above the first one left out, a MoE layer each."""

    def __init__(self, folder: Path):
        from safetensors import safe_open

        self.c = json.loads((folder / "config.json").read_text())["text_config"]
        self.tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    tensor = opened.get_tensor(name)
                    self.tensors[name] = tensor.numpy() if "weight_" in name else tensor.double().numpy()

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[f"language_model.model.{name}"]

    def expert(self, name: str) -> np.ndarray:
        packed, scales = self[f"{name}.weight_packed"], self[f"{name}.weight_scale"]
        codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
        codes[:, 0::2], codes[:, 1::2] = packed % 16, packed // 16
        return E2M1[codes] * np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=1)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """[T, vocabulary]."""
        eps, block = self.c["rms_norm_eps"], self.c["attn_res_block_size"]
        self.decays, self.margins = [], []
        prefix, bank = self["embed_tokens.weight"][tokens], []
        for i in range(self.c["num_hidden_layers"]):
            at = f"layers.{i}"
            x = self.residual(prefix, bank, f"{at}.self_attention_res")
            x = rms(x, self[f"{at}.input_layernorm.weight"], eps)
            delta = i + 1 in self.c["linear_attn_config"]["kda_layers"]
            mixed = (self.delta if delta else self.full)(x, f"{at}.self_attn")
            if i % block == 0:
                bank.append(prefix)
                prefix = mixed
            else:
                prefix = prefix + mixed
            x = self.residual(prefix, bank, f"{at}.mlp_res")
            x = rms(x, self[f"{at}.post_attention_layernorm.weight"], eps)
            dense = i < self.c["first_k_dense_replace"]
            prefix = prefix + (self.mlp(x, f"{at}.mlp") if dense else self.experts(x, f"{at}.block_sparse_moe"))
        x = rms(self.residual(prefix, bank, "output_attn_res"), self["norm.weight"], eps)
        return x @ self.tensors["language_model.lm_head.weight"].T

    def residual(self, prefix: np.ndarray, bank: list[np.ndarray], name: str) -> np.ndarray:
        if not bank:
            return prefix
        weight = self[f"{name}_norm.weight"] * self[f"{name}_proj.weight"][0]
        sources = [*bank, prefix]
        scores = np.stack([(s * weight).sum(-1) / np.sqrt((s * s).mean(-1) + self.c["rms_norm_eps"]) for s in sources])
        shares = np.exp(scores - scores.max(0))
        shares /= shares.sum(0)
        return sum(share[:, None] * s for share, s in zip(shares, sources))

    def situ(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        beta, gamma = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
        return beta * np.tanh(gate / beta) * sigmoid(gate) * gamma * np.tanh(up / gamma)

    def mlp(self, x: np.ndarray, at: str) -> np.ndarray:
        gate, up = (x @ self[f"{at}.{name}_proj.weight"].T for name in ("gate", "up"))
        return self.situ(gate, up) @ self[f"{at}.down_proj.weight"].T

    def experts(self, x: np.ndarray, at: str) -> np.ndarray:
        k = self.c["num_experts_per_token"]
        scores = sigmoid(x @ self[f"{at}.gate.weight"].T)
        ranked = scores + self[f"{at}.gate.e_score_correction_bias"]
        best = np.sort(ranked, axis=-1)[:, ::-1]
        self.margins.append(best[:, k - 1] - best[:, k])
        latent = x @ self[f"{at}.routed_expert_down_proj.weight"].T
        result = np.zeros_like(latent)
        for t in range(len(x)):
            chosen = np.argsort(-ranked[t])[:k]
            total = scores[t, chosen].sum() + 1e-20
            for e in chosen:
                w1, w2, w3 = (self.expert(f"{at}.experts.{e}.{name}") for name in ("w1", "w2", "w3"))
                share = scores[t, e] / total * self.c["routed_scaling_factor"]
                result[t] += share * (w2 @ self.situ(w1 @ latent[t], w3 @ latent[t]))
        result = rms(result, self[f"{at}.routed_expert_norm.weight"], self.c["rms_norm_eps"])
        return result @ self[f"{at}.routed_expert_up_proj.weight"].T + self.mlp(x, f"{at}.shared_experts")

    def full(self, x: np.ndarray, at: str) -> np.ndarray:
        count, heads = len(x), self.c["num_attention_heads"]
        nope, shared, width = self.c["qk_nope_head_dim"], self.c["qk_rope_head_dim"], self.c["v_head_dim"]
        query = rms(x @ self[f"{at}.q_a_proj.weight"].T, self[f"{at}.q_a_layernorm.weight"], 1e-6)
        query = (query @ self[f"{at}.q_b_proj.weight"].T).reshape(count, heads, nope + shared)
        both = x @ self[f"{at}.kv_a_proj_with_mqa.weight"].T
        latent = rms(both[:, : self.c["kv_lora_rank"]], self[f"{at}.kv_a_layernorm.weight"], 1e-6)
        rows = (latent @ self[f"{at}.kv_b_proj.weight"].T).reshape(count, heads, nope + width)
        result = np.zeros((count, heads, width))
        for h in range(heads):
            key = np.concatenate([rows[:, h, :nope], both[:, self.c["kv_lora_rank"] :]], axis=1)
            for t in range(count):
                scores = key[: t + 1] @ query[t, h] / np.sqrt(nope + shared)
                shares = np.exp(scores - scores.max())
                result[t, h] = shares / shares.sum() @ rows[: t + 1, h, nope:]
        gate = sigmoid(x @ self[f"{at}.g_proj.weight"].T)
        return (result.reshape(count, -1) * gate) @ self[f"{at}.o_proj.weight"].T

    def delta(self, x: np.ndarray, at: str) -> np.ndarray:
        linear, count = self.c["linear_attn_config"], len(x)
        heads, width, taps = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]

        def mixed(name: str) -> np.ndarray:
            rows, filters = x @ self[f"{at}.{name}_proj.weight"].T, self[f"{at}.{name}_conv1d.weight"][:, 0]
            padded = np.concatenate([np.zeros((taps - 1, rows.shape[1])), rows])
            rows = sum(padded[i : i + count] * filters[:, i] for i in range(taps))
            return (rows * sigmoid(rows)).reshape(count, heads, width)

        query, key, value = mixed("q"), mixed("k"), mixed("v")
        query = query / np.sqrt((query * query).sum(-1, keepdims=True) + 1e-6) / np.sqrt(width)
        key = key / np.sqrt((key * key).sum(-1, keepdims=True) + 1e-6)
        raw = x @ self[f"{at}.f_a_proj.weight"].T @ self[f"{at}.f_b_proj.weight"].T + self[f"{at}.dt_bias"]
        rates = np.exp(self[f"{at}.A_log"][:heads])[:, None]
        decay = linear["gate_lower_bound"] * sigmoid(rates * raw.reshape(count, heads, width))
        self.decays.append(decay)
        beta = sigmoid(x @ self[f"{at}.b_proj.weight"].T)
        result = np.zeros((count, heads, width))
        for h in range(heads):
            state = np.zeros((width, width))  # values by keys
            for t in range(count):
                state = state * np.exp(decay[t, h])
                change = beta[t, h] * (value[t, h] - state @ key[t, h])
                state = state + np.outer(change, key[t, h])
                result[t, h] = state @ query[t, h]
        gate = sigmoid(x @ self[f"{at}.g_proj.weight"].T)
        normed = rms(result, self[f"{at}.o_norm.weight"], self.c["rms_norm_eps"])
        return (normed.reshape(count, -1) * gate) @ self[f"{at}.o_proj.weight"].T
