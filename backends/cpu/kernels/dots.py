"""Dot products of a unit of packed weight rows with a tile of rows of activations, f32 or int8.

Every row is computed by the same operations in the same order, whatever the tile:

f32   within a group two chains (even and odd columns) of fma over (code - zero) * x; their sum times the group's scale
      is added to the accumulator by one fma; then minimum * (sum of the group's x).
int8  integer dot product of a group, exact; times the activation's scale, minus zero * (the group's sum), times the
      weight's scale added by one fma; then minimum * (the group's sum).

Float weights go 32 columns at a time: two chains, then added (int8: times the activation's scale) to the accumulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from adaptc.backends.cpu.kernels.base import Emitter, Value, vec
from adaptc.backends.cpu.kernels.weights import Body, Group, Packed, Rows, columns, float_columns, quads, walk
from adaptc.backends.cpu.packing import SPAN, code_block_bytes

_QUADS = SPAN // 4

LINE = 64
"""Bytes that memory gives at once."""


def _chains(
    e: Emitter, numbers: Iterable[tuple[int, Value]], x: Callable[[int, int], Value], tile: int
) -> list[Value]:
    """For each row, the sum of number(column) * x(row, column): even and odd columns apart, then added."""
    sums: list[list[Value | None]] = [[None, None] for _ in range(tile)]
    for column, number in numbers:
        for row, chains in enumerate(sums):
            value, before = x(row, column), chains[column % 2]
            chains[column % 2] = e.mul(number, value) if before is None else e.fma(number, value, before)
    return [even if odd is None else e.add(even, odd) for even, odd in sums]


@dataclass(frozen=True)
class Floats:
    """Activations f32[rows, k]; ``x`` points to the tile's first row."""

    k: int
    x: Value

    dtype = "f32"
    row_bytes = staticmethod(lambda k: 4 * k)
    shapes = staticmethod(lambda rows, k: (f"f32[{rows},{k}]",))

    @staticmethod
    def at(e: Emitter, k: int, pointers: Sequence[Value], row: Value) -> Floats:
        return Floats(k, e.at(pointers[0], e.mul(row, k), "f32"))

    def _reader(self, e: Emitter, here: Value) -> Callable[[int, int], Value]:
        """(row, column from ``here``) → that number in every lane."""
        return lambda row, column: e.splat(e.load(e.at(here, row * self.k + column, "f32"), "f32"))

    def integers(self, e: Emitter, weight: Packed, tile: int) -> Body:
        """Body of ``walk`` for integer formats."""

        def body(first: Value, codes: Rows, groups: Sequence[Group], sums: Sequence[Value]) -> list[Value]:
            here, result = e.at(self.x, first, "f32"), list(sums)
            per = _QUADS // len(groups)
            for g, group in enumerate(groups):
                numbers = columns(e, weight.format, codes, range(g * per, (g + 1) * per))
                parts = _chains(e, numbers, self._reader(e, here), tile)
                for row, part in enumerate(parts):
                    result[row] = e.fma(part, group.scale, result[row])
                    if group.minimum is not None:
                        start = e.at(here, row * self.k + g * per * 4, "f32")
                        result[row] = e.fma(group.minimum, e.splat(_sum(e, start, per * 4)), result[row])
            return result

        return body

    def floats(self, e: Emitter, first: Value, numbers, sums: Sequence[Value], tile: int) -> list[Value]:
        """``sums`` plus the products of a span of float weights."""
        here = e.at(self.x, first, "f32")
        parts = _chains(e, numbers, self._reader(e, here), tile)
        return [e.add(total, part) for total, part in zip(sums, parts)]


def _sum(e: Emitter, pointer: Value, count: int) -> Value:
    """Sum of ``count`` (a multiple of 8) numbers in a fixed order."""
    lanes = min(e.lanes, count)
    floats = vec(lanes, "f32")
    total = e.load(pointer, floats)
    for i in range(lanes, count, lanes):
        total = e.add(total, e.load(e.at(pointer, i, "f32"), floats))
    return e.reduce(e.add, total)


