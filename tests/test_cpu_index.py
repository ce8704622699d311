"""The index of sparse attention on the cpu: against float64 formulas, and its bit-for-bit laws."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from adaptc.backends.cpu.kernels import attend_rows, attention, index, index_blocks
from adaptc.protocol import OpSpec, StateSpec, TensorSpec
from cpu_kernel import run
from test_cpu_attention import NAN, STORED, rounded

KERNELS = SimpleNamespace(SELECT=index.SELECT | index_blocks.SELECT | attention.SELECT,
                          FAMILIES=index.FAMILIES | index_blocks.FAMILIES | attention.FAMILIES | attend_rows.FAMILIES)


class Paged:
    """A pool of NaN, in which requests of ``lengths`` tokens get pages in random order."""

    def __init__(self, parts, lengths, dtype="f32", page_size=8, key_block=16, seed=0):
        scale = "f32" if dtype == "i8" else ""
        pages = [-(-n // page_size) for n in lengths]
        self.state = StateSpec(parts, dtype, 0, page_size, key_block, max(pages) + 1, scale)
        dtype_bytes = np.dtype(STORED[dtype]).itemsize
        self.pool = np.full((sum(pages) + 3, self.state.token_bytes() * page_size // dtype_bytes), NAN[dtype], STORED[dtype])
        order = np.random.default_rng(seed).permutation(len(self.pool)).tolist()
        self.table = np.full((len(lengths), max(pages) + 1), -1, np.int32)
        for request, count in enumerate(pages):
            self.table[request, :count] = [order.pop() for _ in range(count)]

    @property
    def memory(self):
        return self.pool, self.table


class Index:
    """Requests' queries, keys and weights, and steps over them."""

    def __init__(self, lengths, heads=3, width=16, top_k=5, scaling=0.3, seed=0, scale=1.0, **paging):
        rng = np.random.default_rng(seed)
        self.data = [[(scale * rng.standard_normal((n, *shape))).astype(np.float32)
                      for shape in ((heads, width), (width,), (heads,))] for n in lengths]
        self.lengths, self.top_k, self.scaling = lengths, top_k, scaling
        self.cache = Paged((("index", 1, width),), lengths, seed=seed, **paging)
        floats = [TensorSpec("f32", ("T", *shape)) for shape in ((heads, width), (width,), (heads,))]
        self.spec = OpSpec("index_rows", (*floats, *[TensorSpec("i32", ("T",))] * 2, self.cache.state),
                           (TensorSpec("i32", ("T", top_k)),), {"top_k": top_k, "scaling": scaling})

    def step(self, rows, threads=1):
        """One step over ``rows``: (request, position) of each token."""
        parts = [np.stack([self.data[r][i][p] for r, p in rows]) for i in range(3)]
        where = [np.array([row[i] for row in rows], np.int32) for i in (1, 0)]
        symbols = (len(rows), len(self.lengths), 1)
        return run(KERNELS, self.spec, (*parts, *where, self.cache.memory), symbols, threads)[0]

    def everything(self):
        return [(r, p) for r, n in enumerate(self.lengths) for p in range(n)]

    def expected(self, request, position):
        query, keys, weights = (x.astype(np.float64) for x in self.data[request])
        keys = rounded(self.data[request][1], self.cache.state.dtype).astype(np.float64)[: position + 1]
        scores = np.maximum(keys @ query[position].T * self.scaling, 0) @ weights[position]
        chosen = sorted(np.argsort(-scores, kind="stable")[: self.top_k])
        return [*chosen, *[-1] * (self.top_k - len(chosen))]


def check_every_way(index):
    """At once (each thread scores for its own tokens), one by one (threads share the scoring), and by several threads."""
    rows = index.everything()
    whole = index.step(rows)
    for row, got in zip(rows, whole.tolist()):
        assert got == index.expected(*row), row
    assert np.array_equal(index.step(rows, 3), whole)
    for place in range(0, len(rows), 7):
        assert index.step(rows[place : place + 1], 4).tolist() == [whole[place].tolist()]


@pytest.mark.parametrize("dtype, page_size, heads, top_k, lengths", [
    ("f32", 8, 3, 5, (50, 1, 17)), ("f16", 1, 2, 4, (40, 9)), ("bf16", 3, 1, 16, (61,)), ("i8", 8, 4, 7, (33, 20)),
    ("i8", 3, 4, 3, (30,)), ("f32", 64, 2, 100, (90, 30)), ("f32", 16, 2, 1, (700,))])
def test_it_is_the_formula_however_the_tokens_come(dtype, page_size, heads, top_k, lengths):
    index = Index(lengths, heads, top_k=top_k, dtype=dtype, page_size=page_size)
    check_every_way(index)


