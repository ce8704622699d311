"""Recurrences: each restatement gives what the authors' own torch code gives, at decays and steps of time that models
have, within chunks, across their bounds and for lengths that no chunk divides."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from adaptc.capture import hooks, recurrence

torch.set_num_threads(1)

CHUNK = 16
LENGTHS = (1, 5, CHUNK, 2 * CHUNK, 2 * CHUNK + 5)


def convolve(x, weight, bias):
    past = F.pad(x, (0, 0, weight.shape[1] - 1, 0))
    result = sum(past[:, i : i + x.shape[1]] * weight[:, i] for i in range(weight.shape[1]))
    return result if bias is None else result + bias


def recur(query, key, value, decay, beta, read):
    held, results = query.new_zeros(*query.shape[::2], query.shape[3], value.shape[3], dtype=torch.float64), []
    query, key, value, decay = (x.double() for x in (query, key, value, decay))
    for t in range(query.shape[1]):
        before, held = held, decay[:, t].exp()[..., None] * held
        update = value[:, t]
        if beta is not None:
            update = beta[:, t, :, None] * (update - torch.einsum("bhk,bhkv->bhv", key[:, t], held))
        held = held + key[:, t, :, :, None] * update[:, :, None]
        results.append(torch.einsum("bhk,bhkv->bhv", query[:, t], before if read == "before" else held))
    return torch.stack(results, 1).float()


def running_max(x, decay):
    held, results = torch.full_like(x[:, 0], -math.inf), []
    for t in range(x.shape[1]):
        held = torch.maximum(held + decay[:, t], x[:, t])
        results.append(held)
    return torch.stack(results, 1)


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """The three operators written out, so that restatements run."""
    hooks.operators()
    library = torch.library.Library("adaptc", "FRAGMENT")
    for function in (convolve, recur, running_max):
        library.impl(function.__name__, function, "CPU")
    yield
    library._destroy()


def normal(*shape, scale=1.0, around=0.0):
    return torch.randn(shape) * scale + around


def log_uniform(low, high, *shape):
    return torch.exp(torch.empty(shape).uniform_(math.log(low), math.log(high)))


def time_steps(*shape):
    """Before softplus, of steps of 0.0005 to 1."""
    return torch.log(torch.expm1(log_uniform(5e-4, 1.0, *shape)))


def gated_delta_rule(t):
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as authors

    heads = 4
    query, key, value = normal(1, t, 2, 8), normal(1, t, 2, 8), normal(1, t, heads, 12)
    g = -log_uniform(0.01, 16, heads) * F.softplus(time_steps(1, t, heads))
    return authors, (query, key, value), dict(g=g, beta=normal(1, t, heads).sigmoid(), chunk_size=CHUNK,
                                              use_qk_l2norm_in_kernel=True)


def delta_attention(t):
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention as authors

    query, key, value = (normal(1, t, 3, 8) for _ in range(3))
    forgets = -log_uniform(0.01, 16, 3, 1) * F.softplus(time_steps(1, t, 3, 8))
    safe = -5 * torch.sigmoid(normal(1, t, 3, 8, scale=4.0))  # with a bound below
    g = torch.where(torch.arange(3)[:, None] == 0, safe, forgets)
    return authors, (query, key, value), dict(g=g, beta=normal(1, t, 3).sigmoid(), chunk_size=CHUNK,
                                              use_qk_l2norm_in_kernel=True)


def selective_scan(t):
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan as authors

    channels, width = 6, 16
    decays = -torch.arange(1.0, width + 1).expand(channels, width)
    bias = time_steps(channels)
    return authors, (normal(1, channels, t), normal(1, channels, t, scale=0.3), decays, normal(1, width, t),
                     normal(1, width, t)), dict(D=normal(channels), z=normal(1, channels, t), delta_bias=bias,
                                                delta_softplus=True)


def chunk_scan(t):
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan as authors

    heads, width = 4, 16
    return authors, (normal(1, t, heads, 8), normal(1, t, heads, scale=0.3), -torch.arange(1.0, heads + 1),
                     normal(1, t, 2, width), normal(1, t, 2, width), CHUNK), dict(
        D=normal(heads), dt_bias=time_steps(heads), dt_softplus=True, dt_limit=(0.001, 0.4))


def rwkv(t):
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention as authors

    channels = 8
    return authors, (torch.linspace(-6, 3, channels), normal(channels), normal(1, t, channels, scale=20.0),
                     normal(1, t, channels)), {}


def mlstm(t):
    from transformers.models.xlstm import modeling_xlstm as file

    heads = 3
    authors = functools.partial(
        file.wrap_chunkwise_arbitrary_sequence_length, chunk_size=CHUNK, eps=1e-6,
        mlstm_chunkwise_kernel=file.mlstm_chunkwise_native_autograd,
        mlstm_sequence_kernel=file.mlstm_recurrent_sequence_native, mlstm_step_kernel=file.mlstm_recurrent_step_native)
    gate = normal(1, heads, t, scale=6.0, around=-4.0)
    # keys and queries of one direction: a norm near 0 would be what rounding makes of it
    query, key = (normal(1, heads, t, 8, around=2.0) for _ in range(2))
    return authors, (), dict(query=query, key=key, value=normal(1, heads, t, 12),
                             igate=gate, fgate=normal(1, heads, t, around=4.0, scale=2.0))


def rglru(t):
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    channels = 8
    gate = torch.exp(-8 * normal(1, t, channels).sigmoid() * F.softplus(torch.linspace(-9, 1, channels)))
    reset = torch.arange(t)[None, :, None] == 0
    return RecurrentGemmaRglru._rnn_scan, (None, normal(1, t, channels), gate, reset, None), {}


def lightning_attention(t):
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = MiniMaxConfig(hidden_size=32, num_attention_heads=4, head_dim=8, block_size=CHUNK, num_hidden_layers=4)
    torch.manual_seed(1)
    module = MiniMaxLightningAttention(config, 1)
    return MiniMaxLightningAttention.forward, (module, normal(1, t, 32)), dict(position_embeddings=None, attention_mask=None)


CASES = {function.__name__: function for function in (
    gated_delta_rule, delta_attention, selective_scan, chunk_scan, rwkv, mlstm, rglru, lightning_attention)}


def test_every_recurrence_has_a_case():
    assert set(CASES) == {scan.restated.__name__ for scan in recurrence.SCANS.values()}


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("name", CASES)
def test_a_restatement_gives_what_the_authors_code_gives(name, t):
    torch.manual_seed(t)
    authors, args, keywords = CASES[name](t)
    with torch.no_grad():
        wanted, got = (f(*args, **keywords) for f in (authors, getattr(recurrence, name)))
    wanted, got = (x[0] if isinstance(x, tuple) else x for x in (wanted, got))
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert torch.isfinite(wanted).all() and wanted.abs().max() > 1e-3
    np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=2e-5, atol=2e-5 * float(wanted.abs().max()))
