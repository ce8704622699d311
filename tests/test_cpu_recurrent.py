"""Operators with a value of fixed size a request on the cpu: against float64 formulas, and their bit-for-bit laws."""

from __future__ import annotations

import numpy as np
import pytest
from adaptc.backends.cpu.kernels import recurrent
from adaptc.ops.table import row
from adaptc.protocol import OpSpec, StateSpec, TensorSpec
from cpu_kernel import run

TOKENS = 11


def convolution(x, weight, bias=None):
    """Each output is a dot product of the taps with the padded signal."""
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x.astype(np.float64)])
    out = sum(padded[j : j + len(x)] * weight[:, j].astype(np.float64) for j in range(taps))
    return out if bias is None else out + bias


def recurrence(query, key, value, decay, beta=None, read="after"):
    """One head at a time, one matrix at a time."""
    tokens, heads, width = query.shape
    out = np.empty(value.shape)
    for h in range(heads):
        s = np.zeros((width, value.shape[2]))
        for t in range(tokens):
            q, k, v = (a[t, h].astype(np.float64) for a in (query, key, value))
            if read == "before":
                out[t, h] = q @ s
            s = np.diag(np.exp(np.broadcast_to(decay[t, h], width).astype(np.float64))) @ s
            s = s + np.outer(k, v if beta is None else beta[t, h] * (v - k @ s))
            if read == "after":
                out[t, h] = q @ s
    return out


def largest(x, decay):
    """max over s ≤ t of x[s] + Σ of decays after s."""
    total = np.concatenate([np.zeros((1, x.shape[1])), np.cumsum(decay.astype(np.float64), 0)])
    return np.stack([(x[: t + 1] + (total[t + 1] - total[1 : t + 2])).max(0) for t in range(len(x))])


class Case:
    """An operator and sequences of its operands, one a request; ``fixed`` operands all requests share."""

    def __init__(self, op, shapes, formula, state, attrs=None, fixed=(), lengths=(TOKENS,), seed=0, level=None):
        rng = np.random.default_rng(seed)
        self.lengths, self.formula, self.level, self.op = lengths, formula, level, op
        draw = lambda name, shape: DOMAIN.get(name, lambda v: v)(rng.standard_normal(shape)).astype(np.float32)  # noqa: E731
        self.fixed = {name: draw(name, shapes[name]) for name in fixed}
        self.moving = [name for name in shapes if name not in fixed]
        self.data = [{name: draw(name, (n, *shapes[name])) for name in self.moving} for n in lengths]
        at = {"positions": TensorSpec("i32", ("T",)), "requests": TensorSpec("i32", ("T",)), "state": state}
        spec = lambda n: TensorSpec("f32", shapes[n] if n in fixed else ("T", *shapes[n]))  # noqa: E731
        self.names = [n for n in (name.rstrip("?") for name in row(op).operands) if n in at or n in shapes]
        operands = tuple(at.get(name) or spec(name) for name in self.names)
        self.attrs = row(op).complete(attrs or {})
        self.spec = OpSpec(op, operands, row(op).results(self.attrs, operands), self.attrs)
        self.size = state.request_bytes() // 4
        self.pool = np.full((2 * len(lengths) + 2, self.size), np.nan, np.float32)
        self.order = [int(s) for s in np.random.default_rng(seed + 1).permutation(len(self.pool))]
        self.slots = np.full((len(lengths), 2), -1, np.int32)

    def wanted(self, request=0):
        return self.formula(**self.data[request], **self.fixed)

    def step(self, runs, threads=1, commit=True):
        """Results of one step over ``runs``: (request, from, to) each."""
        table = np.stack([self.slots[r] for r, _, _ in runs])
        table[:, 1] = [self.order.pop() for _ in runs]
        requests = np.concatenate([np.full(b - a, i, np.int32) for i, (_, a, b) in enumerate(runs)])
        positions = np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in runs])
        values = {name: np.concatenate([self.data[r][name][a:b] for r, a, b in runs]) for name in self.moving}
        values |= self.fixed | {"positions": positions, "requests": requests, "state": (self.pool, table)}
        before = self.pool.copy()
        (out,) = run(recurrent, self.spec, [values[name] for name in self.names], (len(requests), len(runs), 1), threads,
                     self.level)
        others = np.setdiff1d(np.arange(len(self.pool)), table[:, 1])
        np.testing.assert_array_equal(self.pool[others], before[others])  # what is read, and what is free, stays
        for (r, _, _), (old, new) in zip(runs, table):
            done, free = (int(old), int(new)) if commit else (int(new), int(old))
            if done >= 0:
                self.pool[done] = np.nan
                self.order.insert(0, done)
            if commit:
                self.slots[r, 0] = new
        return out

    def whole(self, chunks, request=0, threads=1):
        ends = np.cumsum(chunks).tolist()
        return np.concatenate([self.step([(request, a, b)], threads) for a, b in zip([0, *ends], ends)])


DOMAIN = {"decay": lambda v: -np.abs(v), "beta": lambda v: 1 / (1 + np.exp(-v)),
          "key": lambda v: v / np.maximum(np.linalg.norm(v, axis=-1, keepdims=True), 1)}


