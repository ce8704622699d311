"""Python may ask for values that follow from no token."""

from __future__ import annotations

import pytest
import torch
from traced import HIDDEN, Around, program_of

from adaptc.errors import DynamicError

torch.set_num_threads(1)


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


def counted(m, x, ids):
    """Likewise, by a sum that is written over."""
    numbers = torch.ones(x.shape[0])
    view = numbers[:]
    numbers += 1
    return x * (view == 2)[:, None, None] + x[view == 1].sum()


def by_tokens(m, x, ids):
    return x[ids > 3][None]


def model(code):
    torch.manual_seed(0)
    return Around(code, ways=torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3)))


@pytest.mark.parametrize("code", (chosen_by_number, asked))
def test_what_masks_of_numbers_pick_is_picked(code):
    names = program_of(model(code)).weights()
    assert any(name.startswith("ways.1") for name in names)
    assert not any(name.startswith(("ways.0", "ways.2")) for name in names)


@pytest.mark.parametrize("code", (changed, counted, by_tokens))
def test_masks_whose_values_arent_known_are_refused(code):
    with pytest.raises(DynamicError):
        program_of(model(code))
