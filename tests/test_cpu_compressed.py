"""Compressed attention on the cpu: pooled windows, and latent attention over states with a row for several tokens,
against the operators' meanings, and its bit-for-bit laws."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from adaptc.backends.cpu.kernels import attend_rows, attention, index, recurrent, sinkhorn
from adaptc.ops.mixing import oracle_state
from adaptc.ops.table import row
from adaptc.plan import page_rows, page_tokens
from adaptc.protocol import OpSpec, StateSpec, TensorSpec
from cpu_kernel import run

MODULES = (index, attention, attend_rows, recurrent)
KERNELS = SimpleNamespace(SELECT={k: v for m in MODULES for k, v in getattr(m, "SELECT", {}).items()},
                          FAMILIES={k: v for m in MODULES for k, v in m.FAMILIES.items()})


class Case:
    """One operator over two requests of ``lengths`` tokens. ``shapes``: of its float operands, each [T, …] or a weight;
    ``chosen``: how many rows each token is given."""

    def __init__(self, op, shapes, state, attrs, lengths, page_size=4, chosen=0):
        self.op, self.attrs, self.lengths, self.operator = op, attrs, lengths, row(op)
        if state.kind == "rows":
            most = -(-max(lengths) // page_tokens(page_size, state.rate)) + 1
            state = replace(state, page_size=page_rows(page_size, state.rate), key_block=16, max_pages=most)
        self.state, rng = state, np.random.default_rng(0)
        self.rng, self.chosen = rng, chosen
        self.floats = [[rng.standard_normal((n, *shape[1:])).astype(np.float32) for n in lengths] if shape[0] == "T" else
                       rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        self.shapes = shapes
        pages = most if state.kind == "rows" else 2
        order = rng.permutation(len(lengths) * pages + 1)[1:].astype(np.int32)
        self.table = order.reshape(len(lengths), -1) if state.kind == "rows" else np.full((len(lengths), 2), -1, np.int32)
        size = state.page_bytes() if state.kind == "rows" else state.request_bytes()
        self.pool = np.full((len(lengths) * pages + 2, size // 4), np.nan, np.float32)
        self.free = order.tolist()

    def rows_of(self, request, position):
        seen = (position + 1) // self.state.rate
        rng = np.random.default_rng((request, position))
        chosen = np.sort(rng.choice(seen, min(seen, self.chosen), replace=False)) if seen else []
        return [*chosen, *[-1] * (self.chosen - len(chosen))]

    def operands(self, places, held):
        """Of a step over ``places``, (request, position) of each token."""
        at = [np.array([p[i] for p in places], np.int32) for i in (1, 0)]
        given = iter([np.stack([x[r][p] for r, p in places]) if shape[0] == "T" else x
                      for x, shape in zip(self.floats, self.shapes)])
        names = [n.rstrip("?") for n in self.operator.operands]
        made = []
        for name in names:
            if name in ("positions", "requests"):
                made.append(at[name == "requests"])
            elif name == "state":
                made.append(held)
            elif name == "rows":
                made += [np.array([self.rows_of(*p) for p in places], np.int32)] if self.chosen else []
            else:
                made.append(next(given, None))
        return [m for m in made if m is not None]

    def step(self, places, threads=1):
        operands = self.operands(places, (self.pool, self.table))
        if self.state.kind == "fixed":
            for request in {r for r, _ in places}:
                old, new = self.table[request]
                self.free += [old] if old >= 0 else []
                self.table[request] = new, self.free.pop(0)
        specs = [self.state if isinstance(o, tuple) else TensorSpec(
                     {"f": "f32", "i": "i32"}[o.dtype.kind], o.shape if name == "bias?" else ("T", *o.shape[1:]))
                 for o, name in zip(operands, self.operator.operands)]
        attrs = self.operator.complete(self.attrs)
        spec = OpSpec(self.op, tuple(specs), self.operator.results(attrs, specs), attrs)
        return run(KERNELS, spec, operands, (len(places), len(self.lengths), 1), threads)

    def expected(self, places):
        return self.operator.meaning(self.operator.complete(self.attrs), *self.operands(places, oracle_state(self.state)))


WHERE = StateSpec((("latent", 1, 16),), "f32", 0, 0, 0, 0)
LATENT = [("T", 4, 16), ("T", 16)]
CASES = {
    "window": lambda: Case("latent_attention", LATENT, StateSpec(WHERE.parts, "f32", 8, 0, 0, 0),
                           {"scaling": 0.3, "value_width": 16, "window": 8, "lse": True}, (37, 9)),
    "rate": lambda: Case("latent_attention", LATENT, StateSpec(WHERE.parts, "f32", 0, 0, 0, 0, rate=4),
                         {"scaling": 0.3, "value_width": 16, "lse": True}, (61, 9)),
    "rate above a page": lambda: Case("latent_attention", LATENT, StateSpec(WHERE.parts, "f32", 0, 0, 0, 0, rate=8),
                                      {"scaling": 0.3, "value_width": 8, "lse": True}, (61, 5)),
    "many spans": lambda: Case("latent_attention", LATENT, StateSpec(WHERE.parts, "f32", 0, 0, 0, 0, rate=2),
                               {"scaling": 0.3, "value_width": 16, "lse": True}, (560, 3), page_size=16),
    "chosen": lambda: Case("latent_attention", LATENT, StateSpec(WHERE.parts, "f32", 0, 0, 0, 0, rate=4),
                           {"scaling": 0.3, "value_width": 16, "lse": True, "extras": ("rows",)}, (61, 9), chosen=5),
    "index": lambda: Case("index_rows", [("T", 3, 16), ("T", 16), ("T", 3)],
                          StateSpec((("index", 1, 16),), "f32", 0, 0, 0, 0, rate=4), {"scaling": 0.3, "top_k": 5}, (61, 9)),
    "pool": lambda: Case("pool", [("T", 1, 24), ("T", 1, 24)], StateSpec.fixed("pool", 3, 24), {"rate": 8}, (37, 9)),
    "pool of two series": lambda: Case("pool", [("T", 2, 20), ("T", 2, 20), (4, 2, 20)], StateSpec.fixed("pool", 9, 20),
                                       {"rate": 4}, (37, 9)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_meaning_however_the_tokens_come(name):
    """At once, by several threads, in chunks and one by one: the same bits."""
    lengths = CASES[name]().lengths
    places = [(r, p) for r, n in enumerate(lengths) for p in range(n)]
    case = CASES[name]()
    whole, wanted = case.step(places), case.expected(places)
    for ours, theirs in zip(whole, wanted):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)
    assert [x.tobytes() for x in CASES[name]().step(places, 3)] == [x.tobytes() for x in whole]
    for size in (1, 7):
        case, pieces = CASES[name](), []
        for start in range(0, max(lengths), size):
            if lengths == (560, 3) and size == 1 and start > 4:
                break
            step = [(r, p) for r, n in enumerate(lengths) for p in range(start, min(n, start + size))]
            pieces += zip(step, zip(*case.step(step, 2)))
        for place, got in pieces:
            at = places.index(place)
            assert all(np.array_equal(x, y[at]) for x, y in zip(got, whole)), (size, place)


def test_gates_far_from_0_pool_as_others_do():
    """Of a window's first token the gate is the largest so far, however small it is."""
    case = Case("pool", [("T", 2, 20), ("T", 2, 20)], StateSpec.fixed("pool", 9, 20), {"rate": 4}, (13,))
    case.floats[1][0] *= 1e4
    places = [(0, p) for p in range(13)]
    (got,), (wanted,) = case.step(places), case.expected(places)
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("size,iterations", [(4, 20), (2, 1), (8, 3)])
def test_sinkhorn_is_its_meaning(size, iterations):
    x = np.random.default_rng(0).random((7, size, size)).astype(np.float32) + 1e-3
    attrs, whole = {"iterations": iterations, "eps": 1e-6}, TensorSpec("f32", ("T", size, size))
    spec = OpSpec("sinkhorn", (whole,), (whole,), attrs)
    got = [run(SimpleNamespace(SELECT=sinkhorn.SELECT, FAMILIES=sinkhorn.FAMILIES), spec, (x,), (7, 1, 1), n)[0] for n in (1, 3)]
    np.testing.assert_allclose(got[0], row("sinkhorn").meaning(attrs, x)[0], rtol=1e-5)
    assert got[0].tobytes() == got[1].tobytes()
