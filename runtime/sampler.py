"""From a row of logits to a token. A draw is a pure function of (logits, options, seed, the request's own tokens).

The generator is counter-based (Philox), keyed by the request's seed and its number among the samples of its prompt,
and counted by the token's index: no state to keep, so a retried step draws the same and the batch a request runs in
doesn't matter.

What is done to the logits, in vLLM's order: ``logit_bias``, repetition penalty, frequency and presence penalties (then
the largest is the greedy choice), temperature, ``min_p``, ``top_k``, ``top_p``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

import numpy as np

from adaptc.errors import NotANumberError, OptionError


LARGEST = float(np.finfo(np.float32).max)
"""What bias, penalties and temperature may be at most, so that sums and products of them stay far within float64."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    temperature         0 = greedy: the largest logit, the lowest id among equals
    top_k               only the k largest logits (0 = all); among equals the lower ids
    top_p               only the most probable tokens whose probabilities (after min_p and top_k) just reach top_p
    min_p               only tokens at least min_p times as probable as the most probable one (0 = all)
    repetition_penalty  logits of all tokens of prompt and answer are divided by it where positive, multiplied where
                        negative (CTRL, as in transformers and vLLM); 1 = off
    presence_penalty    subtracted from the logits of tokens of the answer so far (OpenAI); 0 = off
    frequency_penalty   subtracted from them once for each time they occur in the answer (OpenAI); 0 = off
    logit_bias          token id → what is added to its logit; -inf forbids it
    seed                0 … 2**64-1
    sample              this request's number among the samples of its prompt; each draws for itself
    logprobs            None, or: report each token's log-probability and those of this many likeliest tokens, by the
                        model's own distribution (before everything above)
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    sample: int = 0

    def __post_init__(self):
        check("temperature", self.temperature, Real, "a number ≥ 0 that float32 holds", lambda v: 0 <= v <= LARGEST)
        check("top_k", self.top_k, Integral, "an integer ≥ 0 (0 = off)", lambda v: v >= 0)
        check("top_p", self.top_p, Real, "a number in (0, 1]", lambda v: 0 < v <= 1)
        check_seed(self.seed)
        check("min_p", self.min_p, Real, "a number in [0, 1] (0 = off)", lambda v: 0 <= v <= 1)
        check("repetition_penalty", self.repetition_penalty, Real, "a number > 0 that float32 holds (1 = off)",
              lambda v: 1 / LARGEST <= v <= LARGEST)  # fmt: skip
        for name in ("presence_penalty", "frequency_penalty"):
            check(name, getattr(self, name), Real, "a number that float32 holds (0 = off)", lambda v: abs(v) <= LARGEST)
        check("logit_bias", self.logit_bias, Mapping,
              "token ids with what is added to their logits, numbers that float32 holds or -inf", _is_bias)  # fmt: skip
        if self.logprobs is not None:
            check("logprobs", self.logprobs, Integral, "None or an integer ≥ 0", lambda v: v >= 0)
        check("sample", self.sample, Integral, "an integer from 0 to 2**64-1", lambda v: 0 <= v < 2**64)

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True)
class Logprob:
    """Natural log-probabilities at one place of an answer: the chosen ``token``'s, and those of the likeliest ones
    (most likely first, lower ids first among equals)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def check(name: str, value: object, kind: type, wanted: str, valid) -> None:
    """Raises OptionError, which names the option, unless ``value`` is of ``kind`` (never a bool) and ``valid``."""
    if isinstance(value, bool) or not isinstance(value, kind) or not valid(value):
        raise OptionError(f"{name} must be {wanted}, got {value!r}.")


def check_seed(seed: object) -> None:
    """Raises OptionError for what is no seed of numpy's generators."""
    check("seed", seed, Integral, "an integer from 0 to 2**64-1", lambda v: 0 <= v < 2**64)


def _is_bias(bias: Mapping) -> bool:
    numbers = all(isinstance(k, Integral) and isinstance(v, Real) for k, v in bias.items())
    bools = any(isinstance(one, bool) for pair in bias.items() for one in pair)
    return numbers and not bools and all(k >= 0 and (abs(v) <= LARGEST or v == -math.inf) for k, v in bias.items())


