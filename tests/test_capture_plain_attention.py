"""Attention that authors write out becomes the operator, when and only when its mask means causal or a window."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from test_capture import SMALL, build, close, logits, tokens_of, weights
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.inkling.modeling_inkling import InklingRelativeLogits
from transformers.models.inkling2.modeling_inkling2 import eager_attention_forward
from transformers.models.llama import modeling_llama

from adaptc.backends.reference.interpreter import Reference
from adaptc.capture import capture_module
from adaptc.errors import CaptureError
from adaptc.ir.build import attrs_of, short_name

torch.set_num_threads(1)

LEAST = torch.finfo(torch.float32).min
WINDOW = 6
ROOT = 8**0.5
SLOPES = (0.5, 0.25, 0.1, 0.7)


def tril(t, diagonal=0):
    return torch.tril(torch.ones(t, t, dtype=torch.bool), diagonal)


def counted(t):
    """Pairs of positions: of the token, and of the one that it sees."""
    positions = torch.arange(t)
    return positions[:, None], positions[None, :]


def product(q, k):
    return torch.matmul(q, k.transpose(-1, -2))


def finish(scores, v):
    return torch.matmul(torch.softmax(scores, -1), v)


def cut_table(m, q, k, v, mask):
    t = q.shape[2]
    seen = m.table[:, :, k.shape[2] - t : k.shape[2], : k.shape[2]]
    return finish(torch.where(seen, product(q, k) / ROOT, torch.tensor(LEAST)), v)


def multiplied(m, q, k, v, mask):
    seen = tril(q.shape[2]).float()
    return finish(product(q, k) / ROOT * seen - 1e4 * (1 - seen), v)


def in_place(m, q, k, v, mask):
    scores = product(q, k)
    scores /= ROOT
    scores += mask
    return finish(scores, v)


def flat_heads(m, q, k, v, mask):
    """Three dimensions, and a bound from below."""
    heads, t, width = q.shape[1:]
    q, k, v = (x.reshape(heads, t, width) for x in (q * ROOT**-1, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(1, heads, t, t) + mask
    scores = torch.max(scores, torch.full((), LEAST)).view(heads, t, t)
    weights = torch.softmax(scores, -1).view(1, heads, t, t).view(heads, t, t)
    weights = torch.nn.functional.dropout(weights, 0.5, training=False)
    return torch.bmm(weights, v).view(1, heads, t, width)


def added_product(m, q, k, v, mask):
    heads, t, width = q.shape[1:]
    q, k = (x.reshape(heads, t, width) for x in (q, k))
    scores = torch.baddbmm(torch.zeros(heads, t, t), q, k.transpose(1, 2), beta=1.0, alpha=1 / ROOT)
    return finish(scores.view(1, heads, t, t) + mask, v)


def in_float32(m, q, k, v, mask):
    scores = product(q.to(torch.float32), k.to(torch.float32)) / ROOT + mask
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype), v)


def compared(m, q, k, v, mask):
    i, j = counted(q.shape[2])
    return finish((product(q, k) / ROOT).masked_fill(j > i, -math.inf), v)


def inverted(m, q, k, v, mask):
    """The builder's mask as truth values: what is masked isn't 0."""
    return finish((product(q, k) / ROOT).masked_fill(mask.to(torch.bool), LEAST), v)


def windowed(m, q, k, v, mask):
    i, j = counted(q.shape[2])
    return finish(product(q, k) / ROOT + torch.where((j <= i) & (i - j < WINDOW), 0.0, LEAST), v)


def window_of_tables(m, q, k, v, mask):
    t = q.shape[2]
    seen = torch.bitwise_xor(tril(t), tril(t, -WINDOW))
    return finish(torch.where(seen, product(q, k) / ROOT, LEAST), v)


def one_key_head(m, q, k, v, mask):
    return finish(product(q, k[:, :1]) / ROOT + mask, v[:, :1])


def slanted_by_key(m, q, k, v, mask):
    """ALiBi by the key's position, within a sum of a product, as Bloom has it."""
    heads, t, width = q.shape[1:]
    slopes = torch.pow(torch.full((), 0.25), torch.arange(1, heads + 1))
    bias = (slopes[:, None] * (torch.ones(1, t).cumsum(-1) - 1)).view(heads, 1, t)
    scores = torch.baddbmm(bias, q.reshape(heads, t, width), k.reshape(heads, t, width).transpose(1, 2), beta=1.0,
                           alpha=1 / ROOT)
    return finish(scores.view(1, heads, t, t) + mask, v)


