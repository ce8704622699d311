"""Operators that make, move, select or reduce elements: the floor."""

from __future__ import annotations

import numpy as np

from adaptc.ops.elementwise import NUMPY
from adaptc.ops.table import REQUIRED, OpRow, expect, size
from adaptc.protocol import TensorSpec


def bind(shape, like) -> tuple[int, ...]:
    """A named shape with numbers for names: each symbol takes its size from ``like`` ((named, real) pairs)."""
    sizes = {name: n for named, real in like for name, n in zip(named, real) if isinstance(name, str)}
    return tuple(sizes.get(dim, -1) if isinstance(dim, str) else dim for dim in shape)


def _infer_constant(attrs, operands):
    return (TensorSpec(attrs["dtype"], tuple(attrs["shape"])),)


def _constant(attrs):
    value = np.array(attrs["value"], dtype=NUMPY[attrs["dtype"]])
    return (np.broadcast_to(value, tuple(attrs["shape"])),)


def _infer_reshape(attrs, operands):
    shape = tuple(attrs["shape"])
    expect(
        size(shape) == size(operands[0].shape),
        f"reshape: {operands[0].shape} has other elements than {shape}.",
    )
    return (TensorSpec(operands[0].dtype, shape),)


def _reshape(attrs, x):
    shape = tuple(attrs["shape"])
    dynamic = [d for d in shape if isinstance(d, str)]
    assert len(dynamic) <= 1, "one symbol a tensor"
    return (np.ascontiguousarray(x).reshape([-1 if isinstance(d, str) else d for d in shape]),)


def _infer_broadcast(attrs, operands):
    shape, dims = tuple(attrs["shape"]), tuple(attrs["dims"])
    expect(len(dims) == len(operands[0].shape), "broadcast: dims needs one entry an operand axis.")
    for axis, dim in zip(dims, operands[0].shape):
        expect(dim in (1, shape[axis]), f"broadcast: operand axis of {dim} doesn't fit result axis of {shape[axis]}.")
    return (TensorSpec(operands[0].dtype, shape),)


def _broadcast(attrs, x, like=None):
    shape, dims = tuple(attrs["shape"]), tuple(attrs["dims"])
    full = [1] * len(shape)
    for axis, n in zip(dims, x.shape):
        full[axis] = n
    target = [
        dim if isinstance(dim, int) else (full[i] if i in dims and full[i] != 1 else like.shape[0])
        for i, dim in enumerate(shape)
    ]
    return (np.broadcast_to(x.reshape(full), target),)


def _infer_transpose(attrs, operands):
    perm = tuple(attrs["perm"])
    expect(sorted(perm) == list(range(len(operands[0].shape))), f"transpose: {perm} is no permutation of the axes.")
    return (TensorSpec(operands[0].dtype, tuple(operands[0].shape[p] for p in perm)),)


