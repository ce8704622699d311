"""Operators with a value of fixed size a request: causal convolution, linear recurrences, running maxima and pooling.

Their state is what the tokens so far have made of it, in float32. A step's tokens of one request stand side by side, in
order, and advance it one by one, so that every way of cutting a sequence into steps gives the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from adaptc.ops.mixing import FixedState
from adaptc.ops.table import REQUIRED, OpRow, expect, scaled, size
from adaptc.protocol import StateSpec, TensorSpec

READ = ("after", "before")
"""When ``recur`` reads its state: after the token has changed it, or before."""


def _advance(state: FixedState, positions: np.ndarray, requests: np.ndarray, initial: float,
             token: Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Every token's result. ``token(t, value)`` gives it and the next value of the state's one part, from the value
    before the token."""
    now: dict[int, np.ndarray] = {}
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    results = []
    for t, (position, request) in enumerate(zip(positions.tolist(), requests.tolist())):
        if request not in now:
            starts[request] = position
            (now[request],) = state.read(request, position, initial)
        result, value = token(t, now[request])
        now[request], ends[request] = value.astype(np.float32), position + 1
        results.append(result)
    for request, value in now.items():
        state.write(request, starts[request], ends[request], [value])
    return np.stack(results).astype(np.float32)


def _check_places(name: str, tokens: Any, positions: TensorSpec, requests: TensorSpec) -> None:
    for what, spec in (("positions", positions), ("requests", requests)):
        expect(spec == TensorSpec("i32", (tokens,)),
               f"{name}: {what} are {spec.dtype}{list(spec.shape)}, expected i32 [{tokens}], one a token.")


def _check_floats(name: str, **operands: tuple[TensorSpec, str, bool]) -> None:
    """That each operand is float32 and has the shape that its entry's last part says; the middle part spells it."""
    for what, (spec, wanted, fits) in operands.items():
        expect(spec.dtype == "f32" and fits, f"{name}: {what} is {spec.dtype}{list(spec.shape)}, expected f32 {wanted}.")


def _check_state(name: str, state: StateSpec, heads: int, width: int) -> None:
    expect([part[1:] for part in state.parts] == [(heads, width)],
           f"{name}: the state keeps {state.parts}, expected one part of {heads} heads and width {width}.")
    expect(state.dtype == "f32" and not state.scale and not state.window,
           f"{name}: the state has dtype {state.dtype!r} and window {state.window}; expected f32 and none.")


# ---- convolve


def _infer_convolve(attrs, operands):
    x, weight, positions, requests, state, *bias = operands
    _check_floats("convolve", input=(x, "[T, C]", len(x.shape) == 2 and isinstance(x.shape[1], int)))
    tokens, channels = x.shape
    fits = len(weight.shape) == 2 and weight.shape[0] == channels and weight.shape[1] > 1
    _check_floats("convolve", weight=(weight, f"[{channels}, W] with W > 1", fits),
                  **{"bias": (b, f"[{channels}]", b.shape == (channels,)) for b in bias})
    _check_places("convolve", tokens, positions, requests)
    _check_state("convolve", state, weight.shape[1] - 1, channels)
    return (TensorSpec("f32", x.shape),)


def _convolve(attrs, x, weight, positions, requests, state: FixedState, bias=None):
    """Σⱼ weight[:, j]·x[t - (W - 1) + j] + bias, with 0 for what stands before the first token."""
    taps = weight.astype(np.float64)

    def token(t, window):
        rows = np.concatenate([window, x[t : t + 1]])
        result = np.einsum("wc,cw->c", rows, taps)
        return (result if bias is None else result + bias), rows[1:]

    return (_advance(state, positions, requests, 0.0, token),)


# ---- recur


