"""Each head's row by its own matrix on the cpu, against float64, and its bit-for-bit laws."""

from __future__ import annotations

import numpy as np
import pytest
from adaptc import blocks
from adaptc.backends.cpu.kernels import head_linear
from adaptc.backends.cpu.packing import pack
from adaptc.formats import FORMATS
from adaptc.protocol import OpSpec, TensorSpec
from cpu_kernel import run
from test_cpu_linear import finite_codes

T = 7


def case(format: str, transposed: bool, heads=3, rows=16, start=8, step=40, k=64):
    """(spec, x, packed weight, what is wanted) of heads whose rows are ``step`` apart in one weight."""
    stored, n = FORMATS[format], heads * step
    codes = finite_codes(stored, n, k, 1)
    matrices = start + step * np.arange(heads)[:, None] + np.arange(rows)
    if stored.is_float:  # blocks of 8 rows that have none of a head's are no numbers
        unread = np.setdiff1d(np.arange(n) // 8, matrices // 8)
        codes["codes"].reshape(n // 8, 8, k)[unread] = 0xFFFF if format == "bf16" else np.nan
    weight = blocks.dequantize(stored, codes).astype(np.float64)[matrices]
    given, made = (rows, k) if transposed else (k, rows)
    x = np.random.default_rng(2).standard_normal((T, heads, given)).astype(np.float32)
    want = np.einsum("thn,hnk->thk" if transposed else "thk,hnk->thn", x.astype(np.float64), weight)
    specs = TensorSpec("f32", ("T", heads, given)), TensorSpec("f32", (n, k), stored)
    attrs = {"start": start, "step": step, "rows": rows, "transposed": transposed}
    spec = OpSpec("head_linear", specs, (TensorSpec("f32", ("T", heads, made)),), attrs)
    return spec, x, np.frombuffer(pack(stored, (n, k), codes), np.uint8), want


@pytest.mark.parametrize("format, transposed, rows, k", [
    ("f32", False, 16, 40), ("bf16", False, 24, 64), ("bf16", True, 24, 64), ("f16", True, 12, 32),
    ("q6_k", False, 24, 512), ("q4_k", True, 16, 256)])  # fmt: skip
def test_heads_rows_by_their_own_matrices(format, transposed, rows, k):
    """Whatever the number of rows of x and of threads, a row has the same bits."""
    spec, x, packed, want = case(format, transposed, rows=rows, k=k)

    def got(rows: slice, threads: int) -> np.ndarray:
        return run(head_linear, spec, [x[rows], packed], (len(x[rows]), 1, 1), threads)[0]

    whole = got(slice(None), 1)
    np.testing.assert_allclose(whole, want, atol=2e-5 * np.abs(want).max())
    assert np.array_equal(got(slice(None), 3), whole) and np.array_equal(got(slice(2, 5), 1), whole[2:5])
    for row in range(0, T, 3):
        assert np.array_equal(got(slice(row, row + 1), 5)[0], whole[row])


@pytest.mark.parametrize("change", [{"start": 4}, {"step": 44}])
def test_rows_that_lie_across_blocks_are_left_to_the_decomposition(change):
    x, weight = TensorSpec("f32", ("T", 3, 64)), TensorSpec("f32", (240, 64), FORMATS["bf16"])
    attrs = {"start": 8, "step": 40, "rows": 16, "transposed": False} | change
    spec = OpSpec("head_linear", (x, weight), (TensorSpec("f32", ("T", 3, 16)),), attrs)
    assert head_linear.SELECT["head_linear"](spec) is None
