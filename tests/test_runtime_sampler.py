"""Sampling: what each option keeps, ties, and independence of everything but seed and index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptc.errors import AdaptcError, OptionError
from adaptc.runtime.sampler import Sampling, sample


def row(*values) -> np.ndarray:
    return np.array(values, np.float32)


def draws(logits, count=400, **options) -> list[int]:
    return [sample(logits, Sampling(seed=7, **options), i) for i in range(count)]


def kept(logits, temperature, top_k, top_p) -> dict[int, float]:
    """Probabilities by token id, by the definition: a full sort."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
    probabilities = weights / weights.sum()
    count = int(np.searchsorted(probabilities.cumsum(), top_p * (1 - 1e-12))) + 1
    probabilities = probabilities[:count] / probabilities[:count].sum()
    return dict(zip(order, probabilities))


def test_greedy_takes_the_lowest_id_of_equals():
    assert sample(row(1, 3, 3, 2), Sampling(), 0) == 1
    assert sample(row(1, 3, 3, 2), Sampling(temperature=2, top_k=1), 5) == 1
    assert sample(np.zeros(300_000, np.float32), Sampling(), 0) == 0


@pytest.mark.parametrize("options", [
    dict(temperature=1.0), dict(temperature=0.5), dict(temperature=1.0, top_k=3), dict(temperature=2.0, top_p=0.6),
    dict(temperature=1.5, top_k=4, top_p=0.7), dict(temperature=1.0, top_k=99), dict(temperature=1.0, top_p=1e-9),
])  # fmt: skip
def test_frequencies_are_the_probabilities(options):
    logits = row(1.0, 2.0, 0.5, 2.0, -1.0, 1.9, -np.inf)
    expected = kept(logits, options["temperature"], options.get("top_k", 0), options.get("top_p", 1.0))
    found = np.bincount(draws(logits, 3000, **options), minlength=len(logits)) / 3000
    assert set(np.flatnonzero(found)) <= set(expected)
    for token, probability in expected.items():
        assert abs(found[token] - probability) < 4 * (probability * (1 - probability) / 3000) ** 0.5 + 1e-9


def test_top_k_takes_the_lowest_ids_of_equals():
    assert set(draws(row(5, 5, 5, 5, 1), temperature=1.0, top_k=2)) == {0, 1}


@given(
    st.integers(0, 2**32),
    st.one_of(st.integers(1, 700), st.integers(5000, 9000)),
    st.integers(0, 60),
    st.floats(0.05, 1.0),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_only_kept_tokens_are_drawn(seed, size, top_k, top_p, coarse):
    logits = np.random.default_rng(seed).standard_normal(size).astype(np.float32) * 3
    logits = logits.round() if coarse else logits  # many equals
    allowed = kept(logits, 1.3, top_k, top_p)
    assert {sample(logits, Sampling(1.3, top_k, top_p, seed), i) for i in range(20)} <= set(allowed)


def test_draws_depend_on_seed_and_index_alone():
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    one = draws(logits, 50, temperature=1.0)
    assert one == draws(logits, 50, temperature=1.0) and len(set(one)) > 20
    assert one[::-1] == [sample(logits, Sampling(1.0, seed=7), i) for i in reversed(range(50))]
    assert one != [sample(logits, Sampling(1.0, seed=8), i) for i in range(50)]
    assert sample(logits, Sampling(1.0, seed=2**64 - 1), 10**6) >= 0


def test_extreme_logits():
    assert sample(row(-np.inf, 1e38, -1e38), Sampling(1e-6), 0) == 1
    assert sample(row(0, 1, 0), Sampling(1e300, top_p=0.999), 0) in (0, 1, 2)
    with pytest.raises(AdaptcError, match="NaN as the logit of token 1"):
        sample(row(0, np.nan, 3), Sampling(), 0)
    with pytest.raises(AdaptcError, match="NaN"):
        sample(row(0, np.nan, 3), Sampling(1.0), 0)


@pytest.mark.parametrize("option, bad", [
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "hot"),
    ("temperature", True), ("top_k", -1), ("top_k", 1.5), ("top_p", 0), ("top_p", 1.1), ("top_p", float("nan")),
    ("seed", -1), ("seed", 2**64), ("seed", 0.5),
])  # fmt: skip
def test_bad_options_are_named(option, bad):
    with pytest.raises(OptionError, match=f"^{option} must be"):
        Sampling(**{option: bad})