def _infer_recur(attrs, operands):
    query, key, value, decay, positions, requests, state, *beta = operands
    expect(attrs["read"] in READ, f"recur: read is {attrs['read']!r}, expected {' or '.join(READ)}.")
    three = lambda spec: len(spec.shape) == 3 and all(isinstance(d, int) for d in spec.shape[1:])  # noqa: E731
    _check_floats("recur", query=(query, "[T, H, K]", three(query)))
    tokens, heads, width = query.shape
    whole = f"[{tokens}, {heads}, {width}]"
    _check_floats(
        "recur", key=(key, whole, key.shape == query.shape),
        value=(value, f"[{tokens}, {heads}, V]", three(value) and value.shape[:2] == query.shape[:2]),
        decay=(decay, f"{whole} or [{tokens}, {heads}, 1]", decay.shape in (query.shape, (tokens, heads, 1))),
        **{"beta": (b, f"[{tokens}, {heads}]", b.shape == (tokens, heads)) for b in beta})
    _check_places("recur", tokens, positions, requests)
    _check_state("recur", state, heads, width * value.shape[2])
    return (TensorSpec("f32", value.shape),)


def _recur(attrs, query, key, value, decay, positions, requests, state: FixedState, beta=None):
    """For each head a matrix S [K, V]: S ← e^decay·S, then S ← S + key·uᵀ, where u is the value or, with beta (the delta
    rule), beta·(value - Sᵀ·key). The result is Sᵀ·query, of the new S or, read "before", of the old one."""
    _, heads, width = query.shape
    q, k, v, d = (a.astype(np.float64) for a in (query, key, value, decay))

    def token(t, held):
        before = held.reshape(heads, width, -1).astype(np.float64)
        after = np.exp(d[t])[..., None] * before
        update = v[t] if beta is None else beta[t, :, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], after))
        after = after + k[t][..., None] * update[:, None]
        result = np.einsum("hk,hkv->hv", q[t], before if attrs["read"] == "before" else after)
        return result, after.reshape(heads, -1)

    return (_advance(state, positions, requests, 0.0, token),)


def _recur_flops(attrs, operands, results):
    """A multiplication to decay, two operations each to update, to read and, with the delta rule, to read by the key."""
    query, value, beta = operands[0], operands[2], operands[7:]
    return scaled(size((*query.shape, value.shape[2])), 7 if beta else 5)


# ---- running_max


def _infer_running_max(attrs, operands):
    x, decay, positions, requests, state = operands
    _check_floats("running_max", input=(x, "[T, C]", len(x.shape) == 2 and isinstance(x.shape[1], int)),
                  decay=(decay, f"{list(x.shape)}", decay.shape == x.shape))
    _check_places("running_max", x.shape[0], positions, requests)
    _check_state("running_max", state, 1, x.shape[1])
    return (TensorSpec("f32", x.shape),)


def _running_max(attrs, x, decay, positions, requests, state: FixedState):
    """m ← max(m + decay, x), from -∞ on. A NaN stays."""

    def token(t, held):
        value = np.maximum(held + decay[t], x[t])
        return value[0], value

    return (_advance(state, positions, requests, -np.inf, token),)


# ---- pool


def pooled(series: int) -> list[tuple[int, int]]:
    """What ``pool`` keeps, in order: (series, how many windows ago) of each running softmax."""
    return [(one, ago) for one in range(series) for ago in range(series - one)]


def _infer_pool(attrs, operands):
    value, gate, positions, requests, state, *bias = operands
    three = len(value.shape) == 3 and all(isinstance(d, int) for d in value.shape[1:])
    tokens, *inner = value.shape
    _check_floats("pool", value=(value, "[T, S, C]", three),
                  gate=(gate, f"{list(value.shape)}", gate.shape == value.shape), **{"bias": (b, f"[{attrs['rate']}, S, C]", b.shape == (attrs["rate"], *inner)) for b in bias})
    expect(attrs["rate"] >= 1, f"pool: the rate is {attrs['rate']}, expected the tokens of a window, 1 at least.")
    _check_places("pool", tokens, positions, requests)
    _check_state("pool", state, 3 * len(pooled(inner[0])), inner[1])
    return (TensorSpec("f32", (tokens, inner[1])),)


