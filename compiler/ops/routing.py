"""Choices and what they choose: top_k, take_along, and linear maps of chosen experts."""

from __future__ import annotations

import math

import numpy as np

from adaptc.ops.shape import INDICES
from adaptc.ops.table import REQUIRED, OpRow, expect, scaled, size
from adaptc.protocol import TensorSpec


def _infer_top_k(attrs, operands):
    (x,) = operands
    k = attrs["k"]
    expect(x.dtype == "f32" and len(x.shape) >= 1, f"top_k: the input is {x.dtype}{list(x.shape)}, expected f32[..., E].")
    expect(isinstance(x.shape[-1], int) and 1 <= k <= x.shape[-1], f"top_k: k is {k} of {x.shape[-1]} elements.")
    shape = (*x.shape[:-1], k)
    return TensorSpec("f32", shape), TensorSpec("i32", shape)


def _top_k(attrs, x):
    order = np.argsort(-x, axis=-1, kind="stable")[..., : attrs["k"]].astype(np.int32)
    return np.take_along_axis(x, order, -1), order


def _chosen_axes(attrs, operands, results):
    """The last axis is chosen from; the others stay."""
    rank = len(operands[0].shape)
    return ((*range(rank - 1), None),)


def _infer_take_along(attrs, operands):
    x, indices = operands
    expect(
        indices.dtype in INDICES and x.shape[:-1] == indices.shape[:-1] and len(x.shape) >= 1,
        f"take_along: the input is {x.shape}, indices are {indices.dtype}{list(indices.shape)}; expected all but the "
        f"last dimension equal, and {' or '.join(INDICES)}.",
    )
    return (TensorSpec(x.dtype, indices.shape),)


def _take_along_axes(attrs, operands, results):
    rank = len(results[0].shape)
    return (*range(rank - 1), None), tuple(range(rank))


def _take_along_down(b, a, x, indices):
    """Σ over all elements of the one whose number is the index: one term isn't 0, so nothing is rounded."""
    count, lead = b.shape(x)[-1], b.shape(indices)
    numbers = b.constant(value=list(range(count)), shape=(count,), dtype=b.dtype(indices))
    here = b.compare(b.reshape(indices, shape=(*lead, 1)), numbers, predicate="eq")
    wide = b.reshape(x, shape=(*lead[:-1], 1, count))
    zero = b.scalar(0, b.dtype(x))
    return (b.reduce(b.select(here, wide, zero), kind="sum", axes=(len(lead),), keepdims=False),)


def _infer_expert_linear(attrs, operands):
    x, experts, weight, *bias = operands
    expect(len(weight.shape) == 3, f"expert_linear: the weight must be [E, N, K], got {weight.shape}.")
    expect(len(experts.shape) == 2 and experts.dtype == "i32" and isinstance(experts.shape[1], int),
           f"expert_linear: experts are {experts.dtype}{list(experts.shape)}, expected i32[T, k].")
    count, n, k = weight.shape
    t, slots = experts.shape
    expect(x.shape in ((t, k), (t, slots, k)) and x.dtype == weight.dtype == "f32",
           f"expert_linear: the input is {x.dtype}{list(x.shape)}; expected f32 {(t, k)} or {(t, slots, k)}.")
    for b in bias:
        expect(b.shape == (count, n), f"expert_linear: the bias is {b.shape}, expected {(count, n)}.")
    return (TensorSpec("f32", (t, slots, n)),)


def _expert_linear(attrs, x, experts, weight, bias=None):
    wide = np.broadcast_to(x[:, None], (*experts.shape, x.shape[-1])) if x.ndim == 2 else x
    result = np.empty((*experts.shape, weight.shape[1]), np.float32)
    for place in np.ndindex(experts.shape):
        chosen = experts[place]
        y = weight[chosen].astype(np.float64) @ wide[place].astype(np.float64)
        result[place] = y if bias is None else y + bias[chosen]
    return (result,)


def _expert_axes(attrs, operands, results):
    x = (0, None) if len(operands[0].shape) == 2 else (0, 1, None)
    rest = ((None, 2, None), (None, 2))[: len(operands) - 2]
    return (x, (0, 1), *rest)


def _expert_flops(attrs, operands, results):
    _, experts, weight = operands[:3]
    return scaled(size(experts.shape), 2 * math.prod(weight.shape[1:]))


ROWS = [
    OpRow("top_k", ("x",), _infer_top_k, _top_k, attrs={"k": REQUIRED}, axes=_chosen_axes,
          cost=lambda a, o, r: scaled(size(o[0].shape), a["k"])),
    OpRow("take_along", ("x", "indices"), _infer_take_along, lambda a, x, i: (np.take_along_axis(x, i, -1),),
          axes=_take_along_axes, decompose=_take_along_down),
    OpRow("expert_linear", ("x", "experts", "weight", "bias?"), _infer_expert_linear, _expert_linear,
          axes=_expert_axes, cost=_expert_flops, gathers=(2, 1), matrices=("weight",)),
]
"""top_k: the k largest of the last dimension, largest first, of equal ones the lower index first.
take_along: element ``indices[..., j]`` of the last dimension.
expert_linear: x·weight[expert]ᵀ + bias[expert] for each of a token's k experts; x is one row a token, or one an expert."""
