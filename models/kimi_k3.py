"""Kimi K3's text model, which transformers lacks: one device, plain torch, no cache.

Layers alternate between Kimi delta attention (KDA: a gated delta rule whose decay is each channel's own) and latent
attention (MLA) without positions. Residuals aren't one stream: sublayers read a mixture, by learned scores, of what
earlier blocks of layers have added up (AttnRes). Experts work in a latent space. It is written against transformers'
extension points (attention interface, mask builders, experts interface, kernels by name), as its own models are.
Shapes: B sequences of T tokens, D hidden, H heads of K columns, L latent columns, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations import use_experts_implementation, use_kernel_func_from_hub_with_fallback
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@strict
class KimiK3Config(PreTrainedConfig):
    """The ``text_config`` of published files. ``linear_attn_config`` numbers layers from 1."""

    model_type = "kimi_k3"

    vocab_size: int = 163840
    hidden_size: int = 7168
    num_hidden_layers: int = 93
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attn_res_block_size: int = 12
    linear_attn_config: dict[str, Any] | None = None

    num_attention_heads: int = 96
    num_key_value_heads: int = 96
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True

    hidden_act: str = "situ"
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    intermediate_size: int = 33792
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_experts: int = 896
    num_experts_per_token: int = 16
    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int = 3584
    latent_moe_use_norm: bool = True
    moe_router_activation_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    initializer_range: float = 0.02


ALWAYS = {
    "mla_use_nope": True, "mla_use_output_gate": True, "hidden_act": "situ", "moe_layer_freq": 1,
    "latent_moe_use_norm": True, "moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc",
    "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True,
    "tie_word_embeddings": False,
}
"""Keys that choose between K3 and something else, and what they say of K3: this module is nothing else."""


def check(config: KimiK3Config) -> None:
    """ValueError for a configuration that is not a K3: each key that this module doesn't vary by is looked at here."""
    for key, value in ALWAYS.items():
        if getattr(config, key) != value:
            raise ValueError(f"{key} is {getattr(config, key)!r}; Kimi K3 has {value!r}")
    if config.num_key_value_heads != config.num_attention_heads:
        raise ValueError(f"num_key_value_heads is {config.num_key_value_heads}; latent attention has as many as heads, "
                         f"{config.num_attention_heads}")
    linear = config.linear_attn_config
    if not linear["use_full_rank_gate"]:
        raise ValueError("linear_attn_config.use_full_rank_gate is false; Kimi K3 has a gate of full rank")
    if not linear["gate_lower_bound"] < 0:
        raise ValueError(f"linear_attn_config.gate_lower_bound is {linear['gate_lower_bound']}; the log of a decay is "
                         "negative")
    layers = sorted([*linear["kda_layers"], *linear["full_attn_layers"]])
    if layers != list(range(1, config.num_hidden_layers + 1)):
        raise ValueError("linear_attn_config names some of the layers in neither or both of kda_layers and "
                         "full_attn_layers")


class KimiK3RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def attention_residual(prefix: torch.Tensor, bank: Sequence[torch.Tensor], norm: KimiK3RMSNorm,
                       score: nn.Linear) -> torch.Tensor:
    """AttnRes: the mixture [B, T, D] of finished blocks and of what the current one has added up so far. Scores are of
    the normalised sources; mixed are the sources themselves."""
    sources = torch.stack((*bank, prefix), dim=-2)
    weights = score(norm(sources)).float().softmax(dim=-2)
    return (weights * sources).sum(dim=-2).to(prefix.dtype)


def situ(gate: torch.Tensor, up: torch.Tensor, config: KimiK3Config) -> torch.Tensor:
    """SiTU: a gated SiLU whose two factors saturate at ``activation_situ_beta`` and ``activation_situ_linear_beta``."""
    most, widest = config.activation_situ_beta, config.activation_situ_linear_beta
    wide_gate, wide_up = gate.float(), up.float()
    gated = most * torch.tanh(wide_gate / most) * torch.sigmoid(wide_gate)
    return (gated * widest * torch.tanh(wide_up / widest)).to(gate.dtype)


