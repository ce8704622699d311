"""How kernels read packed weights (layout: ``adaptc.backends.cpu.packing``), 8 rows × 32 columns at a time.

Everything here exists once for all formats: codes by how many bits they have, scales by their levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from adaptc.backends.cpu.kernels.base import I8X32, I32X8, Emitter, Value, vec
from adaptc.backends.cpu.packing import (
    BLOCK,
    SPAN,
    blocks,
    code_block_bytes,
    code_layout,
    scale_block_bytes,
    scale_layout,
)
from adaptc.formats import WeightFormat


@dataclass(frozen=True)
class Group:
    """Columns of a span that share a scale: scale f32[8] (one a row) and, if any, what is added to each value."""

    scale: Value
    minimum: Value | None = None


@dataclass(frozen=True)
class Packed:
    """A packed weight operand: where its blocks lie. ``codes`` and ``scales`` are the streams' pointers."""

    format: WeightFormat
    n: int
    k: int
    codes: Value
    scales: Value

    @staticmethod
    def of(e: Emitter, format: WeightFormat, n: int, k: int, pointer: Value) -> Packed:
        return Packed(format, n, k, pointer, e.at(pointer, blocks(n) * code_block_bytes(format, k)))

    def block(self, e: Emitter, index: Value) -> tuple[Value, Value]:
        """Pointers to the codes and the scales of row block ``index``."""
        return (
            e.at(self.codes, e.mul(index, code_block_bytes(self.format, self.k))),
            e.at(self.scales, e.mul(index, scale_block_bytes(self.format, self.k))),
        )


Body = Callable[[Value, Value, Sequence[Group], Sequence[Value]], Sequence[Value]]
"""(first column, pointer to the span's codes, its groups in column order, carried values) → next carried values."""


