"""Operators on whole rows of tokens: ``rope`` turns them by position, ``gather_rows`` picks some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptc.backends.cpu.kernels.base import Emitter, Family, Value, vec
from adaptc.backends.cpu.kernels.elementwise import STORED, dense, describe, product
from adaptc.backends.cpu.levels import Level
from adaptc.plan import DTYPE_BYTES
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection


def emit_rope(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """x·cos + rotate_half(x)·sin; columns i and i + D/2 together, so the result may overwrite x."""
    e = Emitter(level)
    heads, width = params["heads"], params["width"]
    half = width // 2
    x, cosines, sines, out = (e.buffer(i) for i in range(4))
    low, high = e.share(e.mul(e.size(params["tokens"]), heads))
    whole, tail = half - half % e.lanes, half % e.lanes
    rest = e.mask(e.const(tail, "i64"))
    with e.loop(low, high) as unit:
        row = e.mul(unit.index, width)
        angle = e.mul(e.div(unit.index, heads), width)
        starts = [e.at(p, o, "f32") for p, o in ((x, row), (cosines, angle), (sines, angle), (out, row))]

        def read(place: Value, mask: Value | None) -> Value:
            return e.load(place, e.floats, mask=mask)

        def piece(column: Value | int, mask: Value | None = None) -> None:
            places = [e.at(p, column, "f32") for p in starts]
            both = [(p, e.at(p, half, "f32")) for p in places]
            (a, b), (cos_a, cos_b), (sin_a, sin_b) = ([read(p, mask) for p in pair] for pair in both[:3])
            turned = e.fma(a, cos_a, e.neg(e.mul(b, sin_a))), e.fma(b, cos_b, e.mul(a, sin_b))
            for value, place in zip(turned, both[3]):
                e.store(value, place, mask=mask)

        with e.loop(0, whole, e.lanes) as column:
            piece(column.index)
        if tail:
            piece(whole, rest)
    return e.text(symbol)


def rope_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    tokens, heads, width = params["tokens"], params["heads"], params["width"]
    rows, angles = describe("f32", (tokens, heads, width)), describe("f32", (tokens, width))
    return f"in:{rows}", f"in:{angles}", f"in:{angles}", f"out:{rows}"


def select_rope(spec: OpSpec) -> Selection | None:
    tokens, heads, width = spec.operands[0].shape
    if width % 2 or not all(dense(o) and o.dtype == "f32" for o in spec.operands):
        return None
    kernel = KernelSpec("rope", (("heads", heads), ("tokens", tokens), ("width", width)))
    return Selection((KernelUse(kernel, ("operand:0", "operand:1", "operand:2", "result:0")),))


def emit_gather(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """Row ``rows[i]`` of x becomes row i, for i over all of ``rows``, whatever its shape."""
    e = Emitter(level)
    x, rows, out = (e.buffer(i) for i in range(3))
    kind, columns = STORED[params["dtype"]], product(e, params["row"])
    low, high = e.share(product(e, params["rows"]))
    lanes = e.lanes * 4 // DTYPE_BYTES[params["dtype"]]
    with e.loop(low, high) as number:
        row = e.load(e.at(rows, number.index, params["index"]), params["index"])
        row = row if row.type == "i64" else e.cast("extsi", row, "i64")
        source, target = e.at(x, e.mul(row, columns), kind), e.at(out, e.mul(number.index, columns), kind)
        copy(e, source, target, columns, kind, lanes)
    return e.text(symbol)


def copy(e: Emitter, source: Value, target: Value, count: Value, kind: str, lanes: int = 0) -> None:
    """Copies ``count`` consecutive elements by vectors, the last few one by one."""
    lanes = lanes or e.lanes
    whole = e.sub(count, e.rem(count, lanes))
    with e.loop(0, whole, lanes) as i:
        e.store(e.load(e.at(source, i.index, kind), vec(lanes, kind)), e.at(target, i.index, kind))
    with e.loop(whole, count) as i:
        e.store(e.load(e.at(source, i.index, kind), kind), e.at(target, i.index, kind))


def gather_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    dtype, row, rows = params["dtype"], params["row"], params["rows"]
    source, result = describe(dtype, (params["height"], *row)), describe(dtype, (*rows, *row))
    return f"in:{source}", f"in:{describe(params['index'], rows)}", f"out:{result}"


def select_gather(spec: OpSpec) -> Selection | None:
    x, rows = spec.operands
    if not (dense(x) and dense(rows)) or rows.dtype not in ("i32", "i64"):
        return None
    params = {"dtype": x.dtype, "height": x.shape[0], "index": rows.dtype, "row": x.shape[1:], "rows": rows.shape}
    kernel = KernelSpec("gather_rows", tuple(sorted(params.items())))
    return Selection((KernelUse(kernel, ("operand:0", "operand:1", "result:0")),))


FAMILIES = {"rope": Family(emit_rope, rope_signature), "gather_rows": Family(emit_gather, gather_signature)}
SELECT = {"rope": select_rope, "gather_rows": select_gather}
