"""``embedding``: rows of a packed table by token id, ids i32[T] → f32[T, D], with the bits that ``adaptc.blocks``
gives, eight columns at a time at every level. The table is the same packed weight that a tied output projection
multiplies with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from adaptc.backends.cpu.kernels.base import Emitter, Family, Value, vec
from adaptc.backends.cpu.kernels.instructions import chosen
from adaptc.backends.cpu.kernels.weights import Packed, half_power
from adaptc.backends.cpu.levels import Level
from adaptc.backends.cpu.packing import BLOCK, SPAN, code_layout, packable, scale_layout
from adaptc.formats import FORMATS, WeightFormat
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection


def _emit(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    format, k = FORMATS[params["format"]], params["k"]
    ids, out = e.buffer(0), e.buffer(2)
    table = Packed.of(e, format, params["n"], k, e.buffer(1))
    row = _float_row if format.is_float else _integer_row
    with e.loop(*e.share(e.size(params["rows"]))) as loop:
        token = e.cast("extsi", e.load(e.at(ids, loop.index, "i32"), "i32"), "i64")
        codes, scales = table.block(e, e.sar(token, 3))
        row(e, format, k, codes, scales, e.and_(token, BLOCK - 1), e.at(out, e.mul(loop.index, k), "f32"))
    return e.text(symbol)


def _float_row(e: Emitter, format: WeightFormat, k: int, codes: Value, scales: Value, lane: Value, out: Value) -> None:
    with e.loop(0, k) as loop:
        unit = "f32" if format.codes == "f32" else "i16"
        at = e.at(codes, e.add(e.mul(loop.index, BLOCK), lane), unit)
        e.store(e.load_float(at, format.codes), e.at(out, loop.index, "f32"))


def _integer_row(e: Emitter, format: WeightFormat, k: int, codes: Value, scales: Value, lane: Value,
                 out: Value) -> None:
    with e.loop(0, k // SPAN) as loop:
        here = e.at(codes, e.mul(loop.index, code_layout(format).vectors * 32))
        group_scales = _SCALES[format.scale](e, format, scales, lane, loop.index)
        for pair in range(SPAN // 8):
            # Lanes 0-3 are quad 2·pair, lanes 4-7 quad 2·pair + 1: eight consecutive columns.
            numbers = e.sub(_EIGHT[format.codes](e, here, lane, pair), format.zero)
            numbers = chosen(e, numbers, format.values) if format.values else numbers
            scale, minimum = group_scales[pair * len(group_scales) // 4]
            values = e.mul(e.splat(scale, 8), e.cast("sitofp", numbers, "f32"))
            if minimum is not None:
                values = (e.add if format.min_sign > 0 else e.sub)(values, e.splat(minimum, 8))
            e.store(values, e.at(e.at(out, e.shl(loop.index, 5), "f32"), 8 * pair, "f32"))


# --- eight codes of one row: vector<8xi32> ---------------------------------------------------------------------------

def _word(e: Emitter, here: Value, lane: Value, vector: int) -> Value:
    """The row's four bytes of a 32-byte vector, in every lane."""
    return e.splat(e.load(e.at(e.at(here, e.shl(lane, 2)), 32 * vector), "i32"), 8)


def _bits(e: Emitter, word: Value, starts: list[int], count: int) -> Value:
    return e.and_(e.shr(word, e.const(starts, vec(8, "i32"))), (1 << count) - 1)


def _i8(e: Emitter, here: Value, lane: Value, pair: int) -> Value:
    words = (e.load(e.at(e.at(here, e.shl(lane, 2)), 32 * (2 * pair + i)), vec(4, "i8")) for i in range(2))
    return e.cast("extsi", e.shuffle(*words, range(8)), "i32")


def _u4(e: Emitter, here: Value, lane: Value, pair: int) -> Value:
    return _bits(e, _word(e, here, lane, pair), [8 * i + 4 * q for q in range(2) for i in range(4)], 4)


def _u5(e: Emitter, here: Value, lane: Value, pair: int) -> Value:
    high = _bits(e, _word(e, here, lane, 4), [8 * i + 2 * pair + q for q in range(2) for i in range(4)], 1)
    return e.or_(_u4(e, here, lane, pair), e.shl(high, 4))


