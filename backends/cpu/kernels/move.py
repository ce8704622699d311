"""The floor's operators that place elements: constant, reshape, broadcast, transpose, slice, concat, pad.

They are two loops: ``fill`` writes a constant, ``move`` copies a box of elements from a strided place to a strided
place. Dimensions, strides and offsets are products of numbers and symbols, written as tuples of factors.
Threads share out the rows (all dimensions but the last).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from adaptc.backends.cpu.kernels.base import LANES, Emitter, Family, vec
from adaptc.backends.cpu.kernels.elementwise import CARRIED, STORED, dense, describe, narrow, product, split
from adaptc.backends.cpu.kernels.rows import copy
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection, TensorSpec

Factors = tuple[int | str, ...]

MAX_CONSTANT = 4096
"""Elements of a constant that is written out as instructions."""


def strides_of(shape: Sequence[int | str]) -> tuple[Factors, ...]:
    """Row-major strides, in elements."""
    return tuple(tuple(shape[i + 1 :]) or (1,) for i in range(len(shape)))


# ---- move


def emit_move(params: Mapping[str, Any], symbol: str) -> str:
    """Copies element ``index`` of the box from source[start + Σ index·stride] to target[start + Σ index·stride]."""
    e = Emitter()
    kind = STORED[params["dtype"]]
    source, target = e.buffer(0), e.buffer(1)
    sizes = [product(e, (size,)) for size in params["box"]] or [e.const(1, "i64")]
    steps = [[product(e, f) for f in params[name]] for name in ("source_strides", "target_strides")]
    source = e.at(source, product(e, params["source_start"]), kind)
    target = e.at(target, product(e, params["target_start"]), kind)
    rows = e.const(1, "i64")
    for size in sizes[:-1]:
        rows = e.mul(rows, size)
    low, high = e.share(rows)
    with e.loop(low, high) as row:
        places = []
        for pointer, strides in zip((source, target), steps):
            offset = e.const(0, "i64")
            for index, stride in zip(split(e, row.index, sizes[:-1]), strides):
                offset = e.add(offset, e.mul(index, stride))
            places.append(e.at(pointer, offset, kind))
        inner = [params[name][-1] if params["box"] else (1,) for name in ("source_strides", "target_strides")]
        if inner == [(1,), (1,)]:
            copy(e, *places, sizes[-1], kind)
        else:
            with e.loop(0, sizes[-1]) as column:
                a, b = (e.at(p, e.mul(column.index, s[-1]), kind) for p, s in zip(places, steps))
                e.store(e.load(a, kind), b)
    return e.text(symbol)


def move_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    return f"in:{describe(params['dtype'], params['source'])}", f"out:{describe(params['dtype'], params['target'])}"


def _move(x: TensorSpec, result: TensorSpec, box, source_strides, target_strides, source_start=(0,),
          target_start=(0,), operand: int = 0) -> KernelUse:
    params = {
        "dtype": x.dtype, "source": x.shape, "target": result.shape, "box": tuple(box),
        "source_strides": tuple(source_strides), "target_strides": tuple(target_strides),
        "source_start": tuple(source_start), "target_start": tuple(target_start),
    }  # fmt: skip
    return KernelUse(KernelSpec("move", tuple(sorted(params.items()))), (f"operand:{operand}", "result:0"))


def _movable(spec: OpSpec) -> bool:
    return all(map(dense, spec.operands))


def select_reshape(spec: OpSpec) -> Selection | None:
    if not _movable(spec):
        return None
    x, result = spec.operands[0], spec.results[0]
    # rows of a size that both shapes have keep the threads busy
    number = math.prod(d for d in x.shape if isinstance(d, int))
    symbols = tuple(d for d in x.shape if isinstance(d, str))
    columns = x.shape[-1] if x.shape and isinstance(x.shape[-1], int) else 1
    box = (*symbols, number // columns, columns) if columns else (0,)
    return Selection((_move(x, result, box, strides_of(box), strides_of(box)),))


def select_broadcast(spec: OpSpec) -> Selection | None:
    if not _movable(spec):
        return None
    x, result = spec.operands[0], spec.results[0]
    strides: list[Factors] = [(0,)] * len(result.shape)
    for axis, size, stride in zip(spec.attrs["dims"], x.shape, strides_of(x.shape)):
        if size != 1:
            strides[axis] = stride
    return Selection((_move(x, result, result.shape, strides, strides_of(result.shape)),))


def select_transpose(spec: OpSpec) -> Selection | None:
    if not _movable(spec):
        return None
    x, result = spec.operands[0], spec.results[0]
    strides = strides_of(x.shape)
    return Selection(
        (_move(x, result, result.shape, (strides[p] for p in spec.attrs["perm"]), strides_of(result.shape)),)
    )


def _start(indices: Sequence[int], strides: Sequence[Factors]) -> Factors | None:
    """Σ index·stride; None where that is a sum of symbols, which no product of factors can say."""
    cut = [(index, stride) for index, stride in zip(indices, strides) if index]
    if len(cut) == 1:
        return (cut[0][0], *cut[0][1])
    if any(isinstance(factor, str) for _, stride in cut for factor in stride):
        return None
    return (sum(index * math.prod(stride) for index, stride in cut),)


def select_slice(spec: OpSpec) -> Selection | None:
    x, result = spec.operands[0], spec.results[0]
    strides = strides_of(x.shape)
    start = _start(spec.attrs["starts"], strides)
    if not _movable(spec) or start is None:
        return None
    steps = tuple((step, *stride) if step != 1 else stride for step, stride in zip(spec.attrs["strides"], strides))
    return Selection((_move(x, result, result.shape, steps, strides_of(result.shape), start),))


def select_concat(spec: OpSpec) -> Selection | None:
    if not _movable(spec):
        return None
    axis, result = spec.attrs["axis"], spec.results[0]
    strides, at, uses = strides_of(result.shape), 0, []
    for number, x in enumerate(spec.operands):
        start = (at, *strides[axis])
        uses.append(_move(x, result, x.shape, strides_of(x.shape), strides, target_start=start, operand=number))
        at += x.shape[axis]
    return Selection(tuple(uses))


def select_pad(spec: OpSpec) -> Selection | None:
    x, result = spec.operands[0], spec.results[0]
    strides = strides_of(result.shape)
    start = _start(spec.attrs["low"], strides)
    if not _movable(spec) or start is None or min((*spec.attrs["low"], *spec.attrs["high"]), default=0) < 0:
        return None
    move = _move(x, result, x.shape, strides_of(x.shape), strides, target_start=start)
    return Selection((_fill(result, spec.attrs.get("value", 0.0)), move))


# ---- fill


def emit_fill(params: Mapping[str, Any], symbol: str) -> str:
    """The same number everywhere, or the numbers of ``values``."""
    e = Emitter()
    dtype, values = params["dtype"], params["values"]
    out, kind = e.buffer(0), STORED[params["dtype"]]
    if len(values) > 1:
        with e.when(e.compare("eq", e.tid, 0)):
            for i, value in enumerate(values):
                e.store(narrow(e, e.const(value, CARRIED[dtype]), dtype), e.at(out, i, kind))
        return e.text(symbol)
    low, high = e.share(product(e, params["shape"]))
    one = narrow(e, e.const(values[0], CARRIED[dtype]), dtype)
    eight = narrow(e, e.const(values[0], vec(LANES, CARRIED[dtype])), dtype)
    whole = e.sub(high, e.rem(e.sub(high, low), LANES))
    with e.loop(low, whole, LANES) as i:
        e.store(eight, e.at(out, i.index, kind))
    with e.loop(whole, high) as i:
        e.store(one, e.at(out, i.index, kind))
    return e.text(symbol)


def fill_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    return (f"out:{describe(params['dtype'], params['shape'])}",)


def _fill(result: TensorSpec, value: Any) -> KernelUse:
    values = tuple(_flat(value))
    values = values[:1] if len(set(values)) == 1 else values
    params = (("dtype", result.dtype), ("shape", result.shape), ("values", values))
    return KernelUse(KernelSpec("fill", params), ("result:0",))


def _flat(value: Any):
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _flat(part)
    else:
        yield value


def select_constant(spec: OpSpec) -> Selection | None:
    (result,) = spec.results
    count = len(list(_flat(spec.attrs["value"])))
    whole = math.prod(result.shape) if all(isinstance(d, int) for d in result.shape) else None
    if result.dtype not in STORED or count == 0 or count > MAX_CONSTANT or count not in (1, whole):
        return None
    return Selection((_fill(result, spec.attrs["value"]),))


FAMILIES = {
    "move": Family(emit_move, move_signature),
    "fill": Family(emit_fill, fill_signature),
}
SELECT = {
    "constant": select_constant, "reshape": select_reshape, "broadcast": select_broadcast,
    "transpose": select_transpose, "slice": select_slice, "concat": select_concat, "pad": select_pad,
}  # fmt: skip
