"""Instructions that only some CPUs have: one table of them by feature, and what stands in for each elsewhere.

An operation is emitted by ``Emitter.do(name, …)``. The first row of ``TABLE[name]`` whose feature the level has and
whose lanes are those of the level's registers is taken, and operands must fill whole registers (any shape, where the
lanes are ``ANY``); without one, the ``FALLBACKS`` say the same in plain vector operations. Only this table names
intrinsics of a machine, so a kernel's text for a level without rows holds none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adaptc.backends.cpu.kernels.values import Value, element, lanes, like, vec
from adaptc.backends.cpu.levels import Level

if TYPE_CHECKING:
    from adaptc.backends.cpu.kernels.base import Emitter

ANY = 0
"""Lanes of a row that takes scalars and vectors of any length."""

Emit = Callable[..., Value]


@dataclass(frozen=True)
class Row:
    """An instruction: the level's feature that it needs, the result's 32-bit lanes, and how it is emitted."""

    feature: str
    lanes: int
    emit: Emit


def find(level: Level, name: str, width: int) -> Emit | None:
    """How ``level`` does an operation on registers of ``width`` lanes by an instruction of its own; None without one."""
    for row in TABLE[name]:
        if level.has(row.feature) and row.lanes in (ANY, width):
            return row.emit
    return None


def _byte_pairs(name: str) -> Emit:
    return lambda e, a, b: e.intrinsic(name, (a, b), vec(lanes(a.type) // 2, "i16"))


def _short_pairs(name: str) -> Emit:
    return lambda e, a: e.intrinsic(name, (a, e.const(1, a.type)), vec(lanes(a.type) // 2, "i32"))


def _signed(name: str) -> Emit:
    return lambda e, x, by: e.intrinsic(name, (x, by), x.type)


def _quads(name: str) -> Emit:
    def emit(e: Emitter, total: Value | None, a: Value, b: Value) -> Value:
        start = e.const(0, vec(lanes(a.type) // 4, "i32")) if total is None else total
        return e.intrinsic(name, (start, a, b), start.type)

    return emit


def _table(e: Emitter, values: Sequence[int], type: str) -> Value:
    """``values`` [16] once in each 16 bytes."""
    return e.const([*values] * (lanes(type) // 16), type)


def _shuffled(name: str) -> Emit:
    return lambda e, codes, values: e.intrinsic(name, (_table(e, values, codes.type), codes), codes.type)


def _fused(e: Emitter, a: Value, b: Value, c: Value) -> Value:
    return e.op(f"math.fma {a}, {b}, {c} : {a.type}", a.type)


def _cast(name: str) -> Emit:
    return lambda e, a, to: e.op(f"arith.{name} {a} : {a.type} to {to}", to)


TABLE: Mapping[str, Sequence[Row]] = {
    "byte_pairs": (
        Row("avx512bw", 16, _byte_pairs("llvm.x86.avx512.pmaddubs.w.512")),
        Row("avx2", 8, _byte_pairs("llvm.x86.avx2.pmadd.ub.sw")),
        Row("sse4.2", 4, _byte_pairs("llvm.x86.ssse3.pmadd.ub.sw.128")),
    ),
    "short_pairs": (
        Row("avx512bw", 16, _short_pairs("llvm.x86.avx512.pmaddw.d.512")),
        Row("avx2", 8, _short_pairs("llvm.x86.avx2.pmadd.wd")),
        Row("sse4.2", 4, _short_pairs("llvm.x86.sse2.pmadd.wd")),
    ),
    "signed": (
        Row("avx2", 8, _signed("llvm.x86.avx2.psign.b")),
        Row("sse4.2", 4, _signed("llvm.x86.ssse3.psign.b.128")),
    ),
    "quads": (
        Row("avx512vnni", 16, _quads("llvm.x86.avx512.vpdpbusd.512")),
        Row("avxvnni", 8, _quads("llvm.x86.avx512.vpdpbusd.256")),  # LLVM takes the VEX form of the same instruction
    ),
    "lookup": (
        Row("avx512bw", 16, _shuffled("llvm.x86.avx512.pshuf.b.512")),
        Row("avx2", 8, _shuffled("llvm.x86.avx2.pshuf.b")),
        Row("sse4.2", 4, _shuffled("llvm.x86.ssse3.pshuf.b.128")),
        Row("neon", 4, _shuffled("llvm.aarch64.neon.tbl1.v16i8")),
    ),
    "fma": (Row("fma", ANY, _fused), Row("neon", ANY, _fused)),
    "half_to_float": (Row("f16c", ANY, _cast("extf")), Row("neon", ANY, _cast("extf"))),
    "float_to_half": (Row("f16c", ANY, _cast("truncf")), Row("neon", ANY, _cast("truncf"))),
}
"""Operation → instructions for it, better ones first.

