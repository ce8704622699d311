"""Rows that are sorted to experts become linear maps of the chosen ones; what would need the sorted order is refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from traced import HIDDEN, Around, operators_of, program_of

from adaptc.capture.trace import trace
from adaptc.errors import CaptureError

torch.set_num_threads(1)

EXPERTS, TOP_K = 5, 2


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


def added_twice(m, x):
    """To what isn't zeros any more."""
    scores, chosen, sizes = routed(m, x)
    order = chosen.flatten().argsort()
    tokens, result = order // TOP_K, torch.zeros_like(x)
    gate, up = each(m, x[tokens], sizes).chunk(2, dim=-1)
    return result.index_add_(0, tokens, gate).index_add_(0, tokens, up * 0.5).index_add(0, tokens, gate)


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


def model(mixture):
    torch.manual_seed(0)
    return Around(lambda m, x, ids: mixture(m, x.reshape(-1, HIDDEN)).view(x.shape),
                  router=torch.nn.Linear(HIDDEN, EXPERTS, bias=False),
                  weight=torch.nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN)))


@pytest.mark.parametrize("mixture", (by_tokens, by_places, added_twice))
def test_each_row_goes_through_its_own_expert(mixture):
    assert operators_of(program_of(model(mixture))).count("expert_linear") == 1


@pytest.mark.parametrize("mixture, said", [(with_others_weights, "linear"), (mixed, "softmax"),
                                           (by_parts_of_the_rows, "chunk")])
def test_what_needs_the_sorted_order_is_refused_by_name(mixture, said):
    with pytest.raises(CaptureError, match=rf"in module <root> \(traced.py:\d+: .*sorted to experts go through {said}"):
        trace(model(mixture))