def sample(logits: np.ndarray, sampling: Sampling, index: int, tokens: Sequence[int] | np.ndarray = ()) -> int:
    """The token with number ``index`` (0 = first generated) of a request, from its row ``logits`` f32[vocabulary].

    ``tokens`` are the request's so far, prompt and then the ``index`` generated ones; only penalties read them.
    """
    best = _best(logits)
    if sampling.logit_bias or sampling.penalises:
        logits = adjusted(logits, sampling, np.asarray(tokens, np.int64), index)
        best = _best(logits)
    if sampling.temperature == 0 or sampling.top_k == 1:
        return best
    ids = _top_k(logits, sampling.top_k)
    weights = (logits if ids is None else logits[ids]).astype(np.float64)
    weights -= float(logits[best])
    with np.errstate(over="ignore"):  # a small temperature makes -inf of what is far from the best
        weights /= float(sampling.temperature)
    np.exp(weights, out=weights)
    # The likeliest token's weight is 1. It is among the top k, and both keep a beginning of the tokens in order of
    # weight, so it doesn't matter which is done first.
    if sampling.min_p > 0:
        weights, ids = _only(np.flatnonzero(weights >= sampling.min_p), weights, ids)
    if sampling.top_p < 1:
        weights, ids = _only(_top_p(weights, sampling.top_p), weights, ids)
    sums = weights.cumsum()
    key = int(sampling.seed) | int(sampling.sample) << 64
    draw = np.random.Generator(np.random.Philox(key=key, counter=index)).random()
    at = min(int(sums.searchsorted(draw * sums[-1], side="right")), len(sums) - 1)
    return at if ids is None else int(ids[at])


def adjusted(logits: np.ndarray, sampling: Sampling, tokens: np.ndarray, index: int) -> np.ndarray:
    """``logits`` with bias and penalties; the last ``index`` of ``tokens`` are generated. Options count as float32, and
    sums are float64, which no sum of theirs leaves."""
    logits = logits.astype(np.float64)
    for token, bias in sampling.logit_bias.items():
        logits[token] += np.float32(bias)
    if sampling.repetition_penalty != 1:
        seen, penalty = np.unique(tokens), np.float32(sampling.repetition_penalty)
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        seen, counts = np.unique(tokens[len(tokens) - index :], return_counts=True)
        logits[seen] -= counts * np.float64(np.float32(sampling.frequency_penalty))
        logits[seen] -= np.float32(sampling.presence_penalty)
    return logits


def logprob(logits: np.ndarray, token: int, count: int) -> Logprob:
    """Log-probabilities of ``token`` and of the ``count`` likeliest tokens, from the model's row ``logits``."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    total = math.log(np.exp(wide).sum())
    top = _largest(logits, min(count, len(logits))) if count else ()
    return Logprob(token, float(wide[token]) - total, tuple((int(i), float(wide[i]) - total) for i in top))


def _best(logits: np.ndarray) -> int:
    best = int(logits.argmax())  # numpy: the first of equals, and the first NaN if there is one
    if not math.isfinite(logits[best]):
        value = "NaN" if math.isnan(logits[best]) else "infinite" if logits[best] > 0 else "-infinity"
        raise NotANumberError(f"The largest logit is {value}, of token {best}; nothing can be sampled.",
                              hint="A value may have left the range of a narrow cache: compile with --kv bf16 or f32.")  # fmt: skip
    return best


def _only(kept: np.ndarray, weights: np.ndarray, ids: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    return weights[kept], kept if ids is None else ids[kept]


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the ``count`` largest values, largest first, lower indices first among equals; without a full sort."""
    candidates = np.flatnonzero(values >= _bound(values, count))
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


def _bound(values: np.ndarray, count: int, size: int = 128) -> np.floating:
    """A value that at least ``count`` values reach and, for a large vocabulary, few more do.

    At least ``count`` groups have a largest value that reaches the count-th of those: for 262,144 values 0.04 ms, where
    partitioning them all takes 2.
    """
    groups = len(values) // size
    if count < groups:
        values = values[: groups * size].reshape(size, groups).max(axis=0)
    return np.partition(values, len(values) - count)[len(values) - count]


def _top_k(logits: np.ndarray, k: int) -> np.ndarray | None:
    return None if k == 0 or k >= len(logits) else _largest(logits, k)


def _top_p(weights: np.ndarray, p: float) -> np.ndarray:
    """Indices of the heaviest weights that together just reach the share ``p``, heaviest first."""
    target, count = p * weights.sum(), min(64, len(weights))
    while True:
        order = _largest(weights, count)
        sums = weights[order].cumsum()
        if sums[-1] >= target or count == len(weights):
            return order[: int(sums.searchsorted(target)) + 1]
        count = min(count * 8, len(weights))
