"""How far apart two results may be, and why. Everything here is relative to what is compared.

One kernel against its meaning, on the same operands. The meaning is evaluated in float64 and rounded once, so the
difference is the kernel's. It may have

    BASE · u · |wanted|  +  SPREAD · sqrt(L) · noise

u is the result dtype's unit roundoff and |wanted| the element's size (the row's largest for operators that reduce: a
sum's rounding is as large as its terms, not as its result). ``noise`` is how far the meaning itself moves when every
operand moves by one unit roundoff: what no kernel can be blamed for. It is measured, for any operator, and only when
the first term doesn't suffice. L is the length of the reduction: a sum of L terms rounds L times, each time as much
as its partial sum, and such errors add up like a random walk.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from adaptc.ops.table import OpRow
from adaptc.protocol import OpSpec, StateSpec

UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
BASE = 32.0
SPREAD = 8.0
DRAWS = 3
INTEGERS_OFF = 1e-3
"""Share of integer results (codes) that may be off by one: those of values that lie between two."""

SMALLEST = 2.0**-149
"""One step of subnormal float32 numbers, which are as wrong as they are small."""

MEANING = 1e-6
"""An operator of the laid-out program against the captured values that it stands for, relative to the largest: a few
float32 roundings of the unfused form, each 6e-8 (at most 1.2e-7 measured on the tests' models)."""

STATE = {"f32": 0.0, "f16": 8 * UNIT["f16"], "bf16": 8 * UNIT["bf16"], "i8": 8 / 254}
"""What keeping a state in a dtype may add to the result of an operator that reads it. A code of 8 bits is off by half
a step of 1/127 of its row's largest value."""

QUANTIZED = 0.05
"""What activations in 8 bits may add to a linear map's result: half a step of 1/127 of a group's largest value for each
term, relative to the largest result (0.02 measured)."""

LAYERS = {  # kind → (relative error, cosine) of a layer's output, the artifact against the captured program
    "f32": (1e-3, 0.999999),
    "f16": (3e-2, 0.999),
    "bf16": (2e-1, 0.99),
    "int8": (4e-1, 0.97),
}
"""Running freely, errors of all layers before add up and are amplified, hence far above a kernel's. What gives the
coarsest values decides: 8-bit activations, else the caches' dtype."""

AUTHORS = (1e-3, 0.99999)
"""The captured program on the reference backend against the authors' module in float32 torch."""

PERPLEXITY = {"f32": 1e-3, "f16": 2e-2, "bf16": 1e-1, "int8": 1e-1}
"""Relative difference of perplexity between artifact and reference."""

CONVERTED = {"bf16": 2.0**-8, "q8_0": 0.01, "q4_1": 0.15}
"""Relative RMS error that storing a tensor in another format may add (against the file's, with ``--against``)."""


def kind_of(options: Mapping) -> str:
    """The coarsest values in an artifact compiled with ``options``."""
    if options["activations"] == "int8":
        return "int8"
    return options["kv"] if options["kv"] != "auto" else "f32"


def reduction(row: OpRow, spec: OpSpec, sizes: Mapping[str, int], context: int) -> int:
    """Terms that one element of the results sums up: the product of what operands have and results lack. By the
    factor rule where that says it, else by counting elements. ``context`` rows a state gives at most."""
    size = lambda dims: prod(sizes[d] if isinstance(d, str) else d for d in dims)  # noqa: E731
    tensors = [o for o in spec.operands if not isinstance(o, StateSpec) and o is not None]
    most = max((size(t.shape) for t in tensors), default=1)
    made = min((size(r.shape) for r in spec.results), default=1)
    length = max(1, -(-most // max(made, 1)))
    if row.factors != "..." or row.state is not None:
        length = max(length, *(t.shape[-1] if t.shape and isinstance(t.shape[-1], int) else 1 for t in tensors))
    return length * (context if row.state is not None else 1)


def excess(row: OpRow, attrs: Mapping, operands: Sequence, got: np.ndarray, index: int, wanted: np.ndarray,
           length: int) -> tuple[float, float]:
    """(largest error, what is allowed there), both relative to the largest wanted value; the first is above the second
    only when some element is further off than allowed. ``operands`` are those that gave ``wanted``, result
    ``index``; a state among them as it was before."""
    if wanted.size == 0:
        return 0.0, 0.0
    if wanted.dtype.kind != "f":
        off = np.abs(got.astype(np.int64) - wanted.astype(np.int64))
        most = 0 if wanted.dtype.kind == "b" else 1
        wrong = off.max() > most or (off > 0).sum() > max(1, INTEGERS_OFF * off.size)
        return (float(max(off.max(), 2 if wrong else 0)), 1.0)
    unit = UNIT["f16" if wanted.dtype == np.float16 else "f64" if wanted.dtype == np.float64 else "f32"]
    with np.errstate(all="ignore"):
        error = _distance(got, wanted)
        size = _size(wanted, row.elementwise)
        allowed = BASE * unit * size + length * SMALLEST
        if not (error <= allowed).all():
            allowed = allowed + SPREAD * np.sqrt(length) * _noise(row, attrs, operands, index, wanted, unit)
        if (error <= allowed).all():
            worst = np.argmax(np.where(allowed > 0, error / np.maximum(allowed, SMALLEST), 0))
        else:
            worst = np.argmax(np.where(error > allowed, error / np.maximum(allowed, SMALLEST), 0))
        largest = max(float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0)), SMALLEST)
        return float(error.flat[worst]) / largest, float(np.broadcast_to(allowed, error.shape).flat[worst]) / largest


def _distance(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """|got - wanted|; 0 where both are the same infinity or both no number, infinite where only one is."""
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    difference = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
    return np.where(same, 0.0, np.where(np.isfinite(difference), difference, np.inf))


def _size(values: np.ndarray, each: bool) -> np.ndarray:
    size = np.where(np.isfinite(values), np.abs(values.astype(np.float64)), 0.0)
    return size if each or size.ndim == 0 else size.max(-1, keepdims=True)


def _noise(row: OpRow, attrs, operands, index: int, wanted: np.ndarray, unit: float) -> np.ndarray:
    """How far the meaning moves when float operands move by a unit roundoff each, at random."""
    rng = np.random.default_rng(1)
    moved = np.zeros(wanted.shape)
    for _ in range(DRAWS):
        shaken = [_shaken(o, rng) if isinstance(o, np.ndarray) else copy.deepcopy(o) for o in operands]
        result = np.asarray(row.meaning(attrs, *shaken)[index])
        moved = np.maximum(moved, np.where(np.isfinite(result), _distance(result, wanted), 0.0))
    return _size(moved, row.elementwise)


def _shaken(values: np.ndarray, rng) -> np.ndarray:
    if values.dtype not in (np.float32, np.float64, np.float16):
        return values
    unit = np.finfo(values.dtype).eps
    return (values * (1 + unit * rng.choice([-1.0, 1.0], values.shape))).astype(values.dtype)


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference over the largest wanted value; infinite when ``got`` has other NaN or infinities."""
    if wanted.size == 0:
        return 0.0
    worst = float(_distance(got, wanted).max())
    largest = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0))
    return worst / largest if largest else (0.0 if worst == 0 else np.inf)


def cosine(got: np.ndarray, wanted: np.ndarray) -> float:
    a, b = got.astype(np.float64).ravel(), wanted.astype(np.float64).ravel()
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norm if norm and np.isfinite(norm) else float(np.array_equal(a, b))
