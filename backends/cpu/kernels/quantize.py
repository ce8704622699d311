"""Dynamic quantisation of activations: f32[T, K] → codes i8[T, K], scales f32[T, K/32], sums f32[T, K/16].

scale = max|x| of 32 columns / 127; code = x/scale rounded half to even (0 if scale is 0), held within ±127 where a
subnormal scale would carry it beyond; sum = (the 16 codes' sum) * scale. A group with a NaN or infinity gets that for
its scale, so that what is multiplied with it shows it. Rows play no part: groups of 32 lie densely one after the other,
and threads share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from adaptc.backends.cpu.kernels.base import F32X8, LANES, Emitter, Family, Value
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection

GROUP = 32


def _emit(params: Mapping[str, Any], symbol: str) -> str:
    e = Emitter()
    x, codes, scales, sums = (e.buffer(i) for i in range(4))
    groups = e.mul(e.size(params["rows"]), params["k"] // GROUP)
    with e.loop(*e.share(groups)) as loop:
        first = e.shl(loop.index, 5)
        here = e.at(x, first, "f32")
        parts = [e.load(e.at(here, LANES * i, "f32"), F32X8) for i in range(GROUP // LANES)]
        # Sizes compare as integers as they do as floats, but for a NaN, which is then the largest and so never lost.
        sizes = [e.cast("bitcast", e.math("absf", part), "i32") for part in parts]
        largest = e.reduce(e.max, e.max(e.max(sizes[0], sizes[1]), e.max(sizes[2], sizes[3])))
        scale = e.div(e.cast("bitcast", largest, "f32"), 127.0)
        e.store(scale, e.at(scales, loop.index, "f32"))
        # Every |x| ≤ 127 * 2^-149 has a code of 0 when the scale rounds to 0: dividing by 1 instead yields that.
        divisor = e.splat(e.select(e.compare("oeq", scale, 0.0), 1.0, scale))
        rounded = [_code(e, e.div(part, divisor)) for part in parts]
        for i, part in enumerate(rounded):
            e.store(e.cast("trunci", part, "i8"), e.at(e.at(codes, first), LANES * i))
        for i in range(2):
            total = e.reduce(e.add, e.add(rounded[2 * i], rounded[2 * i + 1]))
            e.store(e.mul(e.cast("sitofp", total, "f32"), scale),
                    e.at(e.at(sums, e.shl(loop.index, 1), "f32"), i, "f32"))
    return e.text(symbol)


def _code(e: Emitter, ratio: Value) -> Value:
    bounded = e.min(e.max(e.math("roundeven", ratio), -127.0), 127.0)
    return e.cast("fptosi", bounded, "i32")


def _signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    rows, k = params["rows"], params["k"]
    return (f"in:f32[{rows},{k}]", f"out:i8[{rows},{k}]", f"out:f32[{rows},{k // 32}]", f"out:f32[{rows},{k // 16}]")


def _select(spec: OpSpec) -> Selection | None:
    (x,) = spec.operands
    if x.dtype != "f32" or len(x.shape) != 2 or not isinstance(x.shape[1], int):
        return None
    if spec.attrs["group"] != GROUP or x.shape[1] % GROUP:
        return None
    kernel = KernelSpec("quantize", (("k", x.shape[1]), ("rows", x.shape[0])))
    return Selection((KernelUse(kernel, ("operand:0", "result:0", "result:1", "result:2")),))


FAMILIES: dict[str, Family] = {"quantize": Family(_emit, _signature)}
SELECT: dict[str, Callable[[OpSpec], Selection | None]] = {"quantize": _select}
