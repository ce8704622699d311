"""How kernels read packed weights (layout: ``adaptc.backends.cpu.packing``): as many rows as a vector of the level has
lanes × 32 columns at a time. The bytes are the same for every level; a *unit* of rows is half a block of 8 rows, a
block, or two blocks that lie apart.

Everything here exists once for all formats: codes by how many bits they have, scales by their levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from adaptc.backends.cpu.kernels.base import Emitter, Value, like, vec
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
class Rows:
    """Where the rows of a unit lie in a stream: a pointer for each block of 8, and the first row in it if they aren't
    all of it."""

    blocks: tuple[Value, ...]
    first: Value | None = None

    def at(self, e: Emitter, offset: Value | int, unit: str = "i8") -> Rows:
        """Both pointers moved, as by ``Emitter.at``."""
        return Rows(tuple(e.at(pointer, offset, unit) for pointer in self.blocks), self.first)

    def load(self, e: Emitter, kind: str) -> Value:
        """One element of type ``kind`` a row; those of a block lie together."""
        return self._joined(e, kind, lambda pointer, count: e.load(pointer, vec(count, kind)))

    def load_floats(self, e: Emitter, kind: str) -> Value:
        """One f32, f16 or bf16 number a row, as f32."""
        stored = "f32" if kind == "f32" else "i16"
        return self._joined(e, stored, lambda pointer, count: e.load_floats(pointer, kind, count))

    def _joined(self, e: Emitter, kind: str, load: Callable[[Value, int], Value]) -> Value:
        if self.first is not None:
            (pointer,) = self.blocks
            return load(e.at(pointer, self.first, kind), e.lanes)
        parts = [load(pointer, BLOCK) for pointer in self.blocks]
        return parts[0] if len(parts) == 1 else e.shuffle(*parts, range(2 * BLOCK))


@dataclass(frozen=True)
class Group:
    """Columns of a span that share a scale: scale f32[lanes] (one a row) and, if any, what is added to each value."""

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

    def units(self, e: Emitter) -> int:
        """How many vectors its rows fill."""
        return -(-self.n // e.lanes)

    def unit(self, e: Emitter, index: Value) -> tuple[Rows, Rows]:
        """The codes and the scales of rows index·lanes and on."""
        if e.lanes < BLOCK:
            per = BLOCK // e.lanes
            codes, scales = self.block(e, e.div(index, per))
            first = e.mul(e.rem(index, per), e.lanes)
            return Rows((codes,), first), Rows((scales,), first)
        count = e.lanes // BLOCK
        if count == 1:
            numbers = [index]
        else:  # beyond the last block the last one is read again, and nobody stores what comes of it
            numbers = [e.min(e.add(e.mul(index, count), i), blocks(self.n) - 1) for i in range(count)]
        codes, scales = zip(*(self.block(e, number) for number in numbers))
        return Rows(codes), Rows(scales)

    def block(self, e: Emitter, index: Value) -> tuple[Value, Value]:
        """Pointers to the codes and the scales of row block ``index``."""
        return (
            e.at(self.codes, e.mul(index, code_block_bytes(self.format, self.k))),
            e.at(self.scales, e.mul(index, scale_block_bytes(self.format, self.k))),
        )


Body = Callable[[Value, Rows, Sequence[Group], Sequence[Value]], Sequence[Value]]
"""(first column, where the span's codes lie, its groups in column order, carried values) → next carried values."""


def walk(e: Emitter, weight: Packed, codes: Rows, scales: Rows, init: Sequence[Value], body: Body) -> tuple[Value, ...]:
    """Runs ``body`` for every 32 columns of a unit of rows of an integer format, in ascending order."""
    format, k = weight.format, weight.k
    per_super = format.superblock // SPAN
    code_bytes, scale_bytes = code_layout(format).vectors * 32, scale_layout(format).bytes
    shared, groups = _LEVELS[format.scale]
    with e.loop(0, k // format.superblock, init=init) as outer:
        here = scales.at(e, e.mul(outer.index, scale_bytes))
        first = e.mul(outer.index, per_super)
        common = shared(e, format, here)

        def run(span: Value, found: Sequence[Group], carried: Sequence[Value]) -> Sequence[Value]:
            return body(e.mul(span, SPAN), codes.at(e, e.mul(span, code_bytes)), found, carried)

        if per_super == 1:
            outer.end(*run(first, groups(e, format, here, common, first), outer.args))
        else:
            with e.loop(0, per_super, init=outer.args) as loop:
                found = groups(e, format, here, common, loop.index)
                loop.end(*run(e.add(first, loop.index), found, loop.args))
            outer.end(*loop.results)
    return outer.results


def span_at(e: Emitter, weight: Packed, codes: Rows, scales: Rows, span: Value) -> tuple[Rows, Sequence[Group]]:
    """Where the codes of 32 columns of a unit of rows of an integer format lie, and their groups, as ``walk`` has them."""
    format = weight.format
    per_super = format.superblock // SPAN
    shared, groups = _LEVELS[format.scale]
    here = scales.at(e, e.mul(e.div(span, per_super), scale_layout(format).bytes))
    found = groups(e, format, here, shared(e, format, here), e.rem(span, per_super))
    return codes.at(e, e.mul(span, code_layout(format).vectors * 32)), found


# --- groups of a span: what its superblock's spans share, and of each span from that ---------------------------------

def _nothing(e, format, here) -> tuple[Value, ...]:
    return ()


def _one_level(e, format, here, shared, span) -> list[Group]:
    return [Group(*_halves(e, format, here))]


def _six_bits(e, format, here, shared, span) -> list[Group]:
    scale1, min1 = shared
    triple = here.at(e, e.add(e.mul(e.shr(span, 1), 24), 32))
    s, m, low = (e.cast("extui", triple.at(e, 8 * i).load(e, "i8"), "i32") for i in range(3))
    odd = e.compare("ne", e.and_(span, 1), 0)
    scale0 = e.select(odd, _joined(e, e.and_(low, 15), s), e.and_(s, 63))
    min0 = e.select(odd, _joined(e, e.shr(low, 4), m), e.and_(m, 63))
    return [Group(*(e.mul(e.cast("sitofp", v, "f32"), by) for v, by in ((scale0, scale1), (min0, min1))))]


def _joined(e: Emitter, low: Value, top: Value) -> Value:
    """Six bits: four from ``low``, two from the top of the byte ``top``."""
    return e.or_(low, e.shl(e.shr(top, 6), 4))


def _eight_bits(e, format, here, shared, span) -> list[Group]:
    (scale1,) = shared
    at = here.at(e, e.add(e.mul(span, 16), 16))
    return [
        Group(e.mul(e.cast("sitofp", e.cast("extsi", at.at(e, 8 * i).load(e, "i8"), "i32"), "f32"), scale1))
        for i in range(2)
    ]


def _powers(e, format, here, shared, span) -> list[Group]:
    return [Group(half_power(e, here.load(e, "i8")))]


def half_power(e: Emitter, exponents: Value) -> Value:
    """2^(exponent - 128) as f32, of exponents i8: the first two are subnormal."""
    wide = e.cast("extui", exponents, "i32")
    bits = e.select(e.compare("eq", wide, 0), 1 << 21, e.select(
        e.compare("eq", wide, 1), 1 << 22, e.shl(e.sub(wide, 1), 23)))
    return e.cast("bitcast", bits, like(bits.type, "f32"))


def _halves(e: Emitter, format: WeightFormat, here: Rows) -> list[Value]:
    """The f16 levels at ``here``: scale and, if the format has one, minimum with its sign."""
    scale = here.load_floats(e, "f16")
    if not format.minimum:
        return [scale]
    minimum = here.at(e, 16).load_floats(e, "f16")
    return [scale, minimum if format.min_sign > 0 else e.neg(minimum)]


_LEVELS = {
    ("f16",): (_nothing, _one_level), ("u6", "f16"): (_halves, _six_bits), ("i8", "f16"): (_halves, _eight_bits),
    ("e8m0",): (_nothing, _powers),
}
"""Levels of a format's scales → (what spans of a superblock share, a span's groups from that)."""


# --- codes of a span --------------------------------------------------------------------------------------------------

def quads(e: Emitter, format: WeightFormat, codes: Rows, which: Sequence[int]) -> Iterator[tuple[int, Value]]:
    """(j, bytes [rows × 4 columns] of quad j) for the quads asked for: codes as stored (before
    zero is subtracted), or the values that they stand for where the format has a table of them."""
    for j in which:
        stored = e.cast("bitcast", _QUAD[format.codes](e, codes, j), e.bytes)
        yield j, e.do("lookup", stored, format.values) if format.values else stored


def _words(e: Emitter, codes: Rows, vector: int) -> Value:
    return codes.at(e, 32 * vector).load(e, "i32")


def _u4(e: Emitter, codes: Rows, j: int) -> Value:
    return e.and_(_shift(e, _words(e, codes, j // 2), -4 * (j % 2)), 0x0F0F0F0F)


def _u5(e: Emitter, codes: Rows, j: int) -> Value:
    return e.or_(_u4(e, codes, j), e.and_(_shift(e, _words(e, codes, 4), 4 - j), 0x10101010))


def _u6(e: Emitter, codes: Rows, j: int) -> Value:
    return e.or_(_u4(e, codes, j), e.and_(_shift(e, _words(e, codes, 4 + j // 4), 4 - 2 * (j % 4)), 0x30303030))


def _shift(e: Emitter, words: Value, left: int) -> Value:
    """Bits moved left (right if negative); callers mask what crosses bytes."""
    return words if left == 0 else e.shl(words, left) if left > 0 else e.shr(words, -left)


_QUAD = {"i8": _words, "u4": _u4, "u5": _u5, "u6": _u6}


def columns(e: Emitter, format: WeightFormat, codes: Rows, which: Sequence[int]) -> Iterator[tuple[int, Value]]:
    """(column of the span, code - zero of the rows, or the value, as f32) for the columns of the quads asked for, in
    order."""
    reader = _bytes if format.values else _NUMBERS.get((format.codes, format.zero), _bytes)
    for j in which:
        for i, number in enumerate(reader(e, format, codes, j)):
            yield 4 * j + i, e.cast("sitofp", number, "f32")


def _nibbles(e: Emitter, format: WeightFormat, codes: Rows, j: int) -> Iterator[Value]:
    words = _words(e, codes, j // 2)
    for i in range(4):
        yield e.and_(_shift(e, words, -(8 * i + 4 * (j % 2))), 15)


def _centred_nibbles(e: Emitter, format: WeightFormat, codes: Rows, j: int) -> Iterator[Value]:
    """Zero 8: flipping the top bit of a nibble makes it the two's complement of code - 8."""
    words = e.xor(_words(e, codes, j // 2), -0x77777778)
    for i in range(4):
        yield e.sar(_shift(e, words, 28 - (8 * i + 4 * (j % 2))), 28)


def _bytes(e: Emitter, format: WeightFormat, codes: Rows, j: int) -> Iterator[Value]:
    ((_, stored),) = quads(e, format, codes, [j])
    words = e.cast("bitcast", stored, e.words)
    if not (format.zero or format.values or format.codes == "i8"):
        for i in range(4):
            yield e.and_(_shift(e, words, -8 * i), 255)
        return
    if format.zero:
        words = e.cast("bitcast", e.sub(stored, format.zero), e.words)
    for i in range(4):
        yield e.sar(_shift(e, words, 24 - 8 * i), 24)


_NUMBERS = {("u4", 0): _nibbles, ("u4", 8): _centred_nibbles}


def float_columns(e: Emitter, weight: Packed, codes: Rows, first: Value, count: int) -> Iterator[tuple[int, Value]]:
    """(i, column ``first`` + i of the unit's rows as f32) of a weight in a float format."""
    unit = "f32" if weight.format.codes == "f32" else "i16"
    here = codes.at(e, e.mul(first, BLOCK), unit)
    for i in range(count):
        yield i, here.at(e, BLOCK * i, unit).load_floats(e, weight.format.codes)
