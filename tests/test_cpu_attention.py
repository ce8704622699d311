"""Paged attention on the cpu: against float64 formulas, and its bit-for-bit laws."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from adaptc.backends.cpu.kernels import attention
from adaptc.protocol import OpSpec, StateSpec, TensorSpec
from cpu_kernel import aligned, native, run

STORED = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i8": np.uint8}
NAN = {"f32": np.nan, "f16": np.nan, "bf16": 0x7FC0, "i8": 0xFF}
"""What no number has, or, in codes, no scale."""


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as they come back from the cache."""
    if dtype == "bf16":
        bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    if dtype == "i8":
        scale = np.abs(x).max(-1, keepdims=True).astype(np.float32) / np.float32(127)
        return np.where(scale > 0, np.rint(x / np.where(scale > 0, scale, 1)), 0).astype(np.float32) * scale
    return x.astype(STORED[dtype]).astype(np.float32)


def formula(q, k, v, positions, scaling, window, softcap, chunked=False):
    """softmax(q·kᵀ) v of one request in float64: q [t,H,D] at ``positions``, k [P,Hkv,D], v [P,Hkv,Dv]."""
    out = np.empty((*q.shape[:2], v.shape[2]))
    for t, p in enumerate(positions):
        lo = p // window * window if chunked else max(0, p - window + 1) if window else 0
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // k.shape[1])
            s = k[lo : p + 1, kv].astype(np.float64) @ q[t, h].astype(np.float64) * scaling
            s = softcap * np.tanh(s / softcap) if softcap else s
            w = np.exp(s - s.max())
            out[t, h] = w @ v[lo : p + 1, kv].astype(np.float64) / w.sum()
    return out