def test_of_equal_scores_the_first_are_chosen():
    index = Index((80,), heads=2, top_k=6)
    index.data[0][0][:], index.data[0][2][:] = 1, 1
    index.data[0][1][:] = 1
    index.data[0][1][[60, 70]] = 2
    got = index.step(index.everything())
    assert got[50].tolist() == [0, 1, 2, 3, 4, 5] and got[79].tolist() == [0, 1, 2, 3, 60, 70]
    index.data[0][1][:] = -1  # nothing is above 0
    assert index.step(index.everything())[79].tolist() == [0, 1, 2, 3, 4, 5]
    index.data[0][0][:], index.data[0][2][:], index.data[0][1][1::2] = 1e-30, -1e-30, 1  # every second score underflows
    assert index.step(index.everything())[79].tolist() == [0, 1, 2, 3, 4, 5]


def test_falling_and_rising_scores_fill_the_room_for_candidates():
    for order in (1, -1):
        index = Index((300,), heads=1, top_k=9)
        index.data[0][0][:], index.data[0][2][:] = 1, -1
        index.data[0][1][:] = 1 + np.arange(300)[::order, None]
        wanted = range(9) if order == 1 else range(291, 300)
        assert index.step(index.everything())[299].tolist() == list(wanted)


# ---- an index of blocks


class Blocks(Index):
    """The same for ``index_blocks``, whose heads choose apart."""

    def __init__(self, lengths, heads=2, width=16, top_k=3, block=4, local=1, seed=0, **paging):
        super().__init__(lengths, heads, width, seed=seed, **paging)
        self.top_k, self.block, self.local = top_k, block, local
        self.spec = OpSpec("index_blocks", (*self.spec.operands[:2], *self.spec.operands[3:]),
                           (TensorSpec("i32", ("T", heads, top_k * block)),), {"top_k": top_k, "block": block, "local": local})

    def step(self, rows, threads=1):
        parts = [np.stack([self.data[r][i][p] for r, p in rows]) for i in range(2)]
        where = [np.array([row[i] for row in rows], np.int32) for i in (1, 0)]
        return run(KERNELS, self.spec, (*parts, *where, self.cache.memory), (len(rows), len(self.lengths), 1), threads)[0]

    def expected(self, request, position):
        query = self.data[request][0][position].astype(np.float64)
        scores = query @ rounded(self.data[request][1], self.cache.state.dtype).astype(np.float64)[: position + 1].T
        own, rows = position // self.block, []
        for of_head in scores:
            best = [of_head[b * self.block : (b + 1) * self.block].max() if b <= own - self.local else np.inf
                    for b in range(own + 1)]
            chosen = sorted(np.argsort(-np.array(best), kind="stable")[: self.top_k])
            places = [p for b in chosen for p in range(b * self.block, (b + 1) * self.block) if p <= position]
            rows.append([*places, *[-1] * (self.top_k * self.block - len(places))])
        return rows


@pytest.mark.parametrize("dtype, page_size, heads, top_k, block, local, lengths", [
    ("f32", 8, 2, 3, 4, 1, (50, 1, 17)), ("f16", 1, 1, 2, 1, 0, (40, 9)), ("i8", 3, 4, 5, 16, 2, (61, 100)),
    ("bf16", 16, 2, 2, 32, 1, (150,)), ("f32", 64, 3, 100, 8, 1, (90, 30))])
def test_blocks_are_the_formula_however_the_tokens_come(dtype, page_size, heads, top_k, block, local, lengths):
    index = Blocks(lengths, heads, top_k=top_k, block=block, local=local, dtype=dtype, page_size=page_size)
    check_every_way(index)


def test_blocks_that_no_block_of_the_cache_is_made_of_have_no_kernel():
    assert index_blocks.select(Blocks((9,), block=12).spec) is None


# ---- attention over chosen rows


@pytest.mark.parametrize("dtype, page_size, heads, kv_heads, top_k, sinks", [
    ("f32", 8, 4, 2, 40, False), ("f16", 3, 3, 1, 7, True), ("bf16", 1, 2, 2, 16, False), ("i8", 16, 6, 2, 33, True)])