def _infer_slice(attrs, operands):
    shape = []
    for dim, lo, hi, stride in zip(operands[0].shape, attrs["starts"], attrs["limits"], attrs["strides"]):
        if isinstance(dim, str):
            expect((lo, hi, stride) == (0, -1, 1), f"slice: the dynamic dimension {dim} can't be cut.")
            shape.append(dim)
        else:
            expect(0 <= lo <= hi <= dim and stride > 0, f"slice: [{lo}:{hi}:{stride}] leaves a dimension of {dim}.")
            shape.append(-(-(hi - lo) // stride))
    return (TensorSpec(operands[0].dtype, tuple(shape)),)


def _slice(attrs, x):
    cuts = zip(attrs["starts"], attrs["limits"], attrs["strides"])
    return (x[tuple(slice(lo, None if hi == -1 else hi, step) for lo, hi, step in cuts)],)


def _infer_concat(attrs, operands):
    axis = attrs["axis"]
    first = operands[0].shape
    total = 0
    for operand in operands:
        rest = operand.shape[:axis] + operand.shape[axis + 1 :]
        expect(rest == first[:axis] + first[axis + 1 :], f"concat: {operand.shape} doesn't fit {first} on axis {axis}.")
        expect(isinstance(operand.shape[axis], int), "concat: a dynamic dimension can't be joined.")
        total += operand.shape[axis]
    return (TensorSpec(operands[0].dtype, first[:axis] + (total,) + first[axis + 1 :]),)


def _infer_pad(attrs, operands):
    shape = tuple(
        d if isinstance(d, str) else d + lo + hi for d, lo, hi in zip(operands[0].shape, attrs["low"], attrs["high"])
    )
    return (TensorSpec(operands[0].dtype, shape),)


def _pad(attrs, x):
    return (np.pad(x, list(zip(attrs["low"], attrs["high"])), constant_values=attrs["value"]),)


REDUCE = {
    "sum": lambda x, axes, keep: x.sum(axes, dtype=np.float64, keepdims=keep).astype(x.dtype),
    "mean": lambda x, axes, keep: x.mean(axes, dtype=np.float64, keepdims=keep).astype(x.dtype),
    "max": lambda x, axes, keep: x.max(axes, keepdims=keep),
    "min": lambda x, axes, keep: x.min(axes, keepdims=keep),
}


def _infer_reduce(attrs, operands):
    expect(attrs["kind"] in REDUCE, f"reduce: unknown kind {attrs['kind']!r}; kinds are {', '.join(REDUCE)}.")
    axes = set(attrs["axes"])
    dims = [(1 if i in axes else d) for i, d in enumerate(operands[0].shape) if attrs["keepdims"] or i not in axes]
    return (TensorSpec(operands[0].dtype, tuple(dims)),)


def _infer_gather_rows(attrs, operands):
    return (TensorSpec(operands[0].dtype, operands[1].shape + operands[0].shape[1:]),)


def _infer_dot(attrs, operands):
    x, y = operands
    batch = tuple(attrs["batch"])
    for i in batch:
        expect(x.shape[i] == y.shape[i], f"dot_general: batch axis {i} is {x.shape[i]} and {y.shape[i]}.")
    (i,), (j,) = attrs["contract_x"], attrs["contract_y"]
    expect(x.shape[i] == y.shape[j], f"dot_general: contracted axes are {x.shape[i]} and {y.shape[j]}.")
    rest = lambda s, c: tuple(d for a, d in enumerate(s.shape) if a not in batch and a != c)  # noqa: E731
    return (TensorSpec(x.dtype, tuple(x.shape[b] for b in batch) + rest(x, i) + rest(y, j)),)


def _dot(attrs, x, y):
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    xs = [next(letters) for _ in x.shape]
    ys = [next(letters) for _ in y.shape]
    for axis in attrs["batch"]:
        ys[axis] = xs[axis]
    ys[attrs["contract_y"][0]] = xs[attrs["contract_x"][0]]
    k = xs[attrs["contract_x"][0]]
    batch = [xs[b] for b in attrs["batch"]]
    out = batch + [c for c in xs if c not in batch and c != k] + [c for c in ys if c not in batch and c != k]
    expression = f"{''.join(xs)},{''.join(ys)}->{''.join(out)}"
    return (np.einsum(expression, x.astype(np.float64), y.astype(np.float64)).astype(np.float32),)


def _dot_flops(attrs, operands, results):
    k = operands[0].shape[attrs["contract_x"][0]]
    return {key: 2 * n * k for key, n in size(results[0].shape).items()} if isinstance(k, int) else {}


ROWS = [
    OpRow("constant", (), _infer_constant, _constant, attrs={"value": REQUIRED, "shape": REQUIRED, "dtype": "f32"}),
    OpRow("reshape", ("x",), _infer_reshape, _reshape, attrs={"shape": REQUIRED}, views=True),
    OpRow("transpose", ("x",), _infer_transpose, lambda a, x: (x.transpose(a["perm"]),), attrs={"perm": REQUIRED},
          views=True),
    OpRow("broadcast", ("x", "like?"), _infer_broadcast, _broadcast, attrs={"shape": REQUIRED, "dims": REQUIRED}),
    OpRow("slice", ("x",), _infer_slice, _slice,
          attrs={"starts": REQUIRED, "limits": REQUIRED, "strides": REQUIRED}),
    OpRow("concat", ("xs*",), _infer_concat, lambda a, *xs: (np.concatenate(xs, a["axis"]),),
          attrs={"axis": REQUIRED}),
    OpRow("pad", ("x",), _infer_pad, _pad, attrs={"low": REQUIRED, "high": REQUIRED, "value": 0.0}),
    OpRow("reduce", ("x",), _infer_reduce,
          lambda a, x: (REDUCE[a["kind"]](x, tuple(a["axes"]), a["keepdims"]),),
          attrs={"kind": REQUIRED, "axes": REQUIRED, "keepdims": False},
          cost=lambda a, o, r: size(o[0].shape)),
    OpRow("gather_rows", ("x", "rows"), _infer_gather_rows, lambda a, x, rows: (x[rows],), factors="t...,s->s..."),
    OpRow("dot_general", ("x", "y"), _infer_dot, _dot,
          attrs={"batch": (), "contract_x": REQUIRED, "contract_y": REQUIRED}, cost=_dot_flops),
]
