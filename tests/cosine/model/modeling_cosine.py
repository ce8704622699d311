"""A model as its authors publish it: Qwen3 with query-key normalisation by an operator of their own."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


@torch.library.custom_op("cosine::l2_norm", mutates_args=())
def l2_norm(x: torch.Tensor, temperature: torch.Tensor, eps: float) -> torch.Tensor:
    """x[..., H, D] with rows of length temperature[H]."""
    return temperature[:, None] * torch.nn.functional.normalize(x, dim=-1, eps=eps)


@l2_norm.register_fake
def _(x, temperature, eps):
    return torch.empty_like(x)


class CosineConfig(Qwen3Config):
    model_type = "cosine"

    def __init__(self, norm_eps=1e-6, **kwargs):
        self.norm_eps = norm_eps
        super().__init__(**kwargs)


class CosineNorm(torch.nn.Module):
    def __init__(self, heads, eps):
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.ones(heads))
        self.eps = eps

    def forward(self, x):
        return l2_norm(x, self.temperature, self.eps)


class CosineForCausalLM(Qwen3ForCausalLM):
    config_class = CosineConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.q_norm = CosineNorm(config.num_attention_heads, config.norm_eps)
            layer.self_attn.k_norm = CosineNorm(config.num_key_value_heads, config.norm_eps)
        self.post_init()