_PAIRS = {"u4": 8, "u5": 4, "u6": 2}
"""Pair sums of code * activation (2 * 127 * largest code each) that 16 bits hold."""


@dataclass(frozen=True)
class Codes:
    """Activations as ``quantize`` leaves them; the pointers stand at the tile's first row."""

    k: int
    codes: Value
    scales: Value
    sums: Value

    dtype = "i8"
    row_bytes = staticmethod(lambda k: k)
    shapes = staticmethod(
        lambda rows, k: (f"i8[{rows},{k}]", f"f32[{rows},{k // SPAN}]", f"f32[{rows},{k // 16}]")
    )

    @staticmethod
    def at(e: Emitter, k: int, pointers: Sequence[Value], row: Value) -> Codes:
        codes, scales, sums = pointers
        return Codes(
            k,
            e.at(codes, e.mul(row, k)),
            e.at(scales, e.mul(row, k // SPAN), "f32"),
            e.at(sums, e.mul(row, k // 16), "f32"),
        )

    def _word(self, e: Emitter, here: Value, row: int, j: int) -> Value:
        """The four codes of quad j in every lane."""
        return e.splat(e.load(e.at(here, row * self.k + 4 * j), "i32"))

    def _bytes(self, e: Emitter, here: Value) -> Callable[[int, int], Value]:
        """(row, quad) → its four codes once for each weight row."""
        return lambda row, j: e.cast("bitcast", self._word(e, here, row, j), e.bytes)

    def _scale(self, e: Emitter, span: Value, row: int) -> Value:
        return e.splat(e.load(e.at(e.at(self.scales, span, "f32"), row * (self.k // SPAN), "f32"), "f32"))

    def _sum(self, e: Emitter, span: Value, row: int, start: int, count: int) -> Value:
        """Sum of the activations of columns start.. of the span (count is 16 or 32)."""
        here = e.at(self.sums, e.shl(span, 1), "f32")
        first = row * (self.k // 16) + start // 16
        parts = [e.load(e.at(here, first + i, "f32"), "f32") for i in range(count // 16)]
        return parts[0] if len(parts) == 1 else e.add(*parts)

    def integers(self, e: Emitter, weight: Packed, tile: int) -> Body:
        """Body of ``walk`` for integer formats."""
        format = weight.format
        dots = _signed_dots if format.codes == "i8" or format.values else _unsigned_dots

        def body(first: Value, codes: Rows, groups: Sequence[Group], sums: Sequence[Value]) -> list[Value]:
            here, span, result = e.at(self.codes, first), e.shr(first, 5), list(sums)
            per = _QUADS // len(groups)
            for g, group in enumerate(groups):
                weights = quads(e, format, codes, range(g * per, (g + 1) * per))
                for row, total_codes in enumerate(dots(e, format.codes, weights, self._bytes(e, here), tile)):
                    scaled, scale = e.cast("sitofp", total_codes, "f32"), self._scale(e, span, row)
                    total = None
                    if format.zero or group.minimum is not None:
                        total = self._sum(e, span, row, g * per * 4, per * 4)
                    if format.zero:
                        scaled = e.fma(scaled, scale, e.splat(e.mul(total, -float(format.zero))))
                    else:
                        scaled = e.mul(scaled, scale)
                    result[row] = e.fma(scaled, group.scale, result[row])
                    if group.minimum is not None:
                        result[row] = e.fma(group.minimum, e.splat(total), result[row])
            return result

        return body

    def floats(self, e: Emitter, first: Value, numbers, sums: Sequence[Value], tile: int) -> list[Value]:
        """``sums`` plus the products of a span of float weights."""
        here, span = e.at(self.codes, first), e.shr(first, 5)

        def number(row: int, column: int) -> Value:
            word = self._word(e, here, row, column // 4)
            return e.cast("sitofp", e.sar(e.shl(word, 24 - 8 * (column % 4)), 24), "f32")

        parts = _chains(e, numbers, number, tile)
        return [e.fma(part, self._scale(e, span, row), total) for row, (total, part) in enumerate(zip(sums, parts))]


def _unsigned_dots(e: Emitter, kind: str, weights, words, tile: int) -> list[Value]:
    """For each row, i32 sums, one a weight row, of unsigned code * activation code over the quads."""
    if e.native("quads"):
        return _quad_dots(e, weights, words, tile)
    short: list[list[Value]] = [[] for _ in range(tile)]
    totals: list[Value | None] = [None] * tile

    def flush() -> None:
        for row in range(tile):
            pairs = short[row].pop()
            wide = e.do("short_pairs", pairs)
            totals[row] = wide if totals[row] is None else e.add(totals[row], wide)

    for count, (j, weight) in enumerate(weights, 1):
        for row in range(tile):
            pairs = e.do("byte_pairs", weight, words(row, j))
            short[row] = [e.add(short[row][0], pairs) if short[row] else pairs]
        if count % _PAIRS[kind] == 0:
            flush()
    if any(short):
        flush()
    return totals


def _quad_dots(e: Emitter, weights, words, tile: int) -> list[Value]:
    """As ``_unsigned_dots``, four products by one instruction."""
    totals: list[Value | None] = [None] * tile
    for j, weight in weights:
        totals = [e.do("quads", total, weight, words(row, j)) for row, total in enumerate(totals)]
    return totals


def _signed_dots(e: Emitter, kind: str, weights, words, tile: int) -> list[Value]:
    """As ``_unsigned_dots`` for signed codes: |code| * (activation with the code's sign), which never saturates."""
    totals: list[Value | None] = [None] * tile
    zero = e.const(0, e.bytes)
    for j, weight in weights:
        size = e.max(weight, e.sub(zero, weight))
        for row in range(tile):
            totals[row] = e.do("quads", totals[row], size, e.do("signed", words(row, j), weight))
    return totals


ACTIVATION_KINDS = {kind.dtype: kind for kind in (Floats, Codes)}
"""dtype of operand 0 → how the activations are read."""


def dot(e: Emitter, weight: Packed, unit: Value, x: Floats | Codes, tile: int, ahead: int = 0) -> Sequence[Value]:
    """f32[lanes] for each of ``tile`` rows: the rows of x times the weight rows of ``unit``. A single row asks for
    codes ``ahead`` bytes before they are needed (0: it doesn't); of several, arithmetic is the limit."""
    codes, scales = weight.unit(e, unit)
    zero = [e.const(0.0, e.floats)] * tile

    def ask(here: Rows) -> None:
        if ahead and tile == 1:
            for pointer in here.blocks:
                for line in range(0, code_block_bytes(weight.format, SPAN), LINE):
                    e.prefetch(e.at(pointer, ahead + line))

    if not weight.format.is_float:
        multiply = x.integers(e, weight, tile)

        def body(first: Value, codes: Rows, groups: Sequence[Group], sums: Sequence[Value]) -> Sequence[Value]:
            ask(codes)
            return multiply(first, codes, groups, sums)

        return walk(e, weight, codes, scales, zero, body)
    whole = weight.k // SPAN * SPAN
    with e.loop(0, whole, SPAN, init=zero) as loop:
        ask(codes.at(e, e.mul(loop.index, code_block_bytes(weight.format, 1))))
        numbers = float_columns(e, weight, codes, loop.index, SPAN)
        loop.end(*x.floats(e, loop.index, numbers, loop.args, tile))
    if whole == weight.k:
        return loop.results
    last = e.const(whole, "i64")
    return x.floats(e, last, float_columns(e, weight, codes, last, weight.k - whole), loop.results, tile)
