"""Operators on whole rows of tokens: ``rope`` turns them by position, ``gather_rows`` picks some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adaptc.backends.cpu.kernels.base import Emitter, Family, Value, vec
from adaptc.backends.cpu.kernels.elementwise import STORED, dense, describe, product
from adaptc.backends.cpu.levels import Level
from adaptc.plan import DTYPE_BYTES
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection


def emit_rope(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """Both columns of a pair together, so the result may overwrite x; then the columns that don't turn."""
    e = Emitter(level)
    heads, width, turned, table = params["heads"], params["width"], params["turned"], params["table"]
    x, cosines, sines, out = (e.buffer(i) for i in range(4))
    low, high = e.share(e.mul(e.size(params["tokens"]), heads))
    with e.loop(low, high) as unit:
        row = e.mul(unit.index, width)
        angle = e.mul(e.div(unit.index, heads), table)
        places = [e.at(p, o, "f32") for p, o in ((x, row), (cosines, angle), (sines, angle), (out, row))]
        (_turn_pairs if params["interleaved"] else _turn_halves)(e, places, turned // 2, table == turned)
        if turned < width:
            copy(e, *(e.at(places[i], turned, "f32") for i in (0, 3)), e.const(width - turned, "i64"), "f32")
    return e.text(symbol)


def _turn_halves(e: Emitter, places: Sequence[Value], half: int, whole_table: bool) -> None:
    """Columns i and i + half are a pair."""
    whole, tail = half - half % e.lanes, half % e.lanes
    rest = e.mask(e.const(tail, "i64"))

    def read(place: Value, mask: Value | None) -> Value:
        return e.load(place, e.floats, mask=mask)

    def piece(column: Value | int, mask: Value | None = None) -> None:
        here = [e.at(p, column, "f32") for p in places]
        both = [(p, e.at(p, half, "f32")) for p in here]
        a, b = (read(p, mask) for p in both[0])
        (cos_a, cos_b), (sin_a, sin_b) = ([read(p, mask) for p in pair[: 1 + whole_table]] * (2 - whole_table)
                                          for pair in both[1:3])
        for value, place in zip(_turn(e, a, b, (cos_a, cos_b), (sin_a, sin_b)), both[3]):
            e.store(value, place, mask=mask)

    with e.loop(0, whole, e.lanes) as column:
        piece(column.index)
    if tail:
        piece(whole, rest)


def _turn_pairs(e: Emitter, places: Sequence[Value], half: int, whole_table: bool) -> None:
    """Columns 2i and 2i + 1 are a pair. Two vectors are parted into first and second columns and put together again;
    pairs that don't fill them go one by one."""
    lanes = e.lanes
    x, cosines, sines, out = places

    def parted(place: Value, pair: Value) -> list[Value]:
        low, high = (e.load(e.at(e.at(place, e.mul(pair, 2), "f32"), i * lanes, "f32"), e.floats) for i in (0, 1))
        return [e.shuffle(low, high, range(i, 2 * lanes, 2)) for i in (0, 1)]

    def table(place: Value, pair: Value) -> list[Value]:
        return parted(place, pair) if whole_table else [e.load(e.at(place, pair, "f32"), e.floats)] * 2

    with e.loop(0, half - half % lanes, lanes) as loop:
        first, second = _turn(e, *parted(x, loop.index), table(cosines, loop.index), table(sines, loop.index))
        order = [place for i in range(lanes) for place in (i, lanes + i)]
        for i in (0, 1):
            here = e.at(e.at(out, e.mul(loop.index, 2), "f32"), i * lanes, "f32")
            e.store(e.shuffle(first, second, order[i * lanes : (i + 1) * lanes]), here)
    with e.loop(half - half % lanes, half) as loop:

        def both(place: Value, whole: bool = True) -> list[Value]:
            here = e.at(place, e.mul(loop.index, 2) if whole else loop.index, "f32")
            return [e.load(e.at(here, i if whole else 0, "f32"), "f32") for i in (0, 1)]

        values = _turn(e, *both(x), both(cosines, whole_table), both(sines, whole_table))
        for i, value in enumerate(values):
            e.store(value, e.at(e.at(out, e.mul(loop.index, 2), "f32"), i, "f32"))


def _turn(e: Emitter, a: Value, b: Value, cos: Sequence[Value], sin: Sequence[Value]) -> tuple[Value, Value]:
    """(a, b) → (a·cos - b·sin, b·cos + a·sin)"""
    return e.fma(a, cos[0], e.neg(e.mul(b, sin[0]))), e.fma(b, cos[1], e.mul(a, sin[1]))


def rope_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    tokens, heads, width = params["tokens"], params["heads"], params["width"]
    rows, angles = describe("f32", (tokens, heads, width)), describe("f32", (tokens, params["table"]))
    return f"in:{rows}", f"in:{angles}", f"in:{angles}", f"out:{rows}"


def select_rope(spec: OpSpec) -> Selection | None:
    tokens, heads, width = spec.operands[0].shape
    if not all(dense(o) and o.dtype == "f32" for o in spec.operands):
        return None
    params = {"heads": heads, "interleaved": spec.attrs.get("interleaved", False), "table": spec.operands[1].shape[1],
              "tokens": tokens, "turned": spec.attrs.get("turned", 0) or width, "width": width}
    kernel = KernelSpec("rope", tuple(sorted(params.items())))
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
