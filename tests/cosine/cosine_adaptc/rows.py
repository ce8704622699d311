"""The operator: its row in the table."""

from __future__ import annotations

import numpy as np

from adaptc.ops.table import REQUIRED, OpRow, expect, scaled, size
from adaptc.protocol import TensorSpec

PROTOCOL = 1


def _infer(attrs, operands):
    x, temperature = operands
    expect(len(x.shape) >= 2 and {x.dtype, temperature.dtype} == {"f32"},
           f"head_l2_norm: the input is {x.dtype}{list(x.shape)}, the temperature {temperature.dtype}; expected f32.")
    expect(temperature.shape == x.shape[-2:-1],
           f"head_l2_norm: the input is {x.shape}, the temperature {temperature.shape}; expected [..., H, D] and [H].")
    return (TensorSpec("f32", x.shape),)


def _meaning(attrs, x, temperature):
    wide = x.astype(np.float64)
    length = np.sqrt((wide**2).sum(-1, keepdims=True))
    return ((temperature[:, None] * wide / np.maximum(length, attrs["eps"])).astype(np.float32),)


def _decompose(b, attrs, x, temperature):
    square = b.reduce(b.mul(x, x), kind="sum", axes=(b.rank(x) - 1,), keepdims=True)
    length = b.max(b.sqrt(square), b.scalar(attrs["eps"]))
    return (b.mul(x, b.div(b.reshape(temperature, shape=(*b.shape(temperature), 1)), length)),)


def _around_eps(rng, shape):
    """Rows about as long as ``eps`` usually is: some longer, some shorter."""
    return rng.standard_normal(shape) * 1e-6


ROWS = [
    OpRow("head_l2_norm", ("x", "temperature"), _infer, _meaning, attrs={"eps": REQUIRED}, factors="...hd,h->...he",
          cost=lambda a, o, r: scaled(size(o[0].shape), 3), decompose=_decompose, ranges={"around eps": _around_eps}),
]
"""head_l2_norm   x[..., H, D] · temperature[H] / max(‖x‖₂, eps), each head's row by itself (Henry et al., "Query-Key
Normalization for Transformers", 2020)"""
