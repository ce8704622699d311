"""Operators that make, move, select or reduce elements: the floor."""

from __future__ import annotations

import numpy as np

from adaptc.errors import LegalityError
from adaptc.ops import axes
from adaptc.ops.elementwise import FLOATS, NUMBERS, NUMPY, rounded
from adaptc.ops.table import REQUIRED, OpRow, expect, scaled, size
from adaptc.protocol import TensorSpec

INDICES = ("i32", "i64")
"""Dtypes that number rows."""


def _axes(name: str, axes, rank: int) -> None:
    """Checks that ``axes`` are different axes of a tensor of ``rank``."""
    expect(
        all(isinstance(a, int) and 0 <= a < rank for a in axes) and len(set(axes)) == len(axes),
        f"{name}: axes {tuple(axes)} aren't different axes of a tensor of rank {rank}.",
    )


def _one_each(name: str, attrs, names, rank: int) -> None:
    """Checks that each of the attributes ``names`` has an entry for every axis."""
    for key in names:
        expect(len(attrs[key]) == rank, f"{name}: {key} has {len(attrs[key])} entries for a tensor of rank {rank}.")


def _infer_constant(attrs, operands):
    shape, dtype = tuple(attrs["shape"]), attrs["dtype"]
    expect(dtype in NUMPY, f"constant: unknown dtype {dtype!r}; dtypes are {', '.join(NUMPY)}.")
    expect(all(isinstance(d, int) for d in shape), f"constant: its shape {shape} must be static; use broadcast.")
    try:
        np.broadcast_to(np.array(attrs["value"]), shape)
    except ValueError:
        raise LegalityError(f"constant: its value doesn't fill the shape {shape}.") from None
    return (TensorSpec(dtype, shape),)


def _constant(attrs):
    return (np.broadcast_to(rounded(np.array(attrs["value"]), attrs["dtype"]), tuple(attrs["shape"])),)


def _infer_reshape(attrs, operands):
    shape = tuple(attrs["shape"])
    expect(sum(isinstance(d, str) for d in shape) <= 1, f"reshape: {shape} has more than one dynamic dimension.")
    expect(
        size(shape) == size(operands[0].shape),
        f"reshape: {operands[0].shape} has other elements than {shape}.",
    )
    return (TensorSpec(operands[0].dtype, shape),)


def _reshape(attrs, x):
    shape = tuple(attrs["shape"])
    return (np.ascontiguousarray(x).reshape([-1 if isinstance(d, str) else d for d in shape]),)


def _infer_broadcast(attrs, operands):
    shape, dims = tuple(attrs["shape"]), tuple(attrs["dims"])
    x, like = operands[0], operands[1:]
    _one_each("broadcast", attrs, ("dims",), len(x.shape))
    _axes("broadcast", dims, len(shape))
    expect(list(dims) == sorted(dims), f"broadcast: dims {dims} must ascend; transpose first.")
    for axis, dim in zip(dims, x.shape):
        expect(dim in (1, shape[axis]), f"broadcast: operand axis of {dim} doesn't fit result axis of {shape[axis]}.")
    own = dict(zip(dims, x.shape))
    new = {d for i, d in enumerate(shape) if isinstance(d, str) and own.get(i) != d}
    known = {like[0].shape[0]} if like and like[0].shape else set()
    expect(new <= known, f"broadcast: nothing says how long {', '.join(sorted(new))} is; a second operand must have it "
                         "as its first dimension.")
    expect(
        not like or {d for d in shape if isinstance(d, str)} <= known,
        f"broadcast: {shape} has a dimension that isn't the second operand's {like[0].shape if like else ''}.",
    )
    return (TensorSpec(x.dtype, shape),)


def _broadcast(attrs, x, like=None):
    shape, dims = tuple(attrs["shape"]), tuple(attrs["dims"])
    own = dict(zip(dims, x.shape))
    lengths = own if like is None else dict.fromkeys(range(len(shape)), like.shape[0])
    target = [dim if isinstance(dim, int) else lengths[i] for i, dim in enumerate(shape)]
    return (np.broadcast_to(x.reshape([own.get(i, 1) for i in range(len(shape))]), target),)


def _infer_transpose(attrs, operands):
    perm = tuple(attrs["perm"])
    expect(sorted(perm) == list(range(len(operands[0].shape))), f"transpose: {perm} is no permutation of the axes.")
    return (TensorSpec(operands[0].dtype, tuple(operands[0].shape[p] for p in perm)),)


def _infer_slice(attrs, operands):
    _one_each("slice", attrs, ("starts", "limits", "strides"), len(operands[0].shape))
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
    _axes("concat", (axis,), len(first))
    kinds = sorted({o.dtype for o in operands})
    expect(len(kinds) == 1, f"concat: operands have dtypes {', '.join(kinds)}; insert a cast.")
    total = 0
    for operand in operands:
        rest = operand.shape[:axis] + operand.shape[axis + 1 :]
        expect(rest == first[:axis] + first[axis + 1 :], f"concat: {operand.shape} doesn't fit {first} on axis {axis}.")
        expect(isinstance(operand.shape[axis], int), f"concat: axis {axis} of {operand.shape} is dynamic, can't join.")
        total += operand.shape[axis]
    return (TensorSpec(operands[0].dtype, first[:axis] + (total,) + first[axis + 1 :]),)