def slanted_window(m, q, k, v, mask):
    i, j = counted(q.shape[2])
    scores = product(q, k) / ROOT + torch.tensor(SLOPES).view(4, 1, 1) * (j - i)
    return finish(scores.masked_fill((j > i) | (i - j >= WINDOW), -math.inf), v)


def sdpa_slanted(m, q, k, v, mask):
    i, j = counted(q.shape[2])
    bias = (0.5 * (j - i)).masked_fill(j > i, -math.inf).expand(1, 4, -1, -1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def by_interface(m, q, k, v, mask, extent=WINDOW, steps=1):
    """Inkling's bias, of each query by distance, and sinks of its own, given to the attention interface."""
    positions = torch.arange(q.shape[2])
    bias = InklingRelativeLogits.forward(mock.Mock(proj=m.profiles, rel_extent=extent), q.transpose(1, 2), positions,
                                         positions * steps)
    scale = (1 + positions.float() / 8).view(1, 1, -1, 1)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(m.config._attn_implementation, eager_attention_forward)
    return function(m, q, k[:, ::2], v[:, ::2], mask, scaling=0.3, position_bias=bias * scale,
                    sinks=q.sum(-1, keepdim=True))[0].transpose(1, 2)


def sdpa_causal(m, q, k, v, mask):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_mask(m, q, k, v, mask):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=tril(q.shape[2]), scale=0.5)


RAISED = {f.__name__: f for f in (
    cut_table, multiplied, in_place, flat_heads, added_product, in_float32, compared, inverted, windowed,
    window_of_tables, one_key_head, slanted_by_key, slanted_window, sdpa_slanted, sdpa_causal,
    sdpa_mask)}  # fmt: skip
WINDOWS = {"windowed": WINDOW, "window_of_tables": WINDOW, "slanted_window": WINDOW}
SLANTED = {"slanted_by_key": (0.25, 0.0625, 0.015625, 0.00390625), "slanted_window": SLOPES, "sdpa_slanted": (0.5,) * 4}


def unmasked(m, q, k, v, mask):
    return finish(product(q, k), v)


def one_ahead(m, q, k, v, mask):
    return finish(product(q, k).masked_fill(~tril(q.shape[2], 1), LEAST), v)


def not_itself(m, q, k, v, mask):
    return finish(product(q, k).masked_fill(~tril(q.shape[2], -1), LEAST), v)


def global_token(m, q, k, v, mask):
    i, j = counted(q.shape[2])
    return finish(product(q, k).masked_fill(~((j <= i) & ((i - j < WINDOW) | (j == 0))), LEAST), v)


