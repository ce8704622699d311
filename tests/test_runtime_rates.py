"""States with a row for every few tokens, whose pages are for other numbers of tokens than those of states beside them: what
is served, shared, found again or resumed is what one request alone gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import runtime_fake
from adaptc.plan import page_rows, page_tokens
from adaptc.runtime.sampler import Sampling
from runtime_fake import consistent, drain, empty, engine, plain, score

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3]
HOT = Sampling(temperature=30.0, seed=9)
SIZES = pytest.mark.parametrize("size,rates", [(4, (2,)), (4, (8,)), (4, (4, 16)), (3, (2,))])
"""Rows of several tokens in a page; one, for more tokens than a page of others is; both; pages of 3 and of 2 tokens."""


def plan(size, rates):
    return runtime_fake.plan(page_size=size, rates=rates, windows=(0, 5), layers=1)


def test_pages_of_a_rate_hold_the_rows_of_as_many_tokens_and_one_at_least():
    assert [page_rows(16, rate) for rate in (1, 4, 5, 128)] == [16, 4, 3, 1]
    assert [page_tokens(16, rate) for rate in (1, 4, 5, 128)] == [16, 16, 15, 128]


@SIZES
def test_however_the_tokens_come_the_logits_are_those_of_one_shot(size, rates):
    made = plan(size, rates)
    expected = plain(PROMPT, made)
    for chunk in (None, 5, 1):
        eng = engine(made, page_order_seed=1)
        assert (score(eng, PROMPT, chunk=chunk) == expected).all()
        empty(eng)


@SIZES
def test_what_is_found_again_ends_where_pages_of_all_states_end(size, rates):
    made = plan(size, rates)
    unit = math.lcm(size, *(page_tokens(size, rate) for rate in rates))
    eng, tokens = engine(made, prefix_cache=True, snapshot_tokens=1, page_order_seed=2), []
    for _ in range(2):
        eng.add(PROMPT, max_tokens=6, sampling=HOT)
        tokens.append(drain(eng))
        eng.poison_free_pages()
    assert eng.statistics.hit_tokens == (len(PROMPT) - 1) // unit * unit
    assert list(tokens[0].values()) == list(tokens[1].values())
    empty(eng)


@SIZES
def test_resumed_is_uninterrupted_and_samples_are_as_alone(size, rates):
    made = plan(size, rates)
    alone = engine(made)
    alone.add(PROMPT, max_tokens=8, sampling=HOT)
    (expected,) = drain(alone).values()
    for kept in (False, True):
        eng = engine(made, prefix_cache=kept, snapshot_tokens=1, page_order_seed=3)
        first, *_ = eng.add_samples(PROMPT, 2, max_tokens=8, sampling=HOT)
        tokens, stops = [], [1, 5]
        while eng.active:
            eng.poison_free_pages()
            tokens += [event.token for event in eng.step() if event.request == first]
            consistent(eng)
            if len(tokens) in stops:
                stops.remove(len(tokens))
                assert eng.preempt(first)
        assert tokens == expected
        empty(eng)


def test_a_pool_is_as_large_as_its_pages():
    """Bytes follow from rows, not from tokens."""
    made = runtime_fake.plan(page_size=4, rates=(2, 8), windows=(0,), layers=1, fixed=0)
    assert [s.page_bytes(4) for s in made.states] == [4 * 32, 2 * 32, 1 * 32]
    assert [s.token_bytes() for s in made.states] == [32, 16, 4]
    assert len({np.ceil(48 / g.page_tokens(4)) - g.max_pages for g in made.groups}) == 1
