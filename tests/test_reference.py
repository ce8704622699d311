"""The reference backend on a hand-built program: one body called twice, with weights, states and paths of its own."""

from __future__ import annotations

import numpy as np
import pytest

from adaptc.backends.reference.interpreter import Reference
from adaptc.errors import LegalityError
from adaptc.ir.module import Program
from adaptc.ops.mixing import store
from test_ir import D, V, decoder, lowered

RNG = np.random.default_rng(5)
WEIGHTS = {"table": RNG.normal(size=(V, D)), "w0": RNG.normal(size=(D, D)), "w1": RNG.normal(size=(D, D))}
WEIGHTS = {name: value.astype(np.float32) for name, value in WEIGHTS.items()}
TOKENS = np.array([3, 1, 4, 1, 5, 2, 6], np.int32)


def reference(program: Program | None = None) -> Reference:
    return Reference(program or decoder(), WEIGHTS.__getitem__)


def plain(tokens: np.ndarray) -> np.ndarray:
    """The same decoder in a dozen lines of numpy, whole sequences at once."""
    x = WEIGHTS["table"][tokens].astype(np.float64)
    for name in ("w0", "w1"):
        heads = x @ WEIGHTS[name].T.astype(np.float64)
        kept = store(heads.astype(np.float32), "f16").astype(np.float64)
        scores = heads @ kept.T * 0.5
        scores[np.triu_indices(len(tokens), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        x = x + weights / weights.sum(-1, keepdims=True) @ kept
    return x @ WEIGHTS["table"].T


def test_means_what_the_program_says():
    np.testing.assert_allclose(reference().score(TOKENS), plain(TOKENS), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("chunk", (1, 2, 3, 100))
def test_chunked_is_one_shot(chunk):
    np.testing.assert_array_equal(reference().score(TOKENS, chunk), reference().score(TOKENS))


def test_only_sampled_rows_come_back():
    whole = reference().score(TOKENS)
    places = np.arange(len(TOKENS))
    rows = reference().step(TOKENS, places, np.zeros_like(places), [6, 2])
    np.testing.assert_array_equal(rows, whole[[6, 2]])


def test_observer_gives_absolute_paths_in_program_order():
    seen = []
    reference().score(TOKENS, observe=lambda path, op, results: seen.append((path, op, results[0].shape)))
    body = [("linear", (7, D)), ("reshape", (7, 1, D)), ("attention", (7, 1, D)), ("reshape", (7, D)), ("add", (7, D))]
    assert seen == [
        ("", "embedding", (7, D)),
        *((f"layers.{i}.attn", *row) for i in (0, 1) for row in body),
        ("head", "gather_rows", (7, D)),
        ("head", "linear", (7, V)),
    ]


def test_requests_of_one_step_dont_see_each_other():
    other = TOKENS[::-1].copy()
    alone = [reference().score(t) for t in (TOKENS, other)]
    both, n = reference(), len(TOKENS)
    order = np.arange(2 * n).reshape(2, n).T.ravel()  # tokens of the two requests alternate
    tokens = np.concatenate([TOKENS, other])[order]
    got = both.step(tokens, order % n, order // n, np.argsort(order))
    np.testing.assert_array_equal(got, np.concatenate(alone))


def test_rows_stay_with_their_request():
    one = reference()
    first, second = TOKENS[:4], TOKENS[4:]
    one.score(first, request=7)
    one.score(first[::-1].copy(), request=8)
    places = np.arange(4, 7)
    got = one.step(second, places, np.full(3, 7), np.arange(3))
    np.testing.assert_array_equal(got, reference().score(TOKENS)[4:])
    with pytest.raises(LegalityError, match="request 9 lacks rows"):
        one.step(second, places, np.full(3, 9), np.arange(3))


def test_a_row_written_again_is_replaced():
    one = reference()
    one.score(TOKENS[::-1].copy())
    np.testing.assert_array_equal(one.score(TOKENS), reference().score(TOKENS))


def test_any_stage_runs_and_so_does_its_text():
    wanted = reference().score(TOKENS)
    for program in (lowered(), Program.parse(lowered().text())):
        np.testing.assert_array_equal(reference(program).score(TOKENS), wanted)
