"""Sampling: what each option keeps, ties, and independence of everything but seed and index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptc.errors import AdaptcError, OptionError
from adaptc.runtime.sampler import Sampling, adjusted, logprob, sample


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
    assert sample(row(0, 1, 0), Sampling(1e38, top_p=0.999), 0) in (0, 1, 2)
    for bad, name in ((np.nan, "NaN"), (np.inf, "infinite")):
        for temperature in (0, 1.0):
            with pytest.raises(AdaptcError, match=f"The largest logit is {name}, of token 1"):
                sample(row(0, bad, 3), Sampling(temperature), 0)
    with pytest.raises(AdaptcError, match="The largest logit is -infinity"):
        sample(row(-np.inf, 1), Sampling(logit_bias={1: -np.inf}), 0)


MOST = 3.4e38


@pytest.mark.parametrize("options, allowed", [
    (dict(temperature=1e-320), {3}), (dict(temperature=MOST), {0, 1, 2, 3, 4}),
    (dict(logit_bias={0: MOST, 1: MOST}), {0, 1}), (dict(logit_bias={3: -MOST}), {0, 1, 2, 4}),
    (dict(logit_bias={0: MOST}, repetition_penalty=3e-39), {0}),
    (dict(repetition_penalty=MOST), {1, 2, 3}), (dict(repetition_penalty=3e-39), {3}),
    (dict(presence_penalty=MOST), {0, 1, 2}), (dict(presence_penalty=-MOST, temperature=1e20), {3, 4}),
    (dict(frequency_penalty=MOST), {0, 1, 2}), (dict(frequency_penalty=-MOST), {3}),
])  # fmt: skip
def test_extreme_options_keep_their_meaning(options, allowed):
    """Nothing overflows. The answer is 3, 3, 4, again and again."""
    logits = row(-1, 1, 2, 3, -1)
    chosen = Sampling(**{"temperature": 1.0, **options})
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        drawn = {sample(logits, chosen, 3 + i, [0, *[3, 3, 4] * 20][: 4 + i]) for i in range(0, 54, 3)}
    assert drawn <= allowed


@pytest.mark.parametrize("option, bad", [
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "hot"),
    ("temperature", True), ("top_k", -1), ("top_k", 1.5), ("top_p", 0), ("top_p", 1.1), ("top_p", float("nan")),
    ("seed", -1), ("seed", 2**64), ("seed", 0.5),
])  # fmt: skip
def test_bad_options_are_named(option, bad):
    with pytest.raises(OptionError, match=f"^{option} must be"):
        Sampling(**{option: bad})


# ---- against transformers' own processors ----------------------------------------------------------------------


def processed(processors, tokens, logits) -> np.ndarray:
    """What transformers' processors, in order, make of a row of logits."""
    import torch
    from transformers import LogitsProcessorList

    scores = LogitsProcessorList(processors)(torch.tensor([list(tokens)]), torch.tensor(logits)[None])
    return scores[0].numpy()