byte_pairs     u8[4L] a, i8[4L] b → i16[2L]: a·b of neighbours added; the sums must fit 16 bits
short_pairs    i16[2L] → i32[L]: neighbours added
signed         i8[4L] x, i8[4L] by → -x where by < 0, x where by > 0; anything where by is 0
quads          i32[L] total (or None), u8[4L] a, i8[4L] b → i32[L]: total + a·b of four neighbours, exactly
lookup         i8[4L] codes below 16, 16 numbers → i8[4L]: the number that each code stands for
fma            a·b + c, rounded once where the CPU can; see ``_unfused``
half_to_float  f16 → f32, exactly
float_to_half  f32 → f16, to nearest even
"""


# ---- plain vector operations


def _evens_and_odds(e: Emitter, a: Value) -> tuple[Value, Value]:
    count = lanes(a.type)
    return e.shuffle(a, a, range(0, count, 2)), e.shuffle(a, a, range(1, count, 2))


def _plain_byte_pairs(e: Emitter, a: Value, b: Value) -> Value:
    return e.add(*_evens_and_odds(e, e.mul(e.cast("extui", a, "i16"), e.cast("extsi", b, "i16"))))


def _plain_short_pairs(e: Emitter, a: Value) -> Value:
    return e.add(*_evens_and_odds(e, e.cast("extsi", a, "i32")))


def _plain_signed(e: Emitter, x: Value, by: Value) -> Value:
    return e.select(e.compare("slt", by, 0), e.sub(0, x), x)


def _pairwise_quads(e: Emitter, total: Value | None, a: Value, b: Value) -> Value:
    wide = e.do("short_pairs", e.do("byte_pairs", a, b))
    return wide if total is None else e.add(total, wide)


def chosen(e: Emitter, codes: Value, values: Sequence[int]) -> Value:
    """The number of ``values`` that each code stands for, in integers of any width."""
    result = e.const(values[0], codes.type)
    for code, value in enumerate(values[1:], 1):
        result = e.select(e.compare("eq", codes, code), value, result)
    return result


def _unfused(e: Emitter, a: Value, b: Value, c: Value) -> Value:
    """a·b + c without a fused instruction: two roundings in f32, where a polynomial's last place is all that changes.

    In f64 the product's error is carried along (T. J. Dekker, https://doi.org/10.1007/BF01397083, with D. E. Knuth's
    sum): argument reductions rely on it. Good for |a|, |b| < 2^996.
    """
    product = e.mul(a, b)
    if element(a.type) != "f64":
        return e.add(product, c)

    def halves(x: Value) -> tuple[Value, Value]:
        spread = e.mul(x, 134217729.0)  # 2^27 + 1
        high = e.sub(spread, e.sub(spread, x))
        return high, e.sub(x, high)

    (a1, a2), (b1, b2) = halves(a), halves(b)
    rest = e.add(e.add(e.add(e.sub(e.mul(a1, b1), product), e.mul(a1, b2)), e.mul(a2, b1)), e.mul(a2, b2))
    total = e.add(product, c)
    other = e.sub(total, product)
    lost = e.add(e.sub(product, e.sub(total, other)), e.sub(c, other))
    return e.add(total, e.add(lost, rest))


def _plain_half_to_float(e: Emitter, a: Value, to: str) -> Value:
    bits = e.cast("extui", e.cast("bitcast", a, "i16"), "i32")
    size = e.and_(bits, 0x7FFF)
    # the exponent moves to its place and a product by 2^112 corrects its bias, also for subnormal numbers
    number = e.mul(e.cast("bitcast", e.shl(size, 13), to), 2.0**112)
    special = e.or_(e.shl(size, 13), 0x7F800000)
    special = e.select(e.compare("sgt", size, 0x7C00), e.or_(special, 1 << 22), special)  # NaNs become quiet
    value = e.select(e.compare("sge", size, 0x7C00), special, e.cast("bitcast", number, like(to, "i32")))
    return e.cast("bitcast", e.or_(value, e.shl(e.and_(bits, 0x8000), 16)), to)


def _plain_float_to_half(e: Emitter, a: Value, to: str) -> Value:
    bits = e.cast("bitcast", a, like(a.type, "i32"))
    size = e.and_(bits, 0x7FFFFFFF)
    # a float's rounding to the last place of 2^-24 does that of subnormal halves: the sum's low bits are the half
    small = e.sub(e.cast("bitcast", e.add(e.cast("bitcast", size, a.type), 0.5), like(a.type, "i32")), 0x3F000000)
    even = e.and_(e.shr(size, 13), 1)
    normal = e.shr(e.add(e.add(size, even), 0xFFF - (112 << 23)), 13)
    half = e.select(e.compare("slt", size, 113 << 23), small, normal)
    half = e.select(e.compare("sge", size, 143 << 23), 0x7C00, half)
    quiet = e.or_(e.and_(e.shr(size, 13), 0x3FF), 0x7E00)
    half = e.select(e.compare("sgt", size, 0x7F800000), quiet, half)
    half = e.or_(half, e.and_(e.shr(bits, 16), 0x8000))
    return e.cast("bitcast", e.cast("trunci", half, "i16"), to)


FALLBACKS: Mapping[str, Emit] = {
    "byte_pairs": _plain_byte_pairs,
    "short_pairs": _plain_short_pairs,
    "signed": _plain_signed,
    "quads": _pairwise_quads,
    "lookup": chosen,
    "fma": _unfused,
    "half_to_float": _plain_half_to_float,
    "float_to_half": _plain_float_to_half,
}
"""Operation → the same in operations that every CPU has."""