def _u6(e: Emitter, here: Value, lane: Value, pair: int) -> Value:
    starts = [8 * i + 2 * ((2 * pair + q) % 4) for q in range(2) for i in range(4)]
    high = _bits(e, _word(e, here, lane, 4 + pair // 2), starts, 2)
    return e.or_(_u4(e, here, lane, pair), e.shl(high, 4))


_EIGHT = {"i8": _i8, "u4": _u4, "u5": _u5, "u6": _u6}


# --- the scales of one row and 32 columns: [(scale, minimum or None)], one pair a group -------------------------------

def _half(e: Emitter, scales: Value, lane: Value, offset: int) -> Value:
    return e.load_float(e.at(e.at(scales, lane, "i16"), offset), "f16")


def _one_level(e: Emitter, format: WeightFormat, scales: Value, lane: Value, span: Value):
    here = e.at(scales, e.mul(span, scale_layout(format).bytes))
    return [(_half(e, here, lane, 0), _half(e, here, lane, 16) if format.minimum else None)]


def _superblock(e: Emitter, format: WeightFormat, scales: Value, span: Value) -> tuple[Value, Value]:
    """Pointer to the span's superblock, and the span's number in it."""
    index = e.sar(span, (format.superblock // SPAN).bit_length() - 1)
    return e.at(scales, e.mul(index, scale_layout(format).bytes)), e.and_(span, format.superblock // SPAN - 1)


def _six_bits(e: Emitter, format: WeightFormat, scales: Value, lane: Value, span: Value):
    here, number = _superblock(e, format, scales, span)
    triple = e.at(e.at(here, e.add(e.mul(e.sar(number, 1), 24), lane)), 32)
    s, m, low = (e.cast("extui", e.load(e.at(triple, 8 * i), "i8"), "i32") for i in range(3))
    odd = e.compare("eq", e.and_(number, 1), 1)
    scale0 = e.select(odd, e.or_(e.and_(low, 15), e.shl(e.shr(s, 6), 4)), e.and_(s, 63))
    min0 = e.select(odd, e.or_(e.shr(low, 4), e.shl(e.shr(m, 6), 4)), e.and_(m, 63))
    scale1, min1 = _half(e, here, lane, 0), _half(e, here, lane, 16)
    return [(e.mul(scale1, e.cast("sitofp", scale0, "f32")), e.mul(min1, e.cast("sitofp", min0, "f32")))]


def _eight_bits(e: Emitter, format: WeightFormat, scales: Value, lane: Value, span: Value):
    here, number = _superblock(e, format, scales, span)
    scale1 = _half(e, here, lane, 0)
    pair = e.at(e.at(here, e.add(e.mul(number, 16), lane)), 16)
    numbers = (e.cast("sitofp", e.load(e.at(pair, 8 * i), "i8"), "f32") for i in range(2))
    return [(e.mul(scale1, number), None) for number in numbers]


def _powers(e: Emitter, format: WeightFormat, scales: Value, lane: Value, span: Value):
    here = e.at(scales, e.add(e.mul(span, scale_layout(format).bytes), lane))
    return [(half_power(e, e.load(here, "i8")), None)]


_SCALES = {("f16",): _one_level, ("u6", "f16"): _six_bits, ("i8", "f16"): _eight_bits, ("e8m0",): _powers}


def _signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    rows, n, k = params["rows"], params["n"], params["k"]
    return (f"in:i32[{rows}]", f"weight:{params['format']}[{n},{k}]", f"out:f32[{rows},{k}]")


def _select(spec: OpSpec) -> Selection | None:
    ids, table = spec.operands
    format = table.format
    if ids.dtype != "i32" or len(ids.shape) != 1 or format is None or FORMATS.get(format.name) != format:
        return None
    n, k = table.shape
    if not packable(format, k):
        return None
    kernel = KernelSpec("embedding", (("format", format.name), ("k", k), ("n", n), ("rows", ids.shape[0])))
    return Selection((KernelUse(kernel, ("operand:0", "operand:1", "result:0")),))


FAMILIES: dict[str, Family] = {"embedding": Family(_emit, _signature)}
SELECT: dict[str, Callable[[OpSpec], Selection | None]] = {"embedding": _select}
