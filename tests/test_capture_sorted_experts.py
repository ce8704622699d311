"""Rows that are sorted to experts become linear maps of the chosen ones; what would need the sorted order is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from adaptc.backends.reference.interpreter import Reference
from adaptc.capture import hooks
from adaptc.capture.problems import Problems
from adaptc.capture.trace import trace
from adaptc.capture.walk import Stored, walk
from adaptc.errors import CaptureError
from adaptc.ir.build import short_name

torch.set_num_threads(1)

EXPERTS, HIDDEN, TOP_K, VOCABULARY = 5, 8, 2, 30


def routed(m, x):
    scores, chosen = m.router(x).softmax(-1).topk(TOP_K, dim=1)
    sizes = torch.zeros(x.shape[0], EXPERTS, dtype=torch.int64).scatter(1, chosen, 1).sum(0).tolist()
    return scores, chosen, sizes


def each(m, rows, sizes, numbers=range(EXPERTS)):
    parts = rows.split(sizes, dim=0)
    return torch.cat([F.linear(parts[i], m.weight[n]) for i, n in enumerate(numbers)])


def by_tokens(m, x):
    scores, chosen, sizes = routed(m, x)
    order = chosen.flatten().sort(0)[1]
    tokens = order.div(TOP_K, rounding_mode="trunc")
    gate, up = each(m, x[tokens], sizes).chunk(2, dim=-1)
    y = F.silu(gate) * up * scores.flatten()[order][:, None]
    return torch.zeros_like(x).index_add(0, tokens, y)


def by_places(m, x):
    """Back to the places of choices, and added there."""
    scores, chosen, sizes = routed(m, x)
    order = chosen.view(-1).argsort()
    y = each(m, x[order // TOP_K], sizes).chunk(2, -1)[0]
    places = torch.zeros(x.shape[0] * TOP_K, HIDDEN).index_add(0, order, y).view(-1, TOP_K, HIDDEN)
    return (places * scores.unsqueeze(-1)).sum(1)


def with_others_weights(m, x):
    scores, chosen, sizes = routed(m, x)
    order = chosen.flatten().argsort()
    y = each(m, x[order // TOP_K], sizes, reversed(range(EXPERTS)))
    return torch.zeros_like(x).index_add(0, order // TOP_K, y.chunk(2, dim=-1)[0])


def mixed(m, x):
    scores, chosen, sizes = routed(m, x)
    order = chosen.flatten().argsort()
    y = each(m, x[order // TOP_K].softmax(0), sizes)
    return torch.zeros_like(x).index_add(0, order // TOP_K, y.chunk(2, dim=-1)[0])


def by_parts_of_the_rows(m, x):
    scores, chosen, sizes = routed(m, x)
    order = chosen.flatten().argsort()
    return torch.zeros_like(x).index_add(0, order // TOP_K, each(m, x[order // TOP_K], sizes).chunk(2)[0])


class Model(torch.nn.Module):
    def __init__(self, mixture):
        super().__init__()
        self.mixture = mixture
        self.embed = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN))
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids, use_cache=False):
        x = self.embed(input_ids)
        return SimpleNamespace(logits=self.head(self.mixture(self, x.reshape(-1, HIDDEN)).view(x.shape)))


@pytest.mark.parametrize("mixture", (by_tokens, by_places))
def test_each_row_goes_through_its_own_expert(mixture):
    hooks.operators()
    torch.manual_seed(0)
    module, problems = Model(mixture), Problems()
    program = walk(trace(module), {n: Stored(n, n) for n, _ in module.named_parameters()}, {}, problems)
    problems.check()
    assert [short_name(op) for _, op in program.operators()].count("expert_linear") == 1
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 9).tolist()
    weights = {name: value.detach().numpy() for name, value in module.named_parameters()}
    with torch.no_grad():
        expected = module(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(Reference(program, weights.__getitem__).score(tokens), expected, atol=1e-4)


@pytest.mark.parametrize("mixture, said", [(with_others_weights, "linear"), (mixed, "softmax"),
                                           (by_parts_of_the_rows, "chunk")])
def test_what_needs_the_sorted_order_is_refused_by_name(mixture, said):
    with pytest.raises(CaptureError, match=rf"sorted to experts go through {said}.*<root> \(test_capture_sorted_experts.py:\d+: "):
        trace(Model(mixture))