# ---- feed-forward layers


class KimiK3MLP(nn.Module):
    def __init__(self, config: KimiK3Config, inner: int):
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), self.config))


class KimiK3Router(nn.Module):
    def __init__(self, config: KimiK3Config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.empty(config.num_experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, D] → the experts chosen [tokens, k] and their weights, which the correction bias has no part in."""
        scores = functional.linear(x.float(), self.weight.float()).sigmoid()
        chosen = torch.topk(scores + self.e_score_correction_bias, self.config.num_experts_per_token, dim=-1)[1]
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, weights * self.config.routed_scaling_factor


@use_experts_implementation
class KimiK3Experts(nn.Module):
    """All routed experts of a layer, in the latent space."""

    def __init__(self, config: KimiK3Config):
        super().__init__()
        latent, inner = config.routed_expert_hidden_size, config.moe_intermediate_size
        self.num_experts = config.num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * inner, latent))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, latent, inner))

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return situ(*gate_up.chunk(2, dim=-1), self.config)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states [tokens, L], the choices and their weights [tokens, k] → [tokens, L]."""
        result = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, slot = torch.where(top_k_index == expert)
            inner = self._apply_gate(functional.linear(hidden_states[token], self.gate_up_proj[expert]))
            one = functional.linear(inner, self.down_proj[expert]) * top_k_weights[token, slot, None]
            result.index_add_(0, token, one.to(result.dtype))
        return result


class KimiK3SparseMoE(nn.Module):
    """Routed experts between a map into the latent space and one out of it; shared experts beside them."""

    def __init__(self, config: KimiK3Config):
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = KimiK3Router(config)
        self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False)
        self.experts = KimiK3Experts(config)
        self.routed_expert_norm = KimiK3RMSNorm(latent, config.rms_norm_eps)
        self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False)
        self.shared_experts = KimiK3MLP(config, config.num_shared_experts * config.moe_intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(-1, x.shape[-1])
        routed = self.experts(self.routed_expert_down_proj(tokens), *self.gate(tokens))
        return self.routed_expert_up_proj(self.routed_expert_norm(routed)).view(x.shape) + self.shared_experts(x)


# ---- latent attention


def eager_attention_forward(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                            attention_mask: torch.Tensor | None, scaling: float, **kwargs: Any):
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if attention_mask is None else scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class KimiK3Attention(nn.Module):
    """MLA without positions: the columns of the shared key that others rotate stand as they are."""

    def __init__(self, config: KimiK3Config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.heads, self.is_causal, self.num_key_value_groups = config.num_attention_heads, True, 1
        self.nope, self.shared, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.latent = config.kv_lora_rank
        self.scaling = (self.nope + self.shared) ** -0.5
        hidden, rank = config.hidden_size, config.q_lora_rank
        self.q_a_proj = nn.Linear(hidden, rank, bias=False)
        self.q_a_layernorm = KimiK3RMSNorm(rank, LATENT_EPS)
        self.q_b_proj = nn.Linear(rank, self.heads * (self.nope + self.shared), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.latent + self.shared, bias=False)
        self.kv_a_layernorm = KimiK3RMSNorm(self.latent, LATENT_EPS)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.nope + self.value), bias=False)
        self.g_proj = nn.Linear(hidden, self.heads * self.value, bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=False)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        batch, count = x.shape[:2]
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.view(batch, count, self.heads, self.nope + self.shared).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.latent, self.shared], dim=-1)
        rows = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, count, self.heads, self.nope + self.value)
        key, value = rows.transpose(1, 2).split([self.nope, self.value], dim=-1)
        key = torch.cat((key, shared.unsqueeze(1).expand(-1, self.heads, -1, -1)), dim=-1)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        result, _ = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling)
        return self.o_proj(result.reshape(batch, count, -1) * self.g_proj(x).sigmoid())