def rows(seed: int, size: int = 50) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(size).astype(np.float32) * 3, rng.integers(0, size, 12).tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_is_that_of_transformers(seed, penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, tokens = rows(seed)
    wanted = processed([RepetitionPenaltyLogitsProcessor(penalty)], tokens, logits)
    got = adjusted(logits, Sampling(repetition_penalty=penalty), np.array(tokens), 4)
    np.testing.assert_array_equal(got.astype(np.float32), wanted)
    assert sample(logits, Sampling(repetition_penalty=penalty), 4, tokens) == wanted.argmax()


@pytest.mark.parametrize("seed", range(3))
def test_logit_bias_is_that_of_transformers(seed):
    from transformers import SequenceBiasLogitsProcessor

    logits, tokens = rows(seed)
    bias = {3: 2.5, 7: -4.0, int(logits.argmax()): -float("inf")}
    wanted = processed([SequenceBiasLogitsProcessor({(k,): v for k, v in bias.items()})], tokens, logits)
    got = adjusted(logits, Sampling(logit_bias=bias), np.array(tokens), 4)
    np.testing.assert_array_equal(got.astype(np.float32), wanted)
    assert sample(logits, Sampling(logit_bias=bias), 4, tokens) == wanted.argmax() != logits.argmax()


@pytest.mark.parametrize("seed", range(3))
def test_presence_and_frequency_follow_openais_formula(seed):
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, c the counts in the answer so far; the prompt doesn't count."""
    logits, tokens = rows(seed)
    index = 8
    counts = np.bincount(tokens[-index:], minlength=len(logits))
    for frequency, presence in ((0.5, 0.0), (0.0, 0.75), (0.25, 1.5), (-0.5, -1.0)):
        wanted = logits - counts * np.float32(frequency) - (counts > 0) * np.float32(presence)
        options = Sampling(frequency_penalty=frequency, presence_penalty=presence)
        np.testing.assert_allclose(adjusted(logits, options, np.array(tokens), index), wanted, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(adjusted(logits, options, np.array(tokens), 0), logits)


@pytest.mark.parametrize("options", [
    dict(min_p=0.05), dict(min_p=0.3, temperature=2.0), dict(min_p=1.0), dict(min_p=0.02, top_k=7),
    dict(min_p=0.02, top_p=0.8), dict(min_p=0.01, top_k=12, top_p=0.9, temperature=1.7),
    dict(min_p=0.05, repetition_penalty=1.4, top_k=20, temperature=0.8),
])  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_the_kept_tokens_and_their_shares_are_those_of_transformers(options, seed):
    import transformers as hf

    logits, tokens = rows(seed, 40)
    chain = [
        hf.RepetitionPenaltyLogitsProcessor(options.get("repetition_penalty", 1.0)),
        hf.TemperatureLogitsWarper(options.get("temperature", 1.0)),
        hf.MinPLogitsWarper(options["min_p"]),
        *([hf.TopKLogitsWarper(options["top_k"])] if "top_k" in options else []),
        *([hf.TopPLogitsWarper(options["top_p"])] if "top_p" in options else []),
    ]
    scores = processed(chain, tokens, logits).astype(np.float64)
    wanted = np.exp(scores - scores.max())
    wanted /= wanted.sum()
    chosen = Sampling(**{"temperature": 1.0, **options})
    count = 2500
    drawn = [sample(logits, chosen, i, tokens) for i in range(count)]
    found = np.bincount(drawn, minlength=len(logits)) / count
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(wanted))
    assert (abs(found - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / count) + 1e-9).all()


def test_log_probabilities_are_torchs_log_softmax():
    import torch

    logits, _ = rows(1, 300)
    wanted = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1)
    found = logprob(logits, 17, 5)
    assert found.token == 17 and abs(found.logprob - wanted[17].item()) < 1e-12
    values, ids = wanted.topk(5)
    assert [i for i, _ in found.top] == ids.tolist()
    np.testing.assert_allclose([v for _, v in found.top], values.numpy(), atol=1e-12)
    assert logprob(row(1, 1, 1), 2, 0).top == () and len(logprob(row(1, 1), 0, 9).top) == 2
    assert logprob(row(0, -np.inf), 1, 1).logprob == -np.inf


def test_samples_of_a_prompt_draw_apart_and_the_first_is_what_one_is():
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    each = [[sample(logits, Sampling(1.0, seed=7, sample=n), i) for i in range(20)] for n in range(3)]
    assert each[0] == [sample(logits, Sampling(1.0, seed=7), i) for i in range(20)]
    assert len(set(map(tuple, each))) == 3


@pytest.mark.parametrize("option, bad", [
    ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0), ("repetition_penalty", "x"),
    ("presence_penalty", float("inf")), ("frequency_penalty", True), ("logit_bias", [1]), ("logit_bias", {"a": 1}),
    ("logit_bias", {1: float("nan")}), ("logit_bias", {-1: 0.0}), ("logit_bias", {1: float("inf")}), ("logprobs", -1),
    ("logprobs", 1.5), ("sample", -1), ("temperature", 1e39), ("temperature", 10**400), ("presence_penalty", 10**400),
    ("frequency_penalty", -1e39), ("repetition_penalty", 1e39), ("repetition_penalty", 1e-39),
    ("logit_bias", {1: 1e39}), ("logit_bias", {True: 1.0}), ("logit_bias", {1: True}), ("logit_bias", None),
])  # fmt: skip
def test_bad_options_of_the_newer_kind_are_named(option, bad):
    with pytest.raises(OptionError, match=f"^{option} must be"):
        Sampling(**{option: bad})