def conv(channels=40, taps=4, bias=True, **more):
    shapes = {"x": (channels,), "weight": (channels, taps)} | ({"bias": (channels,)} if bias else {})
    return Case("convolve", shapes, convolution, StateSpec.fixed("window", taps - 1, channels),
                fixed=("weight", "bias")[: 1 + bias], **more)


def recur(heads=3, width=8, columns=40, decays=None, delta=True, read="after", **more):
    shapes = {"query": (heads, width), "key": (heads, width), "value": (heads, columns),
              "decay": (heads, decays or width)} | ({"beta": (heads,)} if delta else {})
    formula = lambda **operands: recurrence(**operands, read=read)  # noqa: E731
    return Case("recur", shapes, formula, StateSpec.fixed("state", heads, width * columns), {"read": read}, **more)


def running(channels=40, **more):
    return Case("running_max", {"x": (channels,), "decay": (channels,)}, largest, StateSpec.fixed("max", 1, channels),
                **more)


CASES = {
    "convolve": conv, "convolve, no bias": lambda **m: conv(5, 2, False, **m), "convolve, even": lambda **m: conv(64, 3, **m),
    "delta rule": recur, "delta rule, one decay a head": lambda **m: recur(2, 20, 64, 1, **m),
    "columns": lambda **m: recur(2, 7, 3, delta=False, read="before", **m),
    "linear attention": lambda **m: recur(2, 16, 32, 1, False, **m),
    "rows": lambda **m: recur(5, 16, 1, delta=False, **m), "few rows, delta rule": lambda **m: recur(3, 5, 1, **m),
    "many rows": lambda **m: recur(2, 70, 1, 1, False, "before", **m),
    "numbers": lambda **m: recur(37, 1, 1, delta=False, **m), "numbers, delta rule": lambda **m: recur(5, 1, 1, read="before", **m),
    "one row": lambda **m: recur(3, 1, 6, **m),
    "running_max": running,
}
each = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


@each
def test_formula(make):
    case = make()
    got = case.whole([TOKENS])
    np.testing.assert_allclose(got, case.wanted(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("decay", [1e-3, 0.05, 1.0, 5.0])
def test_a_long_past_at_decays_that_gates_give(decay):
    """From a thousand tokens' memory to none: errors don't add up, whatever is forgotten."""
    case = recur(2, 16, 16, lengths=(300,))
    case.data[0]["decay"] *= np.float32(decay)
    got, wanted = case.whole([300]), case.wanted()
    assert np.abs(got - wanted).max() < 2e-6 * np.abs(wanted).max() + 1e-6


@each
def test_any_chunks_and_threads_give_the_same_bits(make):
    whole = make().whole([TOKENS])
    for chunks, threads in (([1] * TOKENS, 1), ([4, 1, 6], 3), ([3, 8], 2)):
        np.testing.assert_array_equal(make().whole(chunks, threads=threads), whole)


@each
def test_batched_is_alone(make):
    lengths = (TOKENS, 3, 6)
    case = make(lengths=lengths)
    alone = [make(lengths=lengths).whole([n], request) for request, n in enumerate(lengths)]
    steps = ([(0, 0, 4), (1, 0, 2)], [(1, 2, 3), (2, 0, 1), (0, 4, 5)], [(2, 1, 6), (0, 5, TOKENS)])
    pieces = {0: [], 1: [], 2: []}
    for runs in steps:
        out, at = case.step(runs, threads=2), 0
        for request, a, b in runs:
            pieces[request].append(out[at : at + b - a])
            at += b - a
    for request, found in pieces.items():
        np.testing.assert_array_equal(np.concatenate(found), alone[request])


@each
def test_a_step_that_is_run_again_gives_the_same(make):
    """Not committed, it has changed nothing: in another slot it gives the same, and so does what follows."""
    case, whole = make(), make().whole([TOKENS])
    case.step([(0, 0, 4)])
    first = case.step([(0, 4, 7)], commit=False)
    np.testing.assert_array_equal(case.step([(0, 4, 7)], threads=2), first)
    np.testing.assert_array_equal(first, whole[4:7])
    np.testing.assert_array_equal(case.step([(0, 7, TOKENS)]), whole[7:])


@pytest.mark.parametrize("make", [conv, recur, running], ids=["convolve", "recur", "running_max"])
def test_a_snapshot_serves_several(make):
    """Two requests go on from one slot, and a third starts anew, all in one step."""
    lengths = (TOKENS,) * 3
    case = make(lengths=lengths)
    for name in case.moving:
        case.data[1][name][:5] = case.data[0][name][:5]
    alone = [case.whole([TOKENS], r) for r in range(3)]
    case.slots[:] = -1
    case.order = [s for s in range(len(case.pool))]
    case.step([(0, 0, 5)])
    case.slots[1] = case.slots[0]
    case.slots[2] = -1
    kept = case.slots[0, 0]
    out = case.step([(0, 5, 8), (1, 5, 9), (2, 0, 2)], commit=False)
    np.testing.assert_array_equal(out[:3], alone[0][5:8])
    np.testing.assert_array_equal(out[3:7], alone[1][5:9])
    np.testing.assert_array_equal(out[7:], alone[2][:2])
    assert np.isfinite(case.pool[kept]).all()
