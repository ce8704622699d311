"""Experts that are computed for all tokens become linear maps by the chosen ones, where the others are known to give 0."""

from __future__ import annotations

import pytest
import torch
from traced import HIDDEN, Around, operators_of, program_of

from adaptc.capture.experts import routed

torch.set_num_threads(1)

EXPERTS, INNER, TOP_K = 6, 12, 2


def scores(m, x):
    """Sigmoids of the chosen, 0 for the others [T, E]."""
    value, index = torch.topk(m.router(x), TOP_K, dim=1)
    return torch.full((x.shape[0], EXPERTS), float("-inf")).scatter_(1, index, value).sigmoid()


def inner(m, x, bias=None):
    gate, up = (torch.bmm(x, m.up) + (0 if bias is None else bias)).chunk(2, dim=-1)
    return torch.bmm(torch.nn.functional.silu(gate) * up, m.down)


def scaled_inputs(m, x):
    rows = x.repeat(EXPERTS, 1) * scores(m, x).transpose(0, 1).reshape(-1, 1)
    y = inner(m, rows.view(EXPERTS, -1, HIDDEN)).view(-1, HIDDEN)
    return y.reshape(EXPERTS, -1, HIDDEN).sum(dim=0)


def scaled_outputs(m, x):
    y = inner(m, x.unsqueeze(0).expand(EXPERTS, -1, -1))
    return (y * scores(m, x).T.unsqueeze(-1)).sum(0)


def renormalised(m, x):
    value, index = torch.topk(m.router(x).softmax(-1), TOP_K, dim=-1)
    weights = torch.zeros(x.shape[0], EXPERTS).scatter(1, index, value)
    weights = weights / weights.sum(-1, keepdim=True)
    return (inner(m, x.unsqueeze(0).expand(EXPERTS, -1, -1)) * weights.permute(1, 0)[..., None]).sum(0)


def chosen_but_not_scored(m, x):
    """Where it isn't chosen, an expert sees half of a token."""
    rows = x.unsqueeze(0) * (scores(m, x).T.unsqueeze(-1) + 0.5)
    return inner(m, rows).sum(0)


def biased(m, x):
    """Of inputs that are 0, an expert gives what it makes of its bias."""
    return inner(m, x.unsqueeze(0) * scores(m, x).T.unsqueeze(-1), m.bias).sum(0)


def all_of_them(m, x):
    return (inner(m, x.unsqueeze(0).expand(EXPERTS, -1, -1)) * m.router(x).softmax(-1).T.unsqueeze(-1)).sum(0)


def model(mixture):
    torch.manual_seed(0)
    return Around(lambda m, x, ids: mixture(m, x.reshape(-1, HIDDEN)).view(x.shape),
                  router=torch.nn.Linear(HIDDEN, EXPERTS, bias=False),
                  up=torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * INNER)),
                  down=torch.nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN)),
                  bias=torch.nn.Parameter(torch.randn(2 * INNER)))


@pytest.mark.parametrize("mixture, raised", [(scaled_inputs, True), (scaled_outputs, True), (renormalised, True),
                                             (chosen_but_not_scored, False), (biased, False), (all_of_them, False)])
def test_only_the_chosen_are_computed_where_the_others_give_nothing(mixture, raised):
    assert operators_of(program_of(model(mixture), routed)).count("expert_linear") == 2 * raised