def _infer_pad(attrs, operands):
    x = operands[0]
    _one_each("pad", attrs, ("low", "high"), len(x.shape))
    expect(min((0, *attrs["low"], *attrs["high"])) == 0, f"pad: {attrs['low']} and {attrs['high']} can't be negative.")
    for dim, lo, hi in zip(x.shape, attrs["low"], attrs["high"]):
        expect(isinstance(dim, int) or lo == hi == 0, f"pad: the dynamic dimension {dim} can't be padded.")
    shape = (d if isinstance(d, str) else d + lo + hi for d, lo, hi in zip(x.shape, attrs["low"], attrs["high"]))
    return (TensorSpec(x.dtype, tuple(shape)),)


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
    axes, dtype = set(attrs["axes"]), operands[0].dtype
    _axes("reduce", attrs["axes"], len(operands[0].shape))
    expect(dtype in NUMBERS or attrs["kind"] in ("max", "min"), f"reduce: {attrs['kind']} isn't defined on {dtype}.")
    dims = [(1 if i in axes else d) for i, d in enumerate(operands[0].shape) if attrs["keepdims"] or i not in axes]
    return (TensorSpec(operands[0].dtype, tuple(dims)),)


def _infer_gather_rows(attrs, operands):
    x, rows = operands
    expect(len(x.shape) >= 1, "gather_rows: the input has no rows.")
    expect(
        len(rows.shape) == 1 and rows.dtype in INDICES,
        f"gather_rows: rows are {rows.dtype}{list(rows.shape)}, expected one dimension of {' or '.join(INDICES)}.",
    )
    return (TensorSpec(x.dtype, rows.shape + x.shape[1:]),)


def _infer_dot(attrs, operands):
    x, y = operands
    batch = tuple(attrs["batch"])
    for spec, contracted in ((x, attrs["contract_x"]), (y, attrs["contract_y"])):
        expect(len(contracted) == 1, f"dot_general: contracts axes {tuple(contracted)}, expected one; reshape first.")
        _axes("dot_general", (*batch, *contracted), len(spec.shape))
    same = x.dtype == y.dtype and x.dtype in FLOATS
    expect(same, f"dot_general: operands are {x.dtype} and {y.dtype}; expected one float dtype, insert a cast.")
    for i in batch:
        expect(x.shape[i] == y.shape[i], f"dot_general: batch axis {i} is {x.shape[i]} and {y.shape[i]}.")
    (i,), (j,) = attrs["contract_x"], attrs["contract_y"]
    expect(x.shape[i] == y.shape[j], f"dot_general: contracted axes are {x.shape[i]} and {y.shape[j]}.")
    kept = (d for spec, gone in ((x, i), (y, j)) for a, d in enumerate(spec.shape) if a not in batch and a != gone)
    return (TensorSpec(x.dtype, (*(x.shape[b] for b in batch), *kept)),)


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
    return (np.einsum(expression, x.astype(np.float64), y.astype(np.float64)).astype(x.dtype),)


def _dot_flops(attrs, operands, results):
    k = operands[0].shape[attrs["contract_x"][0]]
    return scaled(size((*results[0].shape, k)), 2)


ROWS = [
    OpRow("constant", (), _infer_constant, _constant, attrs={"value": REQUIRED, "shape": REQUIRED, "dtype": "f32"}),
    OpRow("reshape", ("x",), _infer_reshape, _reshape, attrs={"shape": REQUIRED}, views=True,
          aliases=True, axes=axes.reshaped),
    OpRow("transpose", ("x",), _infer_transpose, lambda a, x: (x.transpose(a["perm"]),), attrs={"perm": REQUIRED},
          views=True, axes=axes.transposed),
    OpRow("broadcast", ("x", "like?"), _infer_broadcast, _broadcast, attrs={"shape": REQUIRED, "dims": REQUIRED},
          axes=axes.broadcast),
    OpRow("slice", ("x",), _infer_slice, _slice,
          attrs={"starts": REQUIRED, "limits": REQUIRED, "strides": REQUIRED}, axes=axes.resized),
    OpRow("concat", ("xs*",), _infer_concat, lambda a, *xs: (np.concatenate(xs, a["axis"]),),
          attrs={"axis": REQUIRED}, axes=axes.joined),
    OpRow("pad", ("x",), _infer_pad, _pad, attrs={"low": REQUIRED, "high": REQUIRED, "value": 0.0},
          axes=axes.resized),
    OpRow("reduce", ("x",), _infer_reduce,
          lambda a, x: (REDUCE[a["kind"]](x, tuple(a["axes"]), a["keepdims"]),),
          attrs={"kind": REQUIRED, "axes": REQUIRED, "keepdims": False}, axes=axes.reduced,
          cost=lambda a, o, r: size(o[0].shape)),
    OpRow("gather_rows", ("x", "rows"), _infer_gather_rows, lambda a, x, rows: (x[rows],), factors="t...,s->s...",
          gathers=(0, 1)),
    OpRow("dot_general", ("x", "y"), _infer_dot, _dot,
          attrs={"batch": (), "contract_x": REQUIRED, "contract_y": REQUIRED}, axes=axes.contracted,
          cost=_dot_flops),
]
