"""A kernel of it for the cpu backend: two passes over a row, where the decomposition makes five over memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptc.backends.cpu.kernels import vmath
from adaptc.backends.cpu.kernels.base import Emitter, Family, Value
from adaptc.backends.cpu.kernels.elementwise import dense, describe, product
from adaptc.backends.cpu.levels import Level
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection

PROTOCOL = 1


def _emit(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    *lead, heads, width = params["shape"]
    x, temperature, out = (e.buffer(i) for i in range(3))
    whole, tail = width - width % e.lanes, width % e.lanes
    rest = e.mask(e.const(tail, "i64"))

    def read(pointer: Value, column: Value | int, mask: Value | None) -> Value:
        place = e.at(pointer, column, "f32")
        return e.load(place, e.floats, mask=mask)

    low, high = e.share(product(e, (*lead, heads)))
    with e.loop(low, high) as row:
        here, there = (e.at(p, e.mul(row.index, width), "f32") for p in (x, out))
        with e.loop(0, whole, e.lanes, [e.const(0.0, e.floats)]) as column:
            value = read(here, column.index, None)
            column.end(e.fma(value, value, column.args[0]))
        total = column.results[0]
        if tail:
            value = read(here, whole, rest)
            total = e.fma(value, value, total)
        length = e.max(vmath.sqrt(e, e.reduce(e.add, total)), params["eps"])
        factor = e.load(e.at(temperature, e.rem(row.index, heads), "f32"), "f32")
        scale = e.splat(e.div(factor, length))

        def scaled(column: Value | int, mask: Value | None = None) -> None:
            value, place = e.mul(read(here, column, mask), scale), e.at(there, column, "f32")
            e.store(value, place, mask=mask)

        with e.loop(0, whole, e.lanes) as column:
            scaled(column.index)
        if tail:
            scaled(whole, rest)
    return e.text(symbol)


def _signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    rows = describe("f32", params["shape"])
    return f"in:{rows}", f"in:f32[{params['shape'][-2]}]", f"out:{rows}"


def _select(spec: OpSpec) -> Selection | None:
    shape = spec.operands[0].shape
    if not all(isinstance(d, int) for d in shape[-2:]) or not all(dense(o) for o in spec.operands):
        return None
    kernel = KernelSpec("head_l2_norm", (("eps", float(spec.attrs["eps"])), ("shape", shape)))
    return Selection((KernelUse(kernel, ("operand:0", "operand:1", "result:0")),))


FAMILIES = {"head_l2_norm": Family(_emit, _signature)}
SELECT = {"head_l2_norm": _select}