def test_attention_reads_the_chosen_rows_alone(dtype, page_size, heads, kv_heads, top_k, sinks):
    """Softmax over them in float64. Rows that nobody chooses are NaN, and the first tokens choose fewer."""
    lengths, width, value_width = (70, 11), 16, 8
    rng = np.random.default_rng(1)
    cache = Paged((("k", kv_heads, width), ("v", kv_heads, value_width)), lengths, dtype, page_size)
    shapes = (heads, width), (kv_heads, width), (kv_heads, value_width)
    data = [[rng.standard_normal((n, *shape)).astype(np.float32) for shape in shapes] for n in lengths]
    never = 5
    chosen = [[np.sort(rng.choice([p for p in range(t + 1) if p != never or t == never], min(top_k, max(t, 1)), False))
               if t != never else np.array([never]) for t in range(n)] for n in lengths]
    tokens = [(r, p) for r, n in enumerate(lengths) for p in range(n)]
    rows = np.full((len(tokens), top_k), -1, np.int32)
    for out, (r, p) in zip(rows, tokens):
        out[: len(chosen[r][p])] = chosen[r][p]
    sink = rng.standard_normal(heads).astype(np.float32)
    extras = (*((sink,) if sinks else ()), rows)
    specs = (*(TensorSpec("f32", ("T", *shape)) for shape in shapes), *[TensorSpec("i32", ("T",))] * 2, cache.state,
             *[TensorSpec("f32", (heads,))] * sinks, TensorSpec("i32", ("T", top_k)))
    spec = OpSpec("attention", specs, (TensorSpec("f32", ("T", heads, value_width)),),
                  {"scaling": 0.25, "window": 0, "softcap": 0.0, "extras": ("sinks", "rows") if sinks else ("rows",)})

    def step(some, threads=1):
        parts = [np.stack([data[r][i][p] for r, p in (tokens[t] for t in some)]) for i in range(3)]
        where = [np.array([tokens[t][i] for t in some], np.int32) for i in (1, 0)]
        return run(KERNELS, spec, (*parts, *where, cache.memory, *extras[:-1], rows[some]), (len(some), 2, 1), threads)[0]

    whole = step(list(range(len(tokens))))
    for got, (r, p) in zip(whole, tokens):
        q = data[r][0][p].astype(np.float64)
        k, v = (rounded(x, dtype).astype(np.float64)[chosen[r][p]] for x in data[r][1:])
        for h in range(heads):
            scores = np.concatenate([k[:, h * kv_heads // heads] @ q[h] * 0.25, sink[h : h + 1] if sinks else []])
            weights = np.exp(scores - scores.max())
            want = (weights / weights.sum())[: len(k)] @ v[:, h * kv_heads // heads]
            assert np.abs(got[h] - want).max() < 3e-6 * np.abs(v).max()
    assert np.array_equal(step(list(range(len(tokens))), 3), whole)
    for t in range(0, len(tokens), 9):
        assert np.array_equal(step([t], 2)[0], whole[t])


@pytest.mark.parametrize("dtype, heads", [("f32", 4), ("i8", 66)])
def test_latent_attention_reads_the_chosen_rows_alone(dtype, heads):
    """All heads, in sets of those that share a block, over rows whose first columns are their values."""
    length, width, value_width, top_k = 40, 24, 16, 20
    rng = np.random.default_rng(2)
    cache = Paged((("latent", 1, width),), (length,), dtype)
    query, row = (rng.standard_normal((length, *shape)).astype(np.float32) for shape in ((heads, width), (width,)))
    rows = np.full((length, top_k), -1, np.int32)
    for out, t in zip(rows, range(length)):
        out[: min(top_k, t // 2 + 1)] = np.sort(rng.choice(t + 1, min(top_k, t // 2 + 1), False))
    floats = [TensorSpec("f32", ("T", *x.shape[1:])) for x in (query, row)]
    spec = OpSpec("latent_attention", (*floats, *[TensorSpec("i32", ("T",))] * 2, cache.state, TensorSpec("i32", ("T", top_k))),
                  (TensorSpec("f32", ("T", heads, value_width)),), {"scaling": 0.2, "value_width": value_width, "extras": ("rows",)})

    def step(some, threads=1):
        where = np.array(some, np.int32), np.zeros(len(some), np.int32)
        return run(KERNELS, spec, (query[some], row[some], *where, cache.memory, rows[some]), (len(some), 1, 1), threads)[0]

    whole = step(list(range(length)))
    kept = rounded(row, dtype).astype(np.float64)
    for t in range(length):
        keys = kept[rows[t][rows[t] >= 0]]
        scores = query[t].astype(np.float64) @ keys.T * 0.2
        weights = np.exp(scores - scores.max(1, keepdims=True))
        np.testing.assert_allclose(whole[t], weights / weights.sum(1, keepdims=True) @ keys[:, :value_width], atol=1e-5)
    assert np.array_equal(step(list(range(length)), 3), whole)
    assert all(np.array_equal(step([t], 2)[0], whole[t]) for t in range(0, length, 9))