class Cache:
    """Pools of NaN, in which requests get pages in random order; feeds steps to the kernels."""

    def __init__(self, heads=4, kv_heads=2, width=16, value_width=16, dtype="f16", window=0, softcap=0.0, page_size=8,
                 key_block=16, lengths=(40,), seed=0, scale=1.0, level=None, chunked=False):
        rng = np.random.default_rng(seed)
        self.lengths, self.dtype, self.level = lengths, dtype, level
        self.data = [
            tuple(
                (scale * rng.standard_normal((n, h, d))).astype(np.float32)
                for h, d in ((heads, width), (kv_heads, width), (kv_heads, value_width))
            )
            for n in lengths
        ]
        self.scaling, self.window, self.softcap, self.chunked = width**-0.5, window, softcap, chunked
        needed = [-(-n // page_size) for n in lengths]
        max_pages = max(needed) + 2
        page = kv_heads * page_size * (width + value_width + (8 if dtype == "i8" else 0))
        self.pool = np.full((sum(needed) + 3, page), NAN[dtype], STORED[dtype])
        order = list(np.random.default_rng(seed + 99).permutation(len(self.pool)))
        self.table = np.full((len(lengths), max_pages), -1, np.int32)
        for r, count in enumerate(needed):
            self.table[r, :count] = [order.pop() for _ in range(count)]
        state = StateSpec((("k", kv_heads, width), ("v", kv_heads, value_width)), dtype, window, page_size, key_block,
                          max_pages, "f32" if dtype == "i8" else "")
        shapes = ((heads, width), (kv_heads, width), (kv_heads, value_width))
        self.spec = OpSpec(
            "attention",
            (*(TensorSpec("f32", ("T", *s)) for s in shapes), *(TensorSpec("i32", ("T",)),) * 2, state),
            (TensorSpec("f32", ("T", heads, value_width)),),
            {"scaling": self.scaling, "window": window, "softcap": softcap, "chunked": chunked},
        )
        self.page_size = page_size

    def operands(self, rows):
        return [np.stack([self.data[r][i][p] for r, p in rows]) for i in range(3)]

    def step(self, rows, threads=1, rename=None):
        """One step over ``rows``: (request, position) of each token. ``rename`` maps requests to block table rows."""
        rename = rename or {r: r for r in range(len(self.lengths))}
        parts = self.operands(rows)
        where = np.array([p for _, p in rows], np.int32), np.array([rename[r] for r, _ in rows], np.int32)
        inverse = {new: old for old, new in rename.items()}
        table = np.ascontiguousarray(self.table[[inverse[i] for i in range(len(inverse))]])
        symbols = (len(rows), len(table), 1)
        return run(attention, self.spec, (*parts, *where, (self.pool, table)), symbols, threads, self.level)[0]

    def expected(self, request, positions):
        q, k, v = self.data[request]
        return formula(q[positions], rounded(k, self.dtype), rounded(v, self.dtype), positions, self.scaling,
                       self.window, self.softcap, self.chunked)

    def drop(self, request, below):
        """Overwrites with NaN the rows of positions under ``below``, as a page that was given back and reused; whole
        pages leave the block table."""
        state = self.spec.operands[5]
        sizes = [(heads, width) for _, heads, width in state.parts]
        if state.scale:  # bytes of scales, one a row
            sizes += [(heads, 4) for heads, _ in sizes]
        for position in range(below):
            if self.table[request, position // self.page_size] < 0:
                continue
            page, slot = self.pool[self.table[request, position // self.page_size]], position % self.page_size
            at = 0
            for heads, width in sizes:
                view = page[at : at + heads * self.page_size * width].reshape(heads, self.page_size, width)
                view[:, slot] = NAN[self.dtype]
                at += view.size
        self.table[request, : below // self.page_size] = -1


def everything(cache):
    return [(r, p) for r, n in enumerate(cache.lengths) for p in range(n)]


def check(cache, result, rows, tolerance=2e-6):
    for r in range(len(cache.lengths)):
        at = [i for i, (request, _) in enumerate(rows) if request == r]
        want = cache.expected(r, [rows[i][1] for i in at])
        assert np.abs(result[at] - want).max() < tolerance * np.abs(want).max(), (r, np.abs(result[at] - want).max())


@pytest.mark.parametrize(
    "page_size, dtype",
    [(1, "f16"), (3, "f16"), (8, "f16"), (16, "f16"), (64, "f16"), (3, "f32"), (16, "f32"), (3, "bf16"), (16, "bf16"),
     (1, "i8"), (3, "i8"), (16, "i8"), (64, "i8")],
)
def test_formula_over_page_sizes_and_dtypes(page_size, dtype):
    cache = Cache(page_size=page_size, dtype=dtype, lengths=(50, 1, 17))
    rows = everything(cache)
    check(cache, cache.step(rows), rows)


@pytest.mark.parametrize("window, page_size", [(1, 3), (5, 16), (16, 3), (17, 16), (100, 16)])
def test_windows(window, page_size):
    cache = Cache(window=window, page_size=page_size, lengths=(60, 33))
    rows = everything(cache)
    check(cache, cache.step(rows), rows)


@pytest.mark.parametrize(
    "heads, kv_heads, width, value_width, key_block",
    [(1, 1, 8, 8, 8), (9, 3, 64, 64, 32), (8, 1, 24, 40, 8), (3, 3, 80, 16, 32), (40, 1, 16, 8, 16), (5, 1, 8, 48, 16),
     (4, 2, 12, 20, 4), (2, 2, 100, 100, 32)],
)
def test_shapes(heads, kv_heads, width, value_width, key_block):
    cache = Cache(heads, kv_heads, width, value_width, key_block=key_block, lengths=(45, 4))
    rows = everything(cache)
    check(cache, cache.step(rows), rows)


def test_softcap():
    cache = Cache(softcap=3.0, scale=2.0, lengths=(40,))
    rows = everything(cache)
    check(cache, cache.step(rows), rows)
    uncapped = Cache(scale=2.0, lengths=(40,))
    assert np.abs(uncapped.step(rows) - cache.step(rows)).max() > 0.01


def test_large_scores_neither_overflow_nor_underflow():
    cache = Cache(scale=12.0, dtype="f32", lengths=(50,))
    rows = everything(cache)
    check(cache, cache.step(rows), rows, 2e-5)


@pytest.mark.parametrize("window", [0, 11])
@pytest.mark.parametrize("page_size", [3, 8])
@pytest.mark.parametrize("threads, dtype", [(2, "f16"), (3, "f16"), (7, "f16"), (3, "i8")])
def test_bits_over_threads_chunks_and_batches(window, page_size, threads, dtype):
    make = lambda: Cache(9, 3, 16, 24, dtype, window=window, page_size=page_size, lengths=(53, 7, 30))
    rows = everything(make())
    want = dict(zip(rows, make().step(rows)))

    def same(rows, result):
        assert all(np.array_equal(row, want[key]) for key, row in zip(rows, result))

    same(rows, make().step(rows, threads))
    chunked, stale = make(), 0
    for start in range(0, 53, 10):  # request 0 in chunks, with rows that left the window overwritten by NaN
        part = [(0, p) for p in range(start, min(start + 10, 53))]
        same(part, chunked.step(part, threads))
        stale = max(0, start + 10 - window + 1) if window else 0
        chunked.drop(0, min(stale, 53))
    alone = make()
    for key in [(1, p) for p in range(7)]:  # token by token
        same([key], alone.step([key], threads))
    mixed = make()
    mixed.step([(0, p) for p in range(40)] + [(2, p) for p in range(29)])
    # decode and prefill in one step, requests elsewhere in the block table
    rows = [(2, 29), *((1, p) for p in range(7)), *((0, p) for p in range(40, 53))]
    same(rows, mixed.step(rows, threads, rename={0: 2, 1: 0, 2: 1}))


def test_bits_over_the_order_of_tokens():
    make = lambda: Cache(4, 2, 16, 16, window=9, lengths=(20, 20, 20))
    rows = everything(make())
    want = dict(zip(rows, make().step(rows)))
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    stairs = [(2, 10), (1, 11), (0, 12), (1, 13), (2, 14), (2, 16)]  # each position follows the one before
    cache = make()
    for order in (shuffled, stairs):
        assert all(np.array_equal(row, want[key]) for key, row in zip(order, cache.step(order)))


@pytest.mark.parametrize("heads, kv_heads, window, softcap, page_size, dtype", [
    (3, 1, 0, 0.0, 3, "f16"), (4, 2, 0, 4.0, 16, "f16"), (4, 4, 200, 0.0, 3, "f16"), (4, 4, 200, 0.0, 16, "i8"),
    (5, 1, 0, 0.0, 16, "i8"),
])  # fmt: skip
def test_bits_over_spans(heads, kv_heads, window, softcap, page_size, dtype):
    """Contexts of several spans (of 64 keys here): threads that share a token's keys, alone or beside other requests,
    give what one thread gives that reads all of them, whatever the chunks."""
    make = lambda: Cache(heads, kv_heads, 8, 16, dtype, window=window, softcap=softcap, page_size=page_size,
                         key_block=8, lengths=(420, 131, 270), seed=2)
    rows, whole = everything(make()), make()
    want = dict(zip(rows, whole.step(rows)))
    check(whole, np.stack([want[row] for row in rows]), rows)
    lasts = [(0, 419), (1, 130), (2, 269)]
    mixed = [(1, 130), *((0, p) for p in range(400, 420)), (2, 269)]
    for threads in (2, 3, 7, 64):
        assert all(np.array_equal(a, want[key]) for a, key in zip(make().step(rows, threads), rows))
        cache = make()
        for start in range(0, 420, 140):
            part = [(r, p) for r, n in enumerate(cache.lengths) for p in range(start, min(start + 140, n))]
            assert all(np.array_equal(a, want[key]) for a, key in zip(cache.step(part, threads), part))
        for step in (lasts[:1], lasts, mixed, lasts[1:] + lasts[:1]):
            assert all(np.array_equal(a, want[key]) for a, key in zip(cache.step(step, threads), step))


def test_threads_share_the_keys_of_one_token():
    """One key head, one token: every thread reads as many keys as another, up to a span."""
    cache = Cache(3, 1, 8, 8, key_block=8, lengths=(2048,))
    cache.step(everything(cache))
    selection = attention.SELECT["attention"](cache.spec)
    attend = next(use.kernel for use in selection.uses if use.kernel.family == "attend")
    call = native(attention.FAMILIES["attend"], dict(attend.params), cache.level)
    q, where, request = (np.stack([cache.data[0][0][2047]])[None], np.array([2047], np.int32), np.zeros(1, np.int32))
    for threads in (2, 3, 5, 16, 40):
        done = []
        for tid in range(threads):
            pieces = aligned(np.full(selection.scratch[0].shape, np.nan, np.float32))
            out = aligned(np.zeros((1, 3, 8), np.float32))
            call([aligned(q), where, request, cache.pool, cache.table, pieces, out], (1, 1, 1), tid, threads)
            done.append(np.isfinite(pieces.reshape(-1)).sum())
        assert max(done) - min(done) <= sum(done) / 16 and (min(done) > 0 or threads > 16), done


FAR = """
import sys; sys.path.insert(0, {tests!r})
from test_cpu_attention import *
cache = Cache(window=10, page_size=3, lengths=(50,))
cache.step([(0, p) for p in range(49)])
needed = slice((49 - 10 + 1) // 3, 49 // 3 + 1)
table = np.full_like(cache.table, 1 << 30)  # pages that far away aren't mapped: reading one ends the process
table[:, needed] = cache.table[:, needed]
cache.table = table
check(cache, cache.step([(0, 49)]), [(0, 49)])
"""


def test_pages_out_of_sight_are_not_touched():
    code = FAR.format(tests=str(pathlib.Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_with_whole_tiles():
    """Many single-token requests: with tiles enough, each thread takes whole tiles instead of parts of heads."""
    make = lambda: Cache(6, 3, 8, 8, lengths=(5,) * 30)
    caches, last = [make() for _ in range(4)], [(r, 4) for r in range(30)]
    for cache in caches:
        cache.step([(r, p) for r in range(30) for p in range(4)])
    want = caches[0].step(last)
    check(caches[0], want, last)
    for threads, cache in zip((2, 3, 50), caches[1:]):
        assert np.array_equal(cache.step(last, threads), want)


def test_an_infinite_value_reaches_only_rows_that_see_it():
    cache = Cache(dtype="f16", lengths=(20,))
    cache.data[0][2][12] = 1e6  # inf in f16
    result = cache.step(everything(cache))
    assert np.isfinite(result[:12]).all() and not np.isfinite(result[12:]).any()


@pytest.mark.parametrize("page_size", [3, 16])
def test_a_row_of_codes_is_off_by_half_a_step(page_size):
    """8-bit keys and values: the result is that of the rounded rows, and rounding is bounded by half of 1/127."""
    cache = Cache(9, 3, 64, 64, dtype="i8", page_size=page_size, lengths=(70,))
    rows = everything(cache)
    result = cache.step(rows)
    check(cache, result, rows)
    q, k, v = cache.data[0]
    for x in (k, v):
        assert (np.abs(rounded(x, "i8") - x) <= np.abs(x).max(-1, keepdims=True) * (0.5 / 127 + 1e-6)).all()
    exact = formula(q, k, v, range(70), cache.scaling, 0, 0.0)
    assert 1e-4 < np.abs(result - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("dtype", ["f16", "i8"])
@pytest.mark.parametrize("length", [3, 21, 33])
def test_blocks_whose_last_pages_are_not_there(length, dtype):
    """A key block of 32 over pages of 16 or 8, some of which the request doesn't have yet; two heads share a key head,
    so that as many vectors of keys as may be are multiplied together."""
    for page_size in (8, 16):
        cache = Cache(4, 2, 16, 16, dtype, page_size=page_size, key_block=32, lengths=(length,))
        rows = everything(cache)
        whole = cache.step(rows)
        check(cache, whole, rows)
        assert np.array_equal(cache.step(rows[-1:])[0], whole[-1])


def test_codes_of_rows_at_the_edges():
    """Rows of zeros, of subnormal numbers and of huge ones are kept; a row with an infinite value or a NaN is no number
    to whom it may concern, and to nobody else."""
    cache = Cache(dtype="i8", lengths=(20,))
    _, k, v = cache.data[0]
    k[3], v[4], v[5], v[6] = 0, 0, v[5] * 1e-41, v[6] * 1e30
    rows = everything(cache)
    check(cache, cache.step(rows), rows, 5e-6)
    for part, bad in ((k, np.inf), (v, np.nan), (v, -np.inf)):
        kept = part[12, 1, 3]
        part[12, 1, 3] = bad
        result = cache.step(rows)
        assert np.isfinite(result[:12]).all() and np.isfinite(result[12:, :2]).all()
        assert np.isnan(result[12:, 2:]).all()
        part[12, 1, 3] = kept


def test_bfloat16_keeps_nan_and_infinity():
    cache = Cache(dtype="bf16", lengths=(8,))
    cache.data[0][1][0].reshape(-1)[:2] = np.array([0x7F800001, 0x7F7FFFFF], np.uint32).view(np.float32)
    cache.step(everything(cache))
    page = cache.pool[cache.table[0, 0]].astype(np.uint32) << 16
    first = page.view(np.float32).reshape(-1)[:2]
    assert np.isnan(first[0]) and first[1] == np.inf


def test_widths_that_do_not_fill_vectors_are_declined():
    assert attention.SELECT["attention"](Cache(width=10).spec) is None
    assert "multiples of 4" in attention.NEEDS["attention"]


@pytest.mark.parametrize("chunk, page_size", [(7, 3), (16, 8)])
def test_chunks(chunk, page_size):
    """A token sees its own chunk's, from its first on; cut otherwise it has the same bits."""
    cache = Cache(window=chunk, chunked=True, page_size=page_size, lengths=(60, 33))
    rows = everything(cache)
    whole = cache.step(rows, 3)
    check(cache, whole, rows)
    assert np.array_equal(cache.step(rows[20:31]), whole[20:31])


@pytest.mark.parametrize("window, tokens", [(0, 23), (5, 23), (0, 280)])
def test_sinks(window, tokens):
    """A head's sink takes its share of the softmax; chunked, alone and shared by threads it gives the same bits."""
    cache = Cache(lengths=(tokens,), window=window, seed=3, key_block=8)
    sinks = np.random.default_rng(1).normal(0, 3, 4).astype(np.float32)
    plain = cache.expected(0, list(range(tokens)))
    q, k, _ = cache.data[0]
    keys = rounded(k, cache.dtype).astype(np.float64)
    want = np.empty_like(plain)
    for t in range(tokens):
        lo = max(0, t - window + 1) if window else 0
        for h in range(4):
            scores = keys[lo : t + 1, h // 2] @ q[t, h].astype(np.float64) * cache.scaling
            top = max(scores.max(), sinks[h])
            total = np.exp(scores - top).sum()
            want[t, h] = plain[t, h] * total / (total + np.exp(sinks[h] - top))
    cache.spec = OpSpec("attention", (*cache.spec.operands, TensorSpec("f32", (4,))), cache.spec.results,
                        {**cache.spec.attrs, "extras": ("sinks",)})

    def step(positions, threads=1):
        parts = [np.stack([cache.data[0][i][p] for p in positions]) for i in range(3)]
        where = np.array(positions, np.int32), np.zeros(len(positions), np.int32)
        return run(attention, cache.spec, (*parts, *where, (cache.pool, cache.table), sinks), (len(positions), 1, 1),
                   threads)[0]

    whole = step(list(range(tokens)))
    np.testing.assert_allclose(whole, want, atol=2e-6)
    assert np.array_equal(step(list(range(tokens)), 3), whole)
    for p in range(0, tokens, 9):
        assert np.array_equal(step([p])[0], whole[p]) and np.array_equal(step([p], 4)[0], whole[p])


@pytest.mark.parametrize("window, tokens, dtype, extras", [
    (5, 23, "i8", ("slopes",)), (0, 280, "f32", ("sinks", "slopes")), (0, 60, "f32", ("distances",)),
    (9, 33, "f16", ("slopes", "distances")), (0, 280, "f16", ("query_sinks",))])
def test_biases_by_distance(window, tokens, dtype, extras):
    """A head's scores fall with distance by its slope, or each query has a bias for the 21 last keys; chunked, alone and
    shared by threads it gives the same bits."""
    cache = Cache(lengths=(tokens,), window=window, seed=4, key_block=8, dtype=dtype)
    given = {"sinks": np.float32([-1, 0.5, 2, 3]), "slopes": np.float32([0.5, 0.25, 1.0, 0.01])}
    given["distances"] = np.random.default_rng(5).normal(0, 2, (tokens, 4, 21)).astype(np.float32)
    given["query_sinks"] = np.random.default_rng(6).normal(0, 2, (tokens, 4)).astype(np.float32)
    sizes = [{"distances": ("T", 4, 21), "query_sinks": ("T", 4)}.get(name, (4,)) for name in extras]
    q, k, v = (x.astype(np.float64) for x in (cache.data[0][0], *(rounded(x, dtype) for x in cache.data[0][1:])))
    want = np.empty((tokens, 4, v.shape[2]))
    for t in range(tokens):
        lo = max(0, t - window + 1) if window else 0
        for h in range(4):
            scores = k[lo : t + 1, h // 2] @ q[t, h] * cache.scaling
            if "slopes" in extras:
                scores += given["slopes"][h] * (np.arange(lo, t + 1) - t)
            if "distances" in extras:
                scores[-21:] += given["distances"][t, h, : t + 1 - lo][::-1]
            weights = np.exp(scores - scores.max())
            sink = given["query_sinks"][t, h] if "query_sinks" in extras else given["sinks"][h]
            total = weights.sum() + (np.exp(sink - scores.max()) if extras[0].endswith("sinks") else 0)
            want[t, h] = weights @ v[lo : t + 1, h // 2] / total
    cache.spec = OpSpec("attention", (*cache.spec.operands, *(TensorSpec("f32", size) for size in sizes)), cache.spec.results,
                        {**cache.spec.attrs, "extras": extras})

    def step(positions, threads=1):
        parts = [np.stack([cache.data[0][i][p] for p in positions]) for i in range(3)]
        where = np.array(positions, np.int32), np.zeros(len(positions), np.int32)
        values = (given[name][positions] if name in ("distances", "query_sinks") else given[name] for name in extras)
        return run(attention, cache.spec, (*parts, *where, (cache.pool, cache.table), *values), (len(positions), 1, 1),
                   threads)[0]

    whole = step(list(range(tokens)))
    np.testing.assert_allclose(whole, want, atol=3e-6)
    assert np.array_equal(step(list(range(tokens)), 3), whole)
    for p in range(0, tokens, 9):
        assert np.array_equal(step([p])[0], whole[p]) and np.array_equal(step([p], 4)[0], whole[p])


def test_recall_reads_what_attention_has_appended():
    """Layers that share keys and values: the other queries of a step over its rows, bit for bit as by attention."""
    cache = Cache(lengths=(45,), window=9, page_size=3)
    rows = everything(cache)
    whole = cache.step(rows)
    q, *_, positions, requests, state = cache.spec.operands
    spec = OpSpec("recall", (q, positions, requests, state), cache.spec.results, cache.spec.attrs)
    assert [u.kernel.family for u in attention.SELECT["recall"](spec).uses] == ["attend"]
    where = np.arange(45, dtype=np.int32), np.zeros(45, np.int32)
    again = run(attention, spec, (cache.data[0][0], *where, (cache.pool, cache.table)), (45, 1, 1), 3)[0]
    assert np.array_equal(again, whole)


class Latent(Cache):
    """One row a token, which is the key of all heads, and its first columns their value."""

    def __init__(self, heads, width, value_width, dtype="f16", **options):
        super().__init__(heads, 1, width, value_width, dtype, **options)
        state = replace(self.spec.operands[5], parts=(("latent", 1, width),))
        page = state.page_size * (width + (4 if dtype == "i8" else 0))
        self.pool = np.full((len(self.pool), page), NAN[dtype], STORED[dtype])
        query, _, _, *where, _ = self.spec.operands
        row = TensorSpec("f32", ("T", width))
        attrs = {"scaling": self.scaling, "value_width": value_width}
        self.spec = OpSpec("latent_attention", (query, row, *where, state), self.spec.results, attrs)

    def operands(self, rows):
        query, row, _ = super().operands(rows)
        return query, row[:, 0]

    def expected(self, request, positions):
        q, k, _ = self.data[request]
        kept = rounded(k, self.dtype)
        return formula(q[positions], kept, kept[..., : self.spec.attrs["value_width"]], positions, self.scaling, 0, 0.0)


@pytest.mark.parametrize("heads, width, value_width, page_size, dtype", [
    (40, 24, 16, 3, "bf16"), (4, 40, 32, 16, "i8")])  # fmt: skip
def test_latent_rows_are_keys_and_values(heads, width, value_width, page_size, dtype):
    """Contexts of several spans, heads in several sets: the same bits in chunks, token by token, in a batch and whatever
    the threads."""
    make = lambda: Latent(heads, width, value_width, dtype, page_size=page_size, key_block=8, lengths=(90, 9))
    rows, whole = everything(make()), make()
    want = dict(zip(rows, whole.step(rows)))
    check(whole, np.stack([want[row] for row in rows]), rows)
    cache = make()
    for start, threads in ((0, 1), (40, 3), (80, 2)):
        part = [(r, p) for r, n in enumerate(cache.lengths) for p in range(start, min(start + 40, n))]
        assert all(np.array_equal(a, want[key]) for a, key in zip(cache.step(part, threads), part))
    for step, threads in (([(0, 89)], 1), ([(0, 89)], 7), ([(1, 8), (0, 88), (0, 89)], 3)):
        assert all(np.array_equal(a, want[key]) for a, key in zip(cache.step(step, threads), step))
