"""Elementary functions on f32 vectors, as MLIR text.

MLIR lowers ``math.exp`` and its like to scalar libm calls, and kernels are loaded without any library, so they are
written out here. An emitter takes the kernel's ``Emitter`` and its operands (vectors of any number of lanes) and
returns the result. Every lane is computed alone by the same instructions: padding a vector changes nothing.

Errors against float64, measured over the whole range (tests/test_cpu_kernels.py holds the bounds): exp, erf, rsqrt
and silu's factors stay within 2 ulp, tanh and sigmoid within 3. log, pow, sin and cos go through float64 and are
rounded once: they are rare (rope tables are made once a step) and their reductions need the bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from adaptc.backends.cpu.kernels.base import Emitter, Value, element

LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634


def _at_most(e: Emitter, x: Value, limit: float) -> Value:
    """min(x, limit) that keeps a NaN in x."""
    return e.select(e.compare("ogt", x, limit), limit, x)


def _at_least(e: Emitter, x: Value, limit: float) -> Value:
    """max(x, limit) that keeps a NaN in x."""
    return e.select(e.compare("olt", x, limit), limit, x)


def horner(e: Emitter, x: Value, coefficients: Sequence[float]) -> Value:
    """The polynomial in x with these coefficients, highest power first."""
    result = e.const(coefficients[0], x.type)
    for coefficient in coefficients[1:]:
        result = e.fma(result, x, coefficient)
    return result


def absolute(e: Emitter, x: Value) -> Value:
    return e.math("absf", x)


def copysign(e: Emitter, size: Value, sign: Value) -> Value:
    return e.op(f"math.copysign {size}, {sign} : {size.type}", size.type)


# round(x·scale) comes from adding 1.5·2^(fraction bits), whose last place is 1: a float-to-int cast of a NaN or of a
# large number has no meaning in LLVM, this has
_ROUNDING = {"f32": (12582912.0, "i32", 0x4B400000), "f64": (6755399441055744.0, "i64", 0x4338000000000000)}


def _round(e: Emitter, x: Value, scale: float, kind: str) -> tuple[Value, Value]:
    """round(x·scale), as a float and as an integer vector, for |x·scale| < 2^21 (f32) or 2^50 (f64)."""
    magic, integer, bits = _ROUNDING[kind]
    shifted = e.fma(x, scale, magic)
    return e.sub(shifted, magic), e.sub(e.cast("bitcast", shifted, integer), bits)


def _power_of_two(e: Emitter, count: Value) -> Value:
    """2^count as f32, for i32 lanes in -126..127."""
    return e.cast("bitcast", e.shl(e.add(count, 127), 23), "f32")


# (exp(r) - 1 - r)/r² for |r| ≤ ln2/2: Cephes, expf.c
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def _exp_parts(e: Emitter, x: Value) -> tuple[Value, Value]:
    """e^x as a number near 1 and the power of two that it is multiplied by."""
    rounded, count = _round(e, x, LOG2E, "f32")
    rest = e.fma(rounded, 2.12194440e-4, e.fma(rounded, -0.693359375, x))
    return e.add(e.fma(horner(e, rest, _EXP), e.mul(rest, rest), rest), 1.0), count


def exp_of_negative(e: Emitter, x: Value) -> Value:
    """e^x for x ≤ 0, and 0 below -87, where it is under 2^-125; NaN stays NaN. Two thirds of the instructions of ``exp``."""
    poly, count = _exp_parts(e, x)
    return e.select(e.compare("olt", x, -87.0), 0.0, e.mul(poly, _power_of_two(e, count)))


def exp(e: Emitter, x: Value) -> Value:
    """e^x: 0 below -103.98, subnormal numbers above it, inf above 88.72; NaN stays NaN."""
    poly, count = _exp_parts(e, _at_least(e, _at_most(e, x, 89.0), -104.0))
    # in two factors, as 2^count itself may be beyond float32 when the product is not
    half = e.sar(count, 1)
    return e.mul(e.mul(poly, _power_of_two(e, half)), _power_of_two(e, e.sub(count, half)))


def sigmoid(e: Emitter, x: Value) -> Value:
    """1/(1 + e^-x), from e^-|x| on either side, so that nothing overflows or cancels."""
    decay = exp(e, e.neg(absolute(e, x)))
    return e.div(e.select(e.compare("oge", x, 0.0), 1.0, decay), e.add(decay, 1.0))


def silu(e: Emitter, x: Value) -> Value:
    return e.mul(x, sigmoid(e, x))


# (tanh(x)/x - 1)/x² as a polynomial in x², |x| < 0.625: Cephes, tanhf.c
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)


def tanh(e: Emitter, x: Value) -> Value:
    size, square = absolute(e, x), e.mul(x, x)
    small = e.fma(e.mul(horner(e, square, _TANH), square), x, x)
    large = e.sub(1.0, e.div(2.0, e.add(exp(e, e.add(size, size)), 1.0)))
    return e.select(e.compare("olt", size, 0.625), small, copysign(e, large, x))


# erf(x)/x - 1 in x², and (log(1 - erf(x)) + x)/x in x: N. Juffa, https://stackoverflow.com/a/35148199
_ERF_SMALL = (-5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1)
_ERF_LARGE = (-1.72853470e-5, 3.83197126e-4, -3.88396438e-3, 2.42546219e-2, -1.06777877e-1, -6.34846687e-1,
              -1.28717512e-1)


def erf(e: Emitter, x: Value) -> Value:
    size = _at_most(e, absolute(e, x), 4.0)  # erf rounds to 1 from 3.92 on
    small = e.fma(horner(e, e.mul(x, x), _ERF_SMALL), x, x)
    large = e.sub(1.0, exp(e, e.fma(horner(e, size, _ERF_LARGE), size, e.neg(size))))
    return e.select(e.compare("olt", size, 0.927734375), small, copysign(e, large, x))


# erfc(x)·e^(x²)/t in t = 1/(1 + 0.3·x), 0 <= x <= 10.2: a relative minimax fit of our own, right to 2e-8
_ERFC = (-0.12954296171665192, 0.48566800355911255, -0.512512743473053, 0.5480136275291443, -0.09487493336200714,
         0.2150329202413559, 0.1483081877231598, 0.17072021961212158, 0.16918766498565674)


def gelu(e: Emitter, x: Value) -> Value:
    """x·erfc(-x/√2)/2 from erfc(|x|/√2), which doesn't cancel for negative x as 1 + erf does."""
    size = _at_most(e, e.mul(absolute(e, x), math.sqrt(0.5)), 10.2)  # e^(-x²) is 0 from there on
    t = reciprocal(e, e.fma(size, 0.3, e.const(1.0, x.type)))
    tail = e.mul(e.mul(horner(e, t, _ERFC), t), exp(e, e.neg(e.mul(size, size))))
    return e.mul(e.mul(x, 0.5), e.select(e.compare("ogt", x, 0.0), e.sub(2.0, tail), tail))


