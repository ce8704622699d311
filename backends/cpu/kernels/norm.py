"""Norms over the last dimension: x·weight/√(mean(x²) + eps), and with the mean taken off first.

The squares are summed in four vectors that take turns (one, where the columns don't divide evenly), which are then
added as a tree: the order depends on the number of columns and the level's lanes only. Threads share out rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from adaptc.backends.cpu.kernels import vmath
from adaptc.backends.cpu.kernels.base import Emitter, Family, Value
from adaptc.backends.cpu.kernels.elementwise import dense, describe, product
from adaptc.backends.cpu.levels import Level
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection


def _emit(params: Mapping[str, Any], symbol: str, level: Level, residual: bool) -> str:
    e = Emitter(level)
    *lead, columns = params["shape"]
    pointers = [e.buffer(i) for i in range(5 if residual else 3)]
    whole, tail = columns - columns % e.lanes, columns % e.lanes
    ways = 4 if columns % (4 * e.lanes) == 0 else 1
    rest = e.mask(e.const(tail, "i64"))

    def read(pointer: Value, column: Value | int, mask: Value | None) -> Value:
        place = e.at(pointer, column, "f32")
        return e.load(place, e.floats, mask=mask)

    def write(value: Value, pointer: Value, column: Value | int, mask: Value | None) -> None:
        place = e.at(pointer, column, "f32")
        e.store(value, place, mask=mask)

    low, high = e.share(product(e, lead))
    with e.loop(low, high) as row:
        *moving, weight, out = (pointers[:-1] if residual else pointers)
        moving = [e.at(p, e.mul(row.index, columns), "f32") for p in moving]
        out = e.at(out, e.mul(row.index, columns), "f32")
        total = e.at(pointers[-1], e.mul(row.index, columns), "f32") if residual else moving[0]

        def square(sum_: Value, column: Value | int, mask: Value | None = None) -> Value:
            x = read(moving[0], column, mask)
            if residual:
                x = e.add(read(moving[1], column, mask), x)
                write(x, total, column, mask)
            return e.fma(x, x, sum_)

        with e.loop(0, whole, ways * e.lanes, [e.const(0.0, e.floats)] * ways) as column:
            column.end(*(square(s, e.add(column.index, i * e.lanes)) for i, s in enumerate(column.args)))
        sums = list(column.results)
        if tail:
            sums[0] = square(sums[0], whole, rest)
        mean = e.div(e.reduce(e.add, e.tree(e.add, sums)), float(columns))
        scale = e.splat(vmath.rsqrt(e, e.add(mean, params["eps"])))

        def scaled(column: Value | int, mask: Value | None = None) -> None:
            x = e.mul(read(total, column, mask), scale)
            write(e.mul(x, read(weight, column, mask)), out, column, mask)

        with e.loop(0, whole, e.lanes) as column:
            scaled(column.index)
        if tail:
            scaled(whole, rest)
    return e.text(symbol)


def _emit_layer_norm(params: Mapping[str, Any], symbol: str, level: Level, residual: bool) -> str:
    """(x - mean)·weight/√(mean((x - mean)²) + eps) + bias: the mean first, then the squares of what is left."""
    e = Emitter(level)
    *lead, columns = params["shape"]
    with_bias = params["bias"]
    count = 2 + residual + with_bias
    *inputs, weight = (e.buffer(i) for i in range(2 + residual))
    bias = e.buffer(2 + residual) if with_bias else None
    outs = [e.buffer(count + i) for i in range(1 + residual)]
    whole, tail = columns - columns % e.lanes, columns % e.lanes
    rest = e.mask(e.const(tail, "i64"))

    def read(pointer: Value, column: Value | int, mask: Value | None) -> Value:
        place = e.at(pointer, column, "f32")
        return e.load(place, e.floats, mask=mask)

    def write(value: Value, pointer: Value, column: Value | int, mask: Value | None) -> None:
        place = e.at(pointer, column, "f32")
        e.store(value, place, mask=mask)

    low, high = e.share(product(e, lead))
    with e.loop(low, high) as row:
        moving, (there, *total) = ([e.at(p, e.mul(row.index, columns), "f32") for p in ps] for ps in (inputs, outs))
        here = total[0] if residual else moving[0]

        def first(column: Value | int, mask: Value | None = None) -> Value:
            """The row's elements; with a residual the sum, which is kept on the way."""
            x = read(moving[0], column, mask)
            if residual:
                x = e.add(read(moving[1], column, mask), x)
                write(x, here, column, mask)
            return x

        def square(column: Value | int, mask: Value | None = None) -> Value:
            x = e.sub(read(here, column, mask), middle)
            return e.mul(x, x)

        def mean(term: Callable[..., Value]) -> Value:
            """Of a function of a column's place."""
            with e.loop(0, whole, e.lanes, [e.const(0.0, e.floats)]) as column:
                column.end(e.add(column.args[0], term(column.index)))
            total = column.results[0]
            if tail:
                total = e.add(total, e.select(rest, term(whole, rest), 0.0))
            return e.div(e.reduce(e.add, total), float(columns))

        middle = e.splat(mean(first))
        scale = e.splat(vmath.rsqrt(e, e.add(mean(square), params["eps"])))

        def scaled(column: Value | int, mask: Value | None = None) -> None:
            value = e.mul(e.mul(e.sub(read(here, column, mask), middle), scale), read(weight, column, mask))
            write(e.add(value, read(bias, column, mask)) if with_bias else value, there, column, mask)

        with e.loop(0, whole, e.lanes) as column:
            scaled(column.index)
        if tail:
            scaled(whole, rest)
    return e.text(symbol)


def _signature(params: Mapping[str, Any], residual: bool) -> tuple[str, ...]:
    rows, vector = describe("f32", params["shape"]), f"in:f32[{params['shape'][-1]}]"
    return (*(f"in:{rows}",) * (1 + residual), *(vector,) * (1 + params.get("bias", False)),
            *(f"out:{rows}",) * (1 + residual))


FAMILIES = {
    "rms_norm": Family(lambda p, s, level: _emit(p, s, level, False), lambda p: _signature(p, False)),
    "add_rms_norm": Family(lambda p, s, level: _emit(p, s, level, True), lambda p: _signature(p, True)),
    "layer_norm": Family(lambda p, s, level: _emit_layer_norm(p, s, level, False), lambda p: _signature(p, False)),
    "add_layer_norm": Family(lambda p, s, level: _emit_layer_norm(p, s, level, True), lambda p: _signature(p, True)),
}


def select(spec: OpSpec) -> Selection | None:
    shape = spec.operands[0].shape
    if not isinstance(shape[-1], int) or not all(dense(o) and o.dtype == "f32" for o in spec.operands):
        return None
    args = [f"operand:{i}" for i in range(len(spec.operands))] + [f"result:{i}" for i in range(len(spec.results))]
    vectors = len(spec.operands) - len(spec.results)  # each result has its own operand of x's shape
    bias = (("bias", vectors == 2),) if spec.op.endswith("layer_norm") else ()
    kernel = KernelSpec(spec.op, (*bias, ("eps", float(spec.attrs["eps"])), ("shape", shape)))
    return Selection((KernelUse(kernel, tuple(args)),))


SELECT = {name: select for name in FAMILIES}