LATENT_EPS = 1e-6
"""Of the two norms inside latent attention; no key says it."""


# ---- Kimi delta attention


@use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")
def causal_conv1d_fn(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
                     activation: str | None = None, **kwargs: Any) -> torch.Tensor:
    """[B, C, T], a filter [C, W] for each channel whose last tap meets the current token → [B, C, T]."""
    channels, width = weight.shape
    padded = functional.pad(hidden_states.to(weight.dtype), (width - 1, 0))
    result = functional.conv1d(padded, weight.unsqueeze(1), bias, groups=channels)
    return (functional.silu(result) if activation == "silu" else result).to(hidden_states.dtype)


@use_kernel_func_from_hub_with_fallback("chunk_kda", "fla")
def chunk_kda(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
              initial_state: torch.Tensor | None = None, output_final_state: bool = False,
              use_qk_l2norm_in_kernel: bool = False, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The delta rule token by token, in float32: query, key, value and log-decays ``g`` [B, T, H, K], ``beta`` [B, T, H]
    → [B, T, H, K] and the state [B, H, K, K]. Queries are scaled by K^-0.5."""
    dtype = query.dtype
    query, key, value, g, beta = (x.float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    state = initial_state
    if state is None:
        state = value.new_zeros(key.shape[0], key.shape[2], key.shape[3], value.shape[3])
    rows = []
    for t in range(query.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        known = (state * key[:, t].unsqueeze(-1)).sum(-2)
        change = beta[:, t].unsqueeze(-1) * (value[:, t] - known)
        state = state + key[:, t].unsqueeze(-1) * change.unsqueeze(-2)
        rows.append((state * query[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(rows, dim=1).to(dtype), state if output_final_state else None


class KimiK3GatedRMSNorm(KimiK3RMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * gate.float().sigmoid().to(x.dtype)


class KimiK3ForgetGate(nn.Module):
    """The safe gate: log-decays [B, T, H, K] between ``gate_lower_bound`` and 0."""

    def __init__(self, config: KimiK3Config):
        super().__init__()
        linear = config.linear_attn_config
        self.heads, self.width = linear["num_heads"], linear["head_dim"]
        self.lower_bound = float(linear["gate_lower_bound"])
        self.f_a_proj = nn.Linear(config.hidden_size, self.width, bias=False)
        self.f_b_proj = nn.Linear(self.width, self.heads * self.width, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.heads * self.width))
        self.A_log = nn.Parameter(torch.empty(self.heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rate = self.f_b_proj(self.f_a_proj(x)).float() + self.dt_bias
        rate = rate.view(*x.shape[:2], self.heads, self.width)
        return self.lower_bound * torch.sigmoid(self.A_log.float().exp().view(-1, 1) * rate)


class KimiK3DeltaAttention(nn.Module):

    def __init__(self, config: KimiK3Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        linear, hidden = config.linear_attn_config, config.hidden_size
        self.heads, self.width = linear["num_heads"], linear["head_dim"]
        inner, taps = self.heads * self.width, linear["short_conv_kernel_size"]
        self.q_proj = nn.Linear(hidden, inner, bias=False)
        self.k_proj = nn.Linear(hidden, inner, bias=False)
        self.v_proj = nn.Linear(hidden, inner, bias=False)
        self.conv1d = nn.Conv1d(3 * inner, 3 * inner, taps, groups=3 * inner, bias=False)
        self.forget_gate = KimiK3ForgetGate(config)
        self.b_proj = nn.Linear(hidden, self.heads, bias=False)
        self.g_proj = nn.Linear(hidden, inner, bias=False)
        self.o_norm = KimiK3GatedRMSNorm(self.width, config.rms_norm_eps)
        self.o_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, self.width)
        mixed = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1).transpose(1, 2)
        mixed = causal_conv1d_fn(mixed, weight=self.conv1d.weight.squeeze(1), bias=None, activation="silu")
        query, key, value = (part.view(shape) for part in mixed.transpose(1, 2).chunk(3, dim=-1))
        result, _ = chunk_kda(query, key, value, g=self.forget_gate(x), beta=self.b_proj(x).sigmoid(),
                              use_qk_l2norm_in_kernel=True)
        result = self.o_norm(result, self.g_proj(x).view(shape))
        return self.o_proj(result.reshape(*x.shape[:2], -1))


# ---- the model


class KimiK3DecoderLayer(nn.Module):
    def __init__(self, config: KimiK3Config, layer_idx: int):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        delta = layer_idx + 1 in config.linear_attn_config["kda_layers"]
        self.self_attn = (KimiK3DeltaAttention if delta else KimiK3Attention)(config, layer_idx)
        self.opens_block = layer_idx % config.attn_res_block_size == 0
        dense = layer_idx < config.first_k_dense_replace
        self.mlp = KimiK3MLP(config, config.intermediate_size) if dense else KimiK3SparseMoE(config)
        self.input_layernorm = KimiK3RMSNorm(hidden, eps)
        self.post_attention_layernorm = KimiK3RMSNorm(hidden, eps)
        self.mlp_res_norm = KimiK3RMSNorm(hidden, eps)
        self.mlp_res_proj = nn.Linear(hidden, 1, bias=False)
        if layer_idx:  # before the first layer there is one source alone
            self.self_attention_res_norm = KimiK3RMSNorm(hidden, eps)
            self.self_attention_res_proj = nn.Linear(hidden, 1, bias=False)

    def forward(self, prefix: torch.Tensor, bank: tuple[torch.Tensor, ...],
                attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """``prefix`` [B, T, D] is what the current block has added up, ``bank`` the sums of those before it."""
        x = prefix if not bank else attention_residual(prefix, bank, self.self_attention_res_norm,
                                                       self.self_attention_res_proj)
        mixed = self.self_attn(self.input_layernorm(x), attention_mask)
        if self.opens_block:  # its mixer still reads the bank without the block that ends here
            prefix, bank = mixed, (*bank, prefix)
        else:
            prefix = prefix + mixed
        x = attention_residual(prefix, bank, self.mlp_res_norm, self.mlp_res_proj)
        return prefix + self.mlp(self.post_attention_layernorm(x)), bank


class KimiK3PreTrainedModel(PreTrainedModel):
    config: KimiK3Config
    base_model_prefix = "model"
    _no_split_modules = ["KimiK3DecoderLayer"]
    _supports_sdpa = True


class KimiK3Model(KimiK3PreTrainedModel):
    def __init__(self, config: KimiK3Config):
        super().__init__(config)
        check(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(KimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.output_attn_res_norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.output_attn_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None,
                **kwargs: Any) -> BaseModelOutput:
        prefix, bank = self.embed_tokens(input_ids), ()
        mask = create_causal_mask(config=self.config, inputs_embeds=prefix, attention_mask=attention_mask, cache=None)
        for layer in self.layers:
            prefix, bank = layer(prefix, bank, mask)
        x = attention_residual(prefix, bank, self.output_attn_res_norm, self.output_attn_res_proj)
        return BaseModelOutput(last_hidden_state=self.norm(x))


class KimiK3ForCausalLM(KimiK3PreTrainedModel):
    """Logits [B, T, vocabulary] of whole sequences of token ids [B, T]."""

    def __init__(self, config: KimiK3Config):
        super().__init__(config)
        self.model = KimiK3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None,
                **kwargs: Any) -> CausalLMOutput:
        hidden = self.model(input_ids, attention_mask, **kwargs).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden))


CONFIG, MODEL = KimiK3Config, KimiK3ForCausalLM