def chunks(m, q, k, v, mask):
    i, j = counted(q.shape[2])
    return finish(product(q, k).masked_fill(~((j <= i) & (i // 4 == j // 4)), LEAST), v)


def barely_masked(m, q, k, v, mask):
    return finish(product(q, k) - 100.0 * (1 - tril(q.shape[2]).float()), v)


def far_sight(m, q, k, v, mask):
    """Tokens from the 45th on see everything."""
    i, j = counted(q.shape[2])
    return finish(product(q, k).masked_fill((j > i) & (i < 45), LEAST), v)


def far_chunks(m, q, k, v, mask):
    """Of about 50 tokens, bounded by what is no integer."""
    i, j = counted(q.shape[2])
    return finish(product(q, k).masked_fill((j > i) | ((i * 0.02).int() != (j * 0.02).int()), LEAST), v)


def window_by_count(m, q, k, v, mask):
    i, j = counted(q.shape[2])
    return finish(product(q, k).masked_fill((j > i) | (i - j >= 60 - q.shape[2]), LEAST), v)


def dropped(m, q, k, v, mask):
    return finish(torch.nn.functional.dropout(product(q, k)) + mask, v)


def by_distance(m, q, k, v, mask):
    i, j = counted(q.shape[2])
    return finish(product(q, k) - (i - j).abs() ** 2 + mask, v)


def rounded_by_key(m, q, k, v, mask):
    """ALiBi in bfloat16: its products are rounded."""
    bias = torch.tensor(0.3).bfloat16() * torch.arange(q.shape[2])
    return finish(product(q, k) / ROOT + bias.float() + mask, v)


def factor_by_distance(m, q, k, v, mask):
    i, j = counted(q.shape[2])
    return finish(product(q, k) / (1 + (i - j).abs()) + mask, v)


def factor_by_count(m, q, k, v, mask):
    return finish(product(q, k) / torch.ones(q.shape[2]).sum() + mask, v)


def by_values(m, q, k, v, mask):
    return finish(product(q, k) + v.sum(-1)[:, :, None, :] + mask, v)


def mask_by_values(m, q, k, v, mask):
    return finish((product(q, k) + mask).masked_fill((v.sum(-1) > 0)[:, :, None, :], LEAST), v)


def not_affine(m, q, k, v, mask):
    return finish(product(q, k).exp() + mask, v)


def weights_used(m, q, k, v, mask):
    weights = torch.softmax(product(q, k) + mask, -1)
    return torch.matmul(weights, v) + weights.sum(-1, keepdim=True)


def masked_afterwards(m, q, k, v, mask):
    return torch.matmul(torch.softmax(product(q, k) + mask, -1) * tril(q.shape[2], 0), v)


def sdpa_bidirectional(m, q, k, v, mask):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


REFUSED = {
    unmasked: "token 0 sees token 1",
    one_ahead: "token 0 sees token 1",
    not_itself: "of 2 tokens",
    global_token: "sees token 0",
    chunks: "of 5 tokens",
    barely_masked: "token 0 sees token 1",
    far_sight: "token 45 sees token 46",
    far_chunks: "of 64 tokens, token 14 sees token 0",
    window_by_count: "depends on the number of tokens",
    dropped: "drops elements at random",
    by_distance: "a bias by distance",
    rounded_by_key: "tokens show",
    factor_by_distance: "several factors",
    factor_by_count: "depends on the number of tokens",
    by_values: "depends on tokens",
    mask_by_values: "depends on tokens",
    not_affine: "aten.exp",
    weights_used: "more than a product",
    masked_afterwards: "aten.mul",
    sdpa_bidirectional: "every token sees all others",
}


def patched(function: Callable):
    """Llama whose attention is ``function`` of q, k, v of four heads and the mask."""

    def forward(self, hidden_states, attention_mask=None, **_):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (modeling_llama.repeat_kv(x, self.num_key_value_groups) for x in (k, v))
        result = function(self, q, k, v, attention_mask)
        return self.o_proj(result.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None

    return mock.patch.object(modeling_llama.LlamaAttention, "forward", forward)


def model() -> torch.nn.Module:
    module = build(LlamaConfig(**SMALL | dict(num_hidden_layers=1)))
    most = module.config.max_position_embeddings + 16
    table = tril(most).view(1, 1, most, most)
    attention = module.model.layers[0].self_attn
    attention.register_buffer("table", table, persistent=False)
    attention.register_buffer("profiles", torch.randn(8, WINDOW, generator=torch.Generator().manual_seed(0)),
                              persistent=False)
    return module


def constant(value) -> tuple[float, ...]:
    """What the program says that a value is."""
    return attrs_of(value.owner)["value"]


@pytest.mark.parametrize("name", RAISED)
def test_written_out_attention_is_raised(name):
    module = model()
    with patched(RAISED[name]):
        program = capture_module(module, module.config)
        expected = {count: logits(module, tokens_of(count, count)) for count in (1, 2, 9, 20)}
    (op,) = (op for _, op in program.operators() if short_name(op) == "attention")
    assert attrs_of(op)["window"] == WINDOWS.get(name, 0)
    assert attrs_of(op)["extras"] == (("slopes",) if name in SLANTED else ())
    if name in SLANTED:
        np.testing.assert_allclose(constant(op.operation.operands[6]), SLANTED[name], rtol=1e-7)
    for count, want in expected.items():
        close(Reference(program, weights(module)).score(tokens_of(count, count)), want)
    close(Reference(program, weights(module)).score(tokens_of(20, 20), 3), expected[20])


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_what_is_not_known_to_be_causal_is_refused(function):
    module = model()
    with patched(function), pytest.raises(CaptureError) as caught:
        capture_module(module, module.config)
    message = str(caught.value)
    assert REFUSED[function] in message, message
    assert "model.layers.0.self_attn" in message
    assert re.search(r"test_capture_plain_attention\.py:\d+", message), message


def other_distances(m, q, k, v, mask):
    return by_interface(m, q, k, v, mask, steps=2)


def test_a_bias_by_distance_of_each_query_is_raised():
    module = model()
    with patched(by_interface):
        program = capture_module(module, module.config)
        expected = logits(module, tokens_of(20, 20))
    (op,) = (op for _, op in program.operators() if short_name(op) == "attention")
    assert attrs_of(op)["extras"] == ("query_sinks", "distances")
    close(Reference(program, weights(module)).score(tokens_of(20, 20), 3), expected)
    with patched(other_distances), pytest.raises(CaptureError, match="isn't chosen by distance alone"):
        capture_module(module, module.config)


def test_layers_that_share_keys_and_values_have_one_state():
    module, kept = build(LlamaConfig(**SMALL | dict(num_hidden_layers=3))), {}

    def shared(m, q, k, v, mask):
        k, v = kept[m.layer_idx] = kept[0] if m.layer_idx == 1 else (k[:, ::2], v[:, ::2])
        function = ALL_ATTENTION_FUNCTIONS.get_interface(m.config._attn_implementation, eager_attention_forward)
        return function(m, q, k, v, mask, scaling=0.3)[0].transpose(1, 2)

    with patched(shared):
        program = capture_module(module, module.config)
        expected = logits(module, tokens_of(20, 20))
    assert len(program.states()) == 2
    close(Reference(program, weights(module)).score(tokens_of(20, 20), 3), expected)


def test_integers_in_masks_are_tried():
    """A window of 50 tokens isn't seen in masks of fewer."""
    module = model()

    def window(m, q, k, v, mask):
        i, j = counted(q.shape[2])
        return finish((product(q, k) + mask).masked_fill(i - j >= 50, LEAST), v)

    with patched(window):
        program = capture_module(module, module.config)
    (op,) = (op for _, op in program.operators() if short_name(op) == "attention")
    assert attrs_of(op)["window"] == 50


def test_computed_bounds_of_masks_are_seen():
    """A window of 6 · 7 tokens, whose number isn't there before it is computed."""
    module = model()

    def window(m, q, k, v, mask):
        i, j = counted(q.shape[2])
        return finish((product(q, k) + mask).masked_fill((i - j) // 6 >= 7, LEAST), v)

    with patched(window):
        program = capture_module(module, module.config)
    (op,) = (op for _, op in program.operators() if short_name(op) == "attention")
    assert attrs_of(op)["window"] == 42


def test_every_refusal_is_listed():
    module = build(LlamaConfig(**SMALL | dict(num_hidden_layers=2)))
    with patched(one_ahead), pytest.raises(CaptureError) as caught:
        capture_module(module, module.config)
    assert "model.layers.0.self_attn" in str(caught.value) and "model.layers.1.self_attn" in str(caught.value)
