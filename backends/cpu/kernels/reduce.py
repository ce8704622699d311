"""The floor's operators that combine elements: reduce and dot_general. Right in every case, fast in none.

Each result element is one thread's, summed in one fixed order: a register's lanes over the columns where these are
contiguous, then a tree over the lanes; else one element after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adaptc.backends.cpu.kernels import vmath
from adaptc.backends.cpu.kernels.base import Emitter, Family, Value, vec
from adaptc.backends.cpu.kernels.elementwise import dense, describe, product, split
from adaptc.backends.cpu.kernels.move import strides_of
from adaptc.backends.cpu.levels import Level
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection

COMBINE: dict[str, tuple[Callable[[Emitter, Value, Value], Value], dict[str, float]]] = {
    "sum": (Emitter.add, {"f32": 0.0, "i32": 0}),
    "mean": (Emitter.add, {"f32": 0.0}),
    "max": (vmath.maximum, {"f32": -math.inf, "i32": -(2**31)}),
    "min": (vmath.minimum, {"f32": math.inf, "i32": 2**31 - 1}),
}
"""Kind → how two elements combine, and the start value by dtype."""


def _offset(e: Emitter, indices: Sequence[Value], strides: Sequence[Value]) -> Value:
    total = e.const(0, "i64")
    for index, stride in zip(indices, strides):
        total = e.add(total, e.mul(index, stride))
    return total


def _picked(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [values[i] for i in places]


def emit_reduce(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    shape, axes, kind, dtype = (params[k] for k in ("shape", "axes", "kind", "dtype"))
    combine, starts = COMBINE[kind]
    source, out = e.buffer(0), e.buffer(1)
    strides = [product(e, s) for s in strides_of(shape)]
    sizes = [product(e, (s,)) for s in shape]
    kept = [i for i in range(len(shape)) if i not in axes]
    count = product(e, _picked(shape, axes))
    low, high = e.share(product(e, _picked(shape, kept)))
    contiguous = list(axes) == list(range(len(shape) - len(axes), len(shape)))
    with e.loop(low, high) as number:
        first = split(e, number.index, _picked(sizes, kept))
        base = e.at(source, _offset(e, first, _picked(strides, kept)), dtype)
        if contiguous:
            wide = vec(e.lanes, dtype)
            start = e.const(starts[dtype], wide)
            whole = e.sub(count, e.rem(count, e.lanes))
            with e.loop(0, whole, e.lanes, [start]) as column:
                column.end(combine(e, column.args[0], e.load(e.at(base, column.index, dtype), wide)))
            mask = e.mask(e.sub(count, whole))
            last = e.select(mask, e.load(e.at(base, whole, dtype), wide, mask=mask), start)
            total = e.reduce(lambda a, b: combine(e, a, b), combine(e, column.results[0], last))
        else:
            with e.loop(0, count, init=[e.const(starts[dtype], dtype)]) as part:
                place = _offset(e, split(e, part.index, _picked(sizes, axes)), _picked(strides, axes))
                part.end(combine(e, part.args[0], e.load(e.at(base, place, dtype), dtype)))
            (total,) = part.results
        if kind == "mean":
            total = e.div(total, e.cast("sitofp", count, "f32"))
        e.store(total, e.at(out, number.index, dtype))
    return e.text(symbol)


def reduce_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    return f"in:{describe(params['dtype'], params['shape'])}", f"out:{describe(params['dtype'], params['result'])}"


def select_reduce(spec: OpSpec) -> Selection | None:
    (x,), (result,) = spec.operands, spec.results
    kind = spec.attrs["kind"]
    if kind not in COMBINE or not dense(x) or x.dtype not in COMBINE[kind][1]:
        return None
    params = {"axes": tuple(sorted(spec.attrs["axes"])), "dtype": x.dtype, "kind": kind, "result": result.shape,
              "shape": x.shape}  # fmt: skip
    kernel = KernelSpec("reduce", tuple(sorted(params.items())))
    return Selection((KernelUse(kernel, ("operand:0", "result:0")),))


def emit_dot(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """result[batch, rest of x, rest of y] = Σ over the contracted axis."""
    e = Emitter(level)
    x, y, out = (e.buffer(i) for i in range(3))
    shapes, batch = (params["x"], params["y"]), params["batch"]
    contracted = (params["contract_x"], params["contract_y"])
    strides = [[product(e, s) for s in strides_of(shape)] for shape in shapes]
    free = [[i for i in range(len(s)) if i not in batch and i != c] for s, c in zip(shapes, contracted)]
    dims = [shapes[0][i] for i in batch] + [s[i] for s, f in zip(shapes, free) for i in f]
    sizes = [product(e, (d,)) for d in dims]
    length = product(e, (shapes[0][contracted[0]],))
    together = all(c == len(s) - 1 for s, c in zip(shapes, contracted))
    low, high = e.share(product(e, dims))
    with e.loop(low, high) as number:
        indices = split(e, number.index, sizes)
        shared, first = indices[: len(batch)], indices[len(batch) : len(batch) + len(free[0])]
        second = indices[len(batch) + len(free[0]) :]
        rows = [
            e.at(pointer, _offset(e, [*shared, *own], [step[i] for i in (*batch, *axes)]), "f32")
            for pointer, own, step, axes in zip((x, y), (first, second), strides, free)
        ]
        if together:
            wide = vec(e.lanes, "f32")
            whole = e.sub(length, e.rem(length, e.lanes))
            with e.loop(0, whole, e.lanes, [e.const(0.0, wide)]) as k:
                a, b = (e.load(e.at(r, k.index, "f32"), wide) for r in rows)
                k.end(e.fma(a, b, k.args[0]))
            mask = e.mask(e.sub(length, whole))
            a, b = (e.load(e.at(r, whole, "f32"), wide, mask=mask) for r in rows)
            total = e.reduce(e.add, e.fma(a, b, k.results[0]))
        else:
            with e.loop(0, length, init=[e.const(0.0, "f32")]) as k:
                a, b = (
                    e.load(e.at(r, e.mul(k.index, s[c]), "f32"), "f32")
                    for r, s, c in zip(rows, strides, contracted)
                )
                k.end(e.fma(a, b, k.args[0]))
            (total,) = k.results
        e.store(total, e.at(out, number.index, "f32"))
    return e.text(symbol)


def dot_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    return (*(f"in:{describe('f32', params[k])}" for k in ("x", "y")), f"out:{describe('f32', params['result'])}")


def select_dot(spec: OpSpec) -> Selection | None:
    x, y = spec.operands
    if not all(dense(o) and o.dtype == "f32" for o in (x, y)):
        return None
    params = {"batch": tuple(spec.attrs.get("batch", ())), "contract_x": spec.attrs["contract_x"][0],
              "contract_y": spec.attrs["contract_y"][0], "result": spec.results[0].shape, "x": x.shape,
              "y": y.shape}  # fmt: skip
    kernel = KernelSpec("dot_general", tuple(sorted(params.items())))
    return Selection((KernelUse(kernel, ("operand:0", "operand:1", "result:0")),))


FAMILIES = {"reduce": Family(emit_reduce, reduce_signature), "dot_general": Family(emit_dot, dot_signature)}
SELECT = {"reduce": select_reduce, "dot_general": select_dot}