def gelu_tanh(e: Emitter, x: Value) -> Value:
    """x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2 as x·σ(2·…), which doesn't cancel for negative x."""
    scale = 2 * math.sqrt(2 / math.pi)
    return e.mul(x, sigmoid(e, e.mul(x, e.fma(e.mul(x, x), scale * 0.044715, e.const(scale, x.type)))))


def sqrt(e: Emitter, x: Value) -> Value:
    return e.math("sqrt", x)


def reciprocal(e: Emitter, x: Value) -> Value:
    return e.div(1.0, x)


def rsqrt(e: Emitter, x: Value) -> Value:
    """1/√x by the exact instructions, not by the 12-bit estimate."""
    return e.div(1.0, sqrt(e, x))


# ---- through float64


# π/2 as a sum of three doubles
_HALF_PI = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591833e-33)
_SIN = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(8, 0, -1))
_COS = tuple((-1) ** k / math.factorial(2 * k) for k in range(8, -1, -1))


def _circle(e: Emitter, x: Value, quarter: int) -> Value:
    """sin(x + quarter·π/2), right to half an ulp for |x| < 2^31."""
    rest = e.cast("extf", x, "f64")
    rounded, count = _round(e, rest, 2 / math.pi, "f64")
    for part in _HALF_PI:
        rest = e.fma(rounded, -part, rest)
    square = e.mul(rest, rest)
    sine = e.fma(e.mul(horner(e, square, _SIN), square), rest, rest)
    turn = e.add(count, quarter)
    odd, negative = (e.compare("ne", e.and_(turn, bit), 0) for bit in (1, 2))
    value = e.select(odd, horner(e, square, _COS), sine)
    return e.cast("truncf", e.select(negative, e.neg(value), value), "f32")


def sin(e: Emitter, x: Value) -> Value:
    return _circle(e, x, 0)


def cos(e: Emitter, x: Value) -> Value:
    return _circle(e, x, 1)


def _log_wide(e: Emitter, x: Value) -> Value:
    """Natural logarithm, as f64, of positive finite f32 lanes (subnormal ones are normal in f64).

    log(2^n·m) = n·ln2 + 2·atanh((m-1)/(m+1)) with m in [√½, √2)."""
    bits = e.cast("bitcast", e.cast("extf", x, "f64"), "i64")
    # less the bits of √½, the exponent field steps where m does
    exponent = e.sar(e.sub(bits, 0x3FE6A09E667F3BCD), 52)
    mantissa = e.cast("bitcast", e.sub(bits, e.shl(exponent, 52)), "f64")
    ratio = e.div(e.sub(mantissa, 1.0), e.add(mantissa, 1.0))
    series = horner(e, e.mul(ratio, ratio), [2.0 / k for k in range(19, 0, -2)])
    power = e.cast("sitofp", e.cast("trunci", exponent, "i32"), "f64")  # AVX2 converts only i32
    return e.fma(power, LN2, e.mul(series, ratio))


