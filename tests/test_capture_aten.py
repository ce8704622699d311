"""ATen's operators as modelling code may call them, each captured and run against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_capture import close, logits, tokens_of, weights
from test_capture_errors import error, llama
from torch.nn import functional as F

from adaptc.backends.reference.interpreter import Reference
from adaptc.capture import capture_module



def small(x):
    """From 0 to about 1e-6: what 1 + x keeps nothing or next to nothing of."""
    return x.abs() * 1e-6


def windows(m, x):
    """Of each token and the two before it."""
    return F.pad(x.transpose(1, 2), (2, 0)).unfold(-1, 3, 1).flip(-1)[..., 0].transpose(1, 2)


def depthwise(m, x):
    """As nn.Conv1d computes it with padding, cut to the number of tokens, before and after an activation."""
    weight, bias = torch.linspace(-1, 1, 96).view(32, 1, 3), torch.linspace(-0.5, 0.5, 32)
    x = x.transpose(1, 2)
    plain = F.conv1d(x, weight, bias, padding=2, groups=32)[..., : x.shape[2]]
    return (plain + F.silu(F.conv1d(x, weight, padding=2, groups=32))[:, :, : x.shape[2]]).transpose(1, 2)


def grouped(m, x):
    """A convolution of groups of channels over one of each channel, whose bias is there before the first token too."""
    one, more = torch.linspace(-1, 1, 64).view(32, 1, 2), torch.linspace(-0.3, 0.4, 32 * 8 * 3).view(32, 8, 3).sin()
    bias = torch.linspace(-0.5, 0.5, 32)
    x = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), one, bias, groups=32)
    return F.conv1d(x, more, bias + 0.1, groups=4).transpose(1, 2)


FUNCTIONS = {
    "convolution": depthwise,
    "convolution_of_groups": grouped,
    "windows": lambda m, x: windows(m, x) + F.pad(x, (0, 0, 1, -1)),
    "tokens_before": lambda m, x: torch.cat((x.new_ones(1, 2, 32), x[:, :-2]), 1),
    "log1p_of_little": lambda m, x: torch.log1p(small(x)) * 1e6 + torch.log1p(x.abs()),
    "softplus": lambda m, x: F.softplus(x * 8 - 13) * 1e5 + F.softplus(x * 30) + F.softplus(x, 0.5) + F.softplus(x, 2, 1),
    "logsigmoid": lambda m, x: F.logsigmoid(8 * x + 13) * 1e5 + F.logsigmoid(30 * x),
    "weight_times_columns": lambda m, x: (torch.linspace(-1, 1, 32 * 32).view(32, 32) @ x.transpose(1, 2)).transpose(1, 2),
    "rsub_alpha": lambda m, x: torch.rsub(x, 2.0 * x + 1, alpha=3),
    "sub_alpha": lambda m, x: torch.sub(x, x + 1, alpha=3),
    "add_alpha": lambda m, x: torch.add(x, x * x, alpha=-0.5),
    "maximum_of_two": lambda m, x: torch.max(x, 0.3 - x) + torch.min(x, 0.2 * x),
    "lists_in_indices": lambda m, x: x.view(1, -1, 4, 8)[:, :, [-1, 0, -4, 2]].flatten(2),
    "extremes": lambda m, x: x * x.max(-1, keepdim=True)[0] + x.min(-1, keepdim=True)[0],
    "integers_and_floats": lambda m, x: x * (x > torch.arange(32)) + x * (torch.arange(32) > 10 * x),
    "conditions_and_integers": lambda m, x: x * ((x > 0) < torch.arange(32)) + x * ((x > 0) == 1),
    "conditions_and_floats": lambda m, x: x * ((x > 0) < 0.5) + x * ((x > 0).to(torch.int64) > 0.5),
    "not": lambda m, x: torch.where(~(x > 0), x * 2, x) + x * torch.logical_not((x > 1).to(torch.int64)),
    "views_of_views": lambda m, x: torch.broadcast_to(x[..., :1], x.shape) * x.movedim(1, 2).swapaxes(2, 1),
    "repeat": lambda m, x: x * x[..., :4].repeat(1, 1, 8) + x[..., :2].repeat(1, 1, 1, 16).view_as(x),
    "repeat_each": lambda m, x: x * x[..., :8].repeat_interleave(4, -1),
    "write_one": lambda m, x: torch.select_scatter(x, x[..., 3] * 2, -1, 5),
    "write_every_third": lambda m, x: x.slice_scatter(x[..., :10] * 2, -1, 1, 30, 3),
    "write_every_second_to_the_end": lambda m, x: x.slice_scatter(x[..., :16] * 2, -1, 1, None, 2),
    "numbers_and_bfloat16": lambda m, x: (x.bfloat16() * 1.7).float(),
    "pick_columns": lambda m, x: x * x[..., torch.tensor([3, 1, 1, 30]).repeat(8)],
    "variance": lambda m, x: x * x.var(-1, keepdim=True) + x.var(-1, correction=0)[..., None] + x.var(2, False, True),
    "rms_norm": lambda m, x: torch.rms_norm(x, (32,)) + torch.rms_norm(x, (32,), x.new_full((32,), 1.5), 1e-3),
    "scatter": lambda m, x: x.scatter(-1, x.topk(3)[1], 0.25),
    "numbers_in_rows": lambda m, x: (x.unsqueeze(-2) * torch.tensor([[1.0] * 32, [2.0, 3.0] * 16])).sum(-2),
    "scatter_elements": lambda m, x: x.scatter(-1, x.topk(3)[1], x[..., :3] - 2),
    "elements_of_a_vector": lambda m, x: x * torch.linspace(-1, 1, 32)[x.topk(3)[1]].sum(-1, keepdim=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_mean_what_torchs_do(name):
    torch.manual_seed(0)
    module = llama(FUNCTIONS[name])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    program = capture_module(module, module.config)
    for count in (2, 9):
        tokens = tokens_of(count, count)
        wanted = logits(module, tokens)
        assert np.isfinite(wanted).all() and np.abs(wanted).max() > 1e-3
        close(Reference(program, weights(module)).score(tokens), wanted)


@pytest.mark.parametrize("function, words", [
    (lambda m, x: x * (~torch.arange(32)), "works on the bits of i32"),
    (lambda m, x: x.scatter(-1, x.topk(3)[1], x * 2), "expected f32, and one for each"),
    (lambda m, x: x.scatter(-1, torch.tensor([[[1, 3]]]), 0.25), "writes rows"),
    (lambda m, x: x * torch.linspace(-1, 1, 99)[x.shape[1]], "picks row T"),
    (lambda m, x: torch.view_as_complex(x.view(1, -1, 16, 2)).abs().repeat(1, 1, 2), "a complex tensor"),
    (lambda m, x: F.dropout(x, 0.5), "drops elements at random"),
    (lambda m, x: x * 2 if x.shape[1] == 60 else x, "Ne(T, 60)"),
])  # fmt: skip
def test_what_has_another_meaning_is_refused(function, words):
    assert words in error(llama(function))
