"""Python may ask for values that follow from no token."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adaptc.backends.reference.interpreter import Reference
from adaptc.capture import hooks
from adaptc.capture.problems import Problems
from adaptc.capture.trace import trace
from adaptc.capture.walk import Stored, walk
from adaptc.errors import DynamicError

torch.set_num_threads(1)

HIDDEN, VOCABULARY = 8, 30


def chosen_by_number(m, x, ids):
    """One of three maps, by a number of the configuration for each sequence."""
    spoken, result = 1 * torch.ones(x.shape[0]), torch.zeros_like(x)
    for number, way in enumerate(m.ways):
        mask = spoken == number
        result[mask] = way(x[mask])
    return result


def asked(m, x, ids):
    return m.ways[torch.arange(3).sum().item() - 2](x) if (torch.ones(2) > 0).tolist() == [True, True] else x


def changed(m, x, ids):
    """A mask that isn't any more what it was made as."""
    mask = torch.ones(x.shape[0], dtype=torch.bool)
    mask.view(-1).logical_not_()
    return x + x[mask].sum()


def by_tokens(m, x, ids):
    return x[ids > 3][None]


class Model(torch.nn.Module):
    def __init__(self, code):
        super().__init__()
        self.code = code
        self.embed = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.ways = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids, use_cache=False):
        return SimpleNamespace(logits=self.head(self.code(self, self.embed(input_ids), input_ids)))


@pytest.mark.parametrize("code", (chosen_by_number, asked))
def test_what_masks_of_numbers_pick_is_picked(code):
    hooks.operators()
    torch.manual_seed(0)
    module, problems = Model(code), Problems()
    program = walk(trace(module), {n: Stored(n, n) for n, _ in module.named_parameters()}, {}, problems)
    problems.check()
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 9).tolist()
    weights = {name: value.detach().numpy() for name, value in module.named_parameters()}
    with torch.no_grad():
        expected = module(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(Reference(program, weights.__getitem__).score(tokens), expected, atol=1e-5)
    assert not any(name.startswith(("ways.0", "ways.2")) for name in program.weights())


@pytest.mark.parametrize("code", (changed, by_tokens))
def test_masks_whose_values_arent_known_are_refused(code):
    with pytest.raises(DynamicError):
        module = Model(code)
        walk(trace(module), {n: Stored(n, n) for n, _ in module.named_parameters()}, {}, Problems())