def _exp_wide(e: Emitter, x: Value) -> Value:
    """e^x for f64 lanes, clamped where float32 has long been 0 or inf."""
    bounded = _at_least(e, _at_most(e, x, 200.0), -200.0)
    rounded, count = _round(e, bounded, LOG2E, "f64")
    poly = horner(e, e.fma(rounded, -LN2, bounded), [1 / math.factorial(k) for k in range(12, -1, -1)])
    return e.mul(poly, e.cast("bitcast", e.shl(e.add(count, 1023), 52), "f64"))


def log(e: Emitter, x: Value) -> Value:
    """ln(x): -inf at 0, NaN below 0, inf at inf."""
    value = e.cast("truncf", _log_wide(e, x), "f32")
    value = e.select(e.compare("oeq", x, 0.0), -math.inf, value)
    value = e.select(e.compare("olt", x, math.inf), value, x)
    return e.select(e.compare("uge", x, 0.0), value, math.nan)


_SHORT_POWERS: dict[float, Callable[[Emitter, Value], Value]] = {
    0.5: sqrt,
    -0.5: rsqrt,
    -1.0: reciprocal,
    1.0: lambda e, x: x,
    2.0: lambda e, x: e.mul(x, x),
    3.0: lambda e, x: e.mul(e.mul(x, x), x),
}


def power(e: Emitter, x: Value, y: Value | float) -> Value:
    """x^y with C's special cases: signs for negative x and integer y, NaN for other y, 1 for y = 0 or x = 1.

    A Python number as ``y`` takes the short form of the common exponents."""
    if not isinstance(y, Value):
        if y in _SHORT_POWERS:
            return _SHORT_POWERS[y](e, x)
        y = e.const(y, x.type)
    size = absolute(e, x)
    value = e.cast("truncf", _exp_wide(e, e.mul(_log_wide(e, size), e.cast("extf", y, "f64"))), "f32")
    upward = e.compare("ogt", y, 0.0)

    def limit(grows: Value) -> Value:
        return e.select(grows, e.const(math.inf, x.type), 0.0)

    # |x| of 0 or inf, then |y| of inf
    nothing = e.compare("oeq", size, 0.0)
    value = e.select(e.or_(nothing, e.compare("oeq", size, math.inf)), limit(e.xor(nothing, upward)), value)
    endless = limit(e.xor(e.compare("olt", size, 1.0), upward))
    endless = e.select(e.compare("oeq", size, 1.0), 1.0, endless)
    value = e.select(e.compare("oeq", absolute(e, y), math.inf), endless, value)
    # x below 0
    whole = e.compare("oeq", e.math("trunc", y), y)
    half = e.mul(y, 0.5)
    odd = e.and_(whole, e.compare("une", e.math("trunc", half), half))
    value = e.select(odd, copysign(e, value, x), value)
    below = e.and_(e.compare("olt", x, 0.0), e.compare("one", size, math.inf))
    value = e.select(e.and_(below, e.xor(whole, True)), math.nan, value)
    value = e.select(e.compare("uno", x, y), math.nan, value)
    return e.select(e.or_(e.compare("oeq", y, 0.0), e.compare("oeq", x, 1.0)), 1.0, value)


def maximum(e: Emitter, x: Value, y: Value) -> Value:
    """The larger one; for floats NaN if either is, as numpy and torch have it."""
    return e.op(f"arith.maximumf {x}, {y} : {x.type}", x.type) if element(x.type)[0] == "f" else e.max(x, y)


def minimum(e: Emitter, x: Value, y: Value) -> Value:
    return e.op(f"arith.minimumf {x}, {y} : {x.type}", x.type) if element(x.type)[0] == "f" else e.min(x, y)


UNARY: dict[str, Callable[[Emitter, Value], Value]] = {
    "neg": lambda e, x: e.neg(x), "abs": absolute, "exp": exp, "log": log, "sqrt": sqrt, "rsqrt": rsqrt,
    "reciprocal": reciprocal, "cos": cos, "sin": sin, "tanh": tanh, "erf": erf, "sigmoid": sigmoid, "silu": silu,
    "gelu_tanh": gelu_tanh, "gelu": gelu,
}  # fmt: skip
"""Operator name → emitter of the float32 function of one operand."""

BINARY: dict[str, Callable[[Emitter, Value, Value], Value]] = {
    "add": Emitter.add, "sub": Emitter.sub, "mul": Emitter.mul, "div": Emitter.div, "max": maximum, "min": minimum,
    "pow": power,
}  # fmt: skip
"""Operator name → emitter of the function of two operands of one type."""

ACTIVATIONS = UNARY
"""Activation name (``act`` of gated_linear) → emitter."""