def walk(e: Emitter, weight: Packed, codes: Value, scales: Value, init: Sequence[Value],
         body: Body) -> tuple[Value, ...]:
    """Runs ``body`` for every 32 columns of a row block of an integer format, in ascending order."""
    format, k = weight.format, weight.k
    per_super = format.superblock // SPAN
    code_bytes, scale_bytes = code_layout(format).vectors * 32, scale_layout(format).bytes
    inner = _LEVELS[format.scale]
    with e.loop(0, k // format.superblock, init=init) as outer:
        here = e.at(scales, e.mul(outer.index, scale_bytes))
        first = e.mul(outer.index, per_super)

        def run(span: Value, groups: Sequence[Group], carried: Sequence[Value]) -> Sequence[Value]:
            return body(e.mul(span, SPAN), e.at(codes, e.mul(span, code_bytes)), groups, carried)

        outer.end(*inner(e, format, here, first, outer.args, run))
    return outer.results


def _one_level(e, format, here, first, carried, run):
    return run(first, [Group(*_halves(e, format, here))], carried)


def _six_bits(e, format, here, first, carried, run):
    scale1, min1 = _halves(e, format, here)
    with e.loop(0, format.superblock // SPAN, init=carried) as loop:
        triple = e.at(here, e.add(e.mul(e.shr(loop.index, 1), 24), 32))
        s, m, low = (e.cast("extui", e.load(e.at(triple, 8 * i), vec(8, "i8")), "i32") for i in range(3))
        odd = e.compare("ne", e.and_(loop.index, 1), 0)
        scale0 = e.select(odd, _joined(e, e.and_(low, 15), s), e.and_(s, 63))
        min0 = e.select(odd, _joined(e, e.shr(low, 4), m), e.and_(m, 63))
        scale, minimum = (e.mul(e.cast("sitofp", v, "f32"), by) for v, by in ((scale0, scale1), (min0, min1)))
        loop.end(*run(e.add(first, loop.index), [Group(scale, minimum)], loop.args))
    return loop.results


def _joined(e: Emitter, low: Value, top: Value) -> Value:
    """Six bits: four from ``low``, two from the top of the byte ``top``."""
    return e.or_(low, e.shl(e.shr(top, 6), 4))


def _eight_bits(e, format, here, first, carried, run):
    (scale1,) = _halves(e, format, here)
    with e.loop(0, format.superblock // SPAN, init=carried) as loop:
        at = e.at(here, e.add(e.mul(loop.index, 16), 16))
        groups = [
            Group(e.mul(e.cast("sitofp", e.cast("extsi", e.load(e.at(at, 8 * i), vec(8, "i8")), "i32"), "f32"), scale1))
            for i in range(2)
        ]
        loop.end(*run(e.add(first, loop.index), groups, loop.args))
    return loop.results


_LEVELS = {("f16",): _one_level, ("u6", "f16"): _six_bits, ("i8", "f16"): _eight_bits}


def _halves(e: Emitter, format: WeightFormat, here: Value) -> list[Value]:
    """The f16 levels at ``here``: scale and, if the format has one, minimum with its sign."""
    scale = e.load_floats(here, "f16")
    if not format.minimum:
        return [scale]
    minimum = e.load_floats(e.at(here, 16), "f16")
    return [scale, minimum if format.min_sign > 0 else e.neg(minimum)]


# --- codes of a span --------------------------------------------------------------------------------------------------

def quads(e: Emitter, format: WeightFormat, codes: Value, which: Sequence[int]) -> Iterator[tuple[int, Value]]:
    """(j, bytes [8 rows × 4 columns] of quad j as vector<32xi8>) for the quads asked for: codes as stored (before
    zero is subtracted)."""
    for j in which:
        yield j, e.cast("bitcast", _QUAD[format.codes](e, codes, j), I8X32)


def _words(e: Emitter, codes: Value, vector: int) -> Value:
    return e.load(e.at(codes, 32 * vector), I32X8)


def _u4(e: Emitter, codes: Value, j: int) -> Value:
    return e.and_(_shift(e, _words(e, codes, j // 2), -4 * (j % 2)), 0x0F0F0F0F)


def _u5(e: Emitter, codes: Value, j: int) -> Value:
    return e.or_(_u4(e, codes, j), e.and_(_shift(e, _words(e, codes, 4), 4 - j), 0x10101010))


def _u6(e: Emitter, codes: Value, j: int) -> Value:
    return e.or_(_u4(e, codes, j), e.and_(_shift(e, _words(e, codes, 4 + j // 4), 4 - 2 * (j % 4)), 0x30303030))


def _shift(e: Emitter, words: Value, left: int) -> Value:
    """Bits moved left (right if negative); callers mask what crosses bytes."""
    return words if left == 0 else e.shl(words, left) if left > 0 else e.shr(words, -left)


_QUAD = {"i8": _words, "u4": _u4, "u5": _u5, "u6": _u6}


def columns(e: Emitter, format: WeightFormat, codes: Value, which: Sequence[int]) -> Iterator[tuple[int, Value]]:
    """(column of the span, code - zero of 8 rows as f32) for the columns of the quads asked for, in order."""
    reader = _NUMBERS.get((format.codes, format.zero), _bytes)
    for j in which:
        for i, number in enumerate(reader(e, format, codes, j)):
            yield 4 * j + i, e.cast("sitofp", number, "f32")


def _nibbles(e: Emitter, format: WeightFormat, codes: Value, j: int) -> Iterator[Value]:
    words = _words(e, codes, j // 2)
    for i in range(4):
        yield e.and_(_shift(e, words, -(8 * i + 4 * (j % 2))), 15)


def _centred_nibbles(e: Emitter, format: WeightFormat, codes: Value, j: int) -> Iterator[Value]:
    """Zero 8: flipping the top bit of a nibble makes it the two's complement of code - 8."""
    words = e.xor(_words(e, codes, j // 2), -0x77777778)
    for i in range(4):
        yield e.sar(_shift(e, words, 28 - (8 * i + 4 * (j % 2))), 28)


def _bytes(e: Emitter, format: WeightFormat, codes: Value, j: int) -> Iterator[Value]:
    words = _QUAD[format.codes](e, codes, j)
    if not (format.zero or format.codes == "i8"):
        for i in range(4):
            yield e.and_(_shift(e, words, -8 * i), 255)
        return
    if format.zero:
        words = e.cast("bitcast", e.sub(e.cast("bitcast", words, I8X32), format.zero), I32X8)
    for i in range(4):
        yield e.sar(_shift(e, words, 24 - 8 * i), 24)


_NUMBERS = {("u4", 0): _nibbles, ("u4", 8): _centred_nibbles}


def float_columns(e: Emitter, weight: Packed, codes: Value, first: Value, count: int) -> Iterator[tuple[int, Value]]:
    """(i, column ``first`` + i of 8 rows as f32) of a weight in a float format; ``codes`` points to its row block."""
    unit = "f32" if weight.format.codes == "f32" else "i16"
    here = e.at(codes, e.mul(first, BLOCK), unit)
    for i in range(count):
        yield i, e.load_floats(e.at(here, BLOCK * i, unit), weight.format.codes)
