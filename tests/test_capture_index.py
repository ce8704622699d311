"""Indexes of sparse attention become the operator, when and only when they choose as it does."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adaptc.backends.reference.interpreter import Reference
from adaptc.capture import hooks
from adaptc.capture.index import indexed
from adaptc.capture.problems import Problems
from adaptc.capture.trace import trace
from adaptc.capture.walk import Stored, walk
from adaptc.errors import CaptureError
from adaptc.ir.build import attrs_of, short_name

torch.set_num_threads(1)

HEADS, WIDTH, TOP_K, VOCABULARY = 8, 8, 4, 50
"""With few heads many scores are 0, and which of them are chosen is open."""


def products(q, k):
    return torch.matmul(q, k.transpose(-1, -2).unsqueeze(1))


def summed(weights, scores):
    return torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)


def choose(scores, k=TOP_K):
    return scores.topk(torch.sym_min(k, scores.shape[-1]), dim=-1).indices.to(torch.int32)


def scaled_first(q, k, weights, mask):
    return choose(summed(weights, torch.relu(products(q.float(), k.float()) * 0.5)) + mask)


def scaled_last(q, k, weights, mask):
    return choose(summed(weights, torch.relu(products(q, k)) / 2).masked_fill(mask < 0, float("-inf")))


def not_cut(q, k, weights, mask):
    return choose(summed(weights, products(q, k)) + mask)


def near(q, k, weights, mask):
    far = torch.ones_like(mask).tril(-5).bool()
    return choose((summed(weights, torch.relu(products(q, k))) + mask).masked_fill(far, float("-inf")))


def without_heads(q, k, weights, mask):
    return choose(torch.relu(products(q, k)).mean(2) + mask)


def squared(q, k, weights, mask):
    return choose(summed(weights, torch.relu(products(q, k)).pow(2)) + mask)


def by_the_seen(q, k, weights, mask):
    scores = summed(weights, torch.relu(products(q, k))) + mask
    return scores.topk(torch.sym_min(TOP_K, scores.shape[-1]), dim=-2).indices.transpose(-1, -2)


def changed(q, k, weights, mask):
    return scaled_first(q, k, weights, mask) + 1


def slanted(q, k, weights, mask):
    return choose(summed(weights, torch.relu(products(q, k))) + 0.1 * torch.arange(mask.shape[-1]) + mask)


def smallest(q, k, weights, mask):
    return (summed(weights, torch.relu(products(q, k))) + mask).topk(TOP_K, largest=False).indices


class Sparse(torch.nn.Module):
    """One layer of attention over what ``choice`` chooses."""

    def __init__(self, choice):
        super().__init__()
        self.choice = choice
        self.embed = torch.nn.Embedding(VOCABULARY, 16)
        self.query, self.key, self.weight = (torch.nn.Linear(16, n) for n in (HEADS * WIDTH, WIDTH, HEADS))
        self.head = torch.nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, use_cache=False):
        x = self.embed(input_ids)
        count = x.shape[1]
        mask = torch.ops.adaptc.mask(x, None, "causal", 0)
        rows = self.choice(self.query(x).view(1, count, HEADS, WIDTH), self.key(x), self.weight(x), mask[:, 0, :, :])
        heads = x.view(1, count, 2, 8).transpose(1, 2)
        read = torch.ops.adaptc.attention(heads, heads, heads, mask, [rows], ["rows"], 0.3, 0, 0.0)
        return SimpleNamespace(logits=self.head(read.reshape(1, count, 16)))


def raised(choice, context=64):
    hooks.operators()
    torch.manual_seed(0)
    module = Sparse(choice)
    exported = indexed(trace(module, context), {}, context)
    return module, walk(exported, {n: Stored(n, n) for n, _ in module.named_parameters()}, {}, Problems())


def expected(module, tokens) -> np.ndarray:
    """The same by itself: softmax over the chosen among all pairs of tokens."""
    with torch.no_grad():
        x, count = module.embed(torch.tensor(tokens)).double(), len(tokens)
        q = module.query(x.float()).view(count, HEADS, WIDTH).double()
        scores = torch.einsum("thd,sd->ths", q, module.key(x.float()).double()).relu() * 0.5
        scores = torch.einsum("ths,th->ts", scores, module.weight(x.float()).double())
        future = ~torch.ones(count, count).tril().bool()
        chosen = scores.masked_fill(future, -np.inf).topk(min(TOP_K, count), -1).indices
        hidden = torch.ones(count, count).scatter(-1, chosen, 0).bool() | future
        heads = x.view(count, 2, 8)
        weights = (torch.einsum("thd,shd->hts", heads, heads) * 0.3).masked_fill(hidden, -np.inf).softmax(-1)
        return module.head(torch.einsum("hts,shd->thd", weights, heads).reshape(count, 16).float()).numpy()


@pytest.mark.parametrize("choice", (scaled_first, scaled_last))
def test_it_is_raised_and_chooses_the_same(choice):
    """Fewer rows are read than are seen, and what the index sees of other tokens is a state of its own."""
    module, program = raised(choice)
    ops = {short_name(op): attrs_of(op) for _, op in program.operators()}
    assert ops["index_rows"] == {"top_k": TOP_K, "scaling": 0.5} and ops["attention"]["extras"] == ("rows",)
    assert sorted(slot.spec.parts for slot in program.states().values()) == [(("index", 1, WIDTH),), (("k", 2, 8), ("v", 2, 8))]
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 19).tolist()
    weights = dict(module.named_parameters())
    rows = []
    for chunk in (None, 1, 5):
        reference = Reference(program, lambda name: weights[name].detach().numpy())
        seen = lambda source, op, results: rows.extend(results[0].tolist()) if op == "index_rows" else None  # noqa: E731
        np.testing.assert_allclose(reference.score(tokens, chunk, observe=seen), expected(module, tokens), atol=1e-5)
    assert len(rows) == 3 * len(tokens) and max(sum(p >= 0 for p in row) for row in rows) == TOP_K


@pytest.mark.parametrize("choice, said", [
    (not_cut, "negative ones too"), (near, "looks at some of the tokens"), (without_heads, "not a sum over heads"),
    (squared, "go through aten.pow"), (by_the_seen, "chooses among the tokens that look"),
    (changed, "goes through aten.add"), (slanted, "bias by distance"), (smallest, "smallest scores")])
def test_another_way_to_choose_is_refused_by_name(choice, said):
    with pytest.raises(CaptureError, match=rf"aten.topk.default in .*isn't an index that adaptc has: .*{said}"):
        raised(choice)


def test_where_all_tokens_are_chosen_there_are_as_many_as_a_sequence_may_have():
    _, program = raised(lambda q, k, w, mask: (summed(w, torch.relu(products(q, k))) + mask).topk(mask.shape[-1]).indices)
    assert [attrs_of(op)["top_k"] for _, op in program.operators() if short_name(op) == "index_rows"] == [64]


def test_numbers_of_blocks_from_an_index_that_isnt_restated_are_refused():
    """They aren't rows: attention would read the wrong ones."""
    hooks.operators()
    heads, mask, problems = torch.zeros(1, 2, 5, 4, device="meta"), torch.zeros(1, 1, 5, 5, device="meta"), Problems()
    attend = hooks._attention({}, problems)
    read, _ = attend(torch.nn.Identity(), heads, heads, heads, mask, block_indices=torch.zeros(1, 5, 2, 6, device="meta"))
    assert read.shape == (1, 5, 2, 4)
    problems.check()
    attend(torch.nn.Identity(), heads, heads, heads, mask, block_indices=torch.zeros(1, 2, 5, 3, device="meta"))
    with pytest.raises(CaptureError, match="is given block_indices"):
        problems.check()