def _pool(attrs, value, gate, positions, requests, state: FixedState, bias=None):
    """Σ softmax(gate + bias) · value, for each channel over the tokens so far of a window of ``rate``, counted from position
    0, by the last series, over those of the whole window before by the one before it, and so on; bias[i] belongs to a
    window's i-th token. Of each series, the running softmax of the open window is kept, and of those before it that
    later windows need: its largest gate, the sum of exponentials and that of values."""
    _, series, channels = value.shape
    rate, kept = attrs["rate"], pooled(series)

    def token(t, held):
        before = {place: held[3 * i : 3 * i + 3].astype(np.float64) for i, place in enumerate(kept)}
        window, inside = divmod(int(positions[t]), rate)
        if inside == 0:
            before = {(one, ago): before[one, ago - 1] if ago else np.zeros((3, channels)) for one, ago in kept}
        for one in range(series):
            top, total, weighed = before[one, 0]
            own = gate[t, one].astype(np.float64) + (0 if bias is None else bias[inside, one])
            most = np.maximum(top, own) if inside else own
            old, new = np.exp(top - most) if inside else 0.0, np.exp(own - most)
            before[one, 0] = np.stack([most, total * old + new, weighed * old + value[t, one] * new])
        read = [before[one, series - 1 - one] for one in range(series) if window >= series - 1 - one]
        most = np.max([top for top, _, _ in read], 0)
        total = sum(np.exp(top - most) * total for top, total, _ in read)
        result = sum(np.exp(top - most) * weighed for top, _, weighed in read) / total
        return result, np.concatenate([before[place] for place in kept])

    return (_advance(state, positions, requests, 0.0, token),)


# ---- what they are verified with: values that models give them


def _forgets(values: np.ndarray) -> np.ndarray:
    """Decays are logarithms of factors up to 1."""
    return -np.abs(values)


def _share(values: np.ndarray) -> np.ndarray:
    """Between 0 and 1, as sigmoids are."""
    return 0.5 + 0.5 * np.tanh(values)


def _direction(values: np.ndarray) -> np.ndarray:
    """Rows of length 1 at most, as L2 norms leave them."""
    return values / np.maximum(np.sqrt((values.astype(np.float64) ** 2).sum(-1, keepdims=True)), 1e-6)


RANGES = {
    "slow": lambda rng, shape: rng.standard_normal(shape) * 1e-2,
    "fast": lambda rng, shape: rng.standard_normal(shape) * 5,
}
"""As decays: a past of a hundred tokens, and hardly any. Real gates reach from one to the other."""

ROWS = [
    OpRow("convolve", ("x", "weight", "positions", "requests", "state", "bias?"), _infer_convolve, _convolve,
          factors="tc,cw,t,t,c->tc", cost=lambda a, o, r: scaled(size((*o[0].shape, o[1].shape[1])), 2), state=4,
          keeps="fixed"),
    OpRow("recur", ("query", "key", "value", "decay", "positions", "requests", "state", "beta?"), _infer_recur, _recur,
          attrs={"read": "after"}, factors="thk,thk,thv,thd,t,t,th->thv", cost=_recur_flops, state=6, keeps="fixed",
          ranges=RANGES, domain={"decay": _forgets, "beta": _share, "key": _direction}),
    OpRow("running_max", ("x", "decay", "positions", "requests", "state"), _infer_running_max, _running_max,
          factors="tc,tc,t,t->tc", cost=lambda a, o, r: scaled(size(o[0].shape), 2), state=4, keeps="fixed",
          ranges=RANGES, domain={"decay": _forgets}),
    OpRow("pool", ("value", "gate", "positions", "requests", "state", "bias?"), _infer_pool, _pool,
          attrs={"rate": REQUIRED}, factors="tsc,tsc,t,t,rsc->tc",
          cost=lambda a, o, r: scaled(size(o[0].shape), 8), state=4, keeps="fixed"),
]
"""convolve: a causal depthwise convolution, torch's cross-correlation: the last tap multiplies the current token. Its
state is the window of the W - 1 tokens before.
recur: a linear recurrence of a matrix a head: gated delta rule, KDA, Mamba (heads = channels and V = 1 for the first),
linear attention, RG-LRU (K = V = 1), RWKV.
running_max: what keeps exponentials of recurrences in range.
pool: compressed attention's entries, of which the one at a window's last token is kept (DeepSeek-V4)."""
