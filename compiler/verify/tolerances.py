"""How far apart two results may be, and why. Everything here is relative to what is compared.

One kernel against its meaning, on the same operands. The meaning is evaluated in float64 and rounded once, so the
difference is the kernel's. It may have

    BASE · u · |wanted|  +  SPREAD · sqrt(L) · noise

u is the result dtype's unit roundoff and |wanted| the element's size (the row's largest for operators that reduce: a
sum's rounding is as large as its terms, not as its result). ``noise`` is how far the meaning itself moves when every
operand moves by one unit roundoff: what no kernel can be blamed for. It is measured, for any operator, and only when
the first term doesn't suffice by far. L is the length of the reduction: a sum of L terms rounds L times, each time as
much as its partial sum, and such errors add up like a random walk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from adaptc.ops.axes import axis_map
from adaptc.ops.elementwise import evaluate_body
from adaptc.ops.mixing import FixedState, RowState
from adaptc.ops.table import OpRow
from adaptc.protocol import OpSpec, StateSpec

UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
BASE = 32.0
SPREAD = 8.0
DRAWS = 6
CODES_OFF = 1e-3
"""Share of 8-bit codes that may be off by one: those of values that lie between two. Other integers are exact, but for
choices of rows between nearly equal scores."""

SMALLEST = 2.0**-149
"""One step of subnormal float32 numbers, which are as wrong as they are small: allowed for each term, times the
largest operand, by which such a term may yet be multiplied."""

MEANING = 1e-6
"""An operator of the laid-out program against the captured values that it stands for, relative to the largest: a few
float32 roundings of the unfused form, each 6e-8 (at most 1.2e-7 measured on the tests' models)."""

LAYERS = {  # kind → (relative error, cosine) of a layer's output, the artifact against the captured program
    "f32": (1e-3, 0.999999),
    "f16": (3e-2, 0.999),
    "bf16": (2e-1, 0.99),
    "int8": (4e-1, 0.97),
}
"""Running freely, errors of all layers before add up and are amplified, hence far above a kernel's. What gives the
coarsest values decides: 8-bit activations, else the caches' dtype."""

SPARE = 8
"""Where routers choose, coarser values than float32 let a token near a tie go to another expert, whose output is
another altogether. So error by depth isn't judged by the one in this many tokens that are furthest off."""

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


class Excess(NamedTuple):
    """The largest error and what is allowed there, both relative to the largest wanted value."""

    error: float
    bound: float

    @property
    def ratio(self) -> float:
        """Above 1: too much."""
        return self.error / self.bound if self.bound else (np.inf if self.error else 0.0)


def reduction(row: OpRow, spec: OpSpec, sizes: Mapping[str, int], context: int) -> int:
    """Terms that one element of the results sums up: the product of an operand's axes that the results lack, but the
    one that a gather picks from, or what the row says itself (``reads``). Of an operator with a state, times the
    ``context`` rows that it gives at most."""
    attrs = row.complete(spec.attrs)
    parts = row.reads(attrs, spec.operands)
    longest = max([1, *(part.terms for part in parts.values())])
    for result in range(len(spec.results)):
        for index, kept in enumerate(axis_map(row, attrs, spec.operands, spec.results, result)):
            operand = spec.operands[index]
            if isinstance(operand, StateSpec) or operand is None or index in parts:
                continue
            gone = [d for i, (d, axis) in enumerate(zip(operand.shape, kept))
                    if axis is None and not (row.gathers and (row.gathers[0], 0) == (index, i))]
            longest = max(longest, prod(sizes[d] if isinstance(d, str) else d for d in gone))
    return longest * (context if row.state is not None else 1)


def excess(row: OpRow, attrs: Mapping, operands: Sequence, got: np.ndarray, index: int, wanted: np.ndarray,
           length: int) -> Excess:
    """How far ``got`` is from ``wanted``, result ``index``, where it is furthest from what is allowed. ``operands``
    are those that gave ``wanted``; a state among them as it was before."""
    if wanted.size == 0:
        return Excess(0.0, 0.0)
    if wanted.dtype.kind != "f":
        if row.state is not None:
            sure = _sure(row, attrs, operands, index, wanted)
            got, wanted = got[sure], wanted[sure]
        off = np.abs(got.astype(np.int64) - wanted.astype(np.int64))
        codes = wanted.dtype.itemsize == 1 and wanted.dtype.kind != "b"
        wrong = off.max(initial=0) > codes or (off > 0).sum() > codes * max(1, CODES_OFF * off.size)
        return Excess(float(max(off.max(initial=0), 2 if wrong else 0)), 1.0)
    unit = UNIT["f16" if wanted.dtype == np.float16 else "f64" if wanted.dtype == np.float64 else "f32"]
    with np.errstate(all="ignore"):
        error = _distance(got, wanted)
        multiplied = max([1.0, *(_largest(o) for o in operands if isinstance(o, np.ndarray) and o.dtype.kind == "f")])
        allowed = BASE * unit * _size(wanted, row.elementwise) + length * SMALLEST * multiplied
        if not (error <= allowed / 2).all():
            allowed = allowed + SPREAD * np.sqrt(length) * _noise(row, attrs, operands, index, wanted)
        ratio = error / np.maximum(allowed, SMALLEST)
        worst = np.argmax(np.where(error > allowed, np.maximum(ratio, 1), ratio))
        largest = max(_largest(wanted), SMALLEST)
        return Excess(float(error.flat[worst]) / largest,
                      float(np.broadcast_to(allowed, error.shape).flat[worst]) / largest)


def _largest(wanted: np.ndarray) -> float:
    return float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0))


def _distance(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """|got - wanted|; 0 where both are the same infinity or both no number, infinite where only one is."""
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        difference = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
    return np.where(same, 0.0, np.where(np.isfinite(difference), difference, np.inf))


def _size(values: np.ndarray, each: bool) -> np.ndarray:
    size = np.where(np.isfinite(values), np.abs(values.astype(np.float64)), 0.0)
    return size if each or size.ndim == 0 else size.max(-1, keepdims=True)


def _noise(row: OpRow, attrs, operands, index: int, wanted: np.ndarray) -> np.ndarray:
    """How far the meaning moves when float operands, and a group's values, move by a unit roundoff each, at random."""
    rng = np.random.default_rng(1)
    moved = np.zeros(wanted.shape)
    for _ in range(DRAWS):
        shaken = [_SHAKEN.get(type(o), _shaken)(o, rng) for o in operands]
        if "body" in row.attrs:
            results = evaluate_body(attrs, shaken, lambda value: _shaken(np.asarray(value), rng))
        else:
            results = row.meaning(attrs, *shaken)
        result = np.asarray(results[index])
        moved = np.maximum(moved, np.where(np.isfinite(result), _distance(result, wanted), 0.0))
    return _size(moved, row.elementwise)


def _sure(row: OpRow, attrs, operands, index: int, wanted: np.ndarray) -> np.ndarray:
    """Tokens whose integers, where these follow from arithmetic, stay when float operands move by a unit roundoff each:
    no nearly equal scores decide which rows of a state are chosen."""
    rng = np.random.default_rng(1)
    sure = np.ones(len(wanted), bool)
    for _ in range(DRAWS):
        shaken = [_SHAKEN.get(type(o), _shaken)(o, rng) for o in operands]
        moved = np.asarray(row.meaning(attrs, *shaken)[index]) != wanted
        sure &= ~moved.reshape(len(wanted), -1).any(1)
    return sure


def _shaken(values: np.ndarray | None, rng) -> np.ndarray | None:
    if values is None or values.dtype not in (np.float32, np.float64, np.float16):
        return values
    unit = np.finfo(values.dtype).eps
    return (values * (1 + unit * rng.choice([-1.0, 1.0], values.shape))).astype(values.dtype)


class _ShakenRows(RowState):
    """A state whose rows move after they were rounded to what it keeps: rounding hides what moved before."""

    def __init__(self, state: RowState, rng: np.random.Generator):
        super().__init__(state.spec)
        self.rng = rng
        self.rows = {request: [{p: _shaken(row, rng) for p, row in rows.items()} for rows in parts]
                     for request, parts in state.rows.items()}

    def put(self, request: int, number: int, parts) -> None:
        super().put(request, number, parts)
        for rows in self.rows[request]:
            rows[number] = _shaken(rows[number], self.rng)


class _ShakenValue(FixedState):
    """A state whose value before the step moves; what moves it within the step is the operands."""

    def __init__(self, state: FixedState, rng: np.random.Generator):
        super().__init__(state.spec)
        self.values = {request: {length: [_shaken(part, rng) for part in parts] for length, parts in values.items()}
                       for request, values in state.values.items()}


_SHAKEN = {RowState: _ShakenRows, FixedState: _ShakenValue}


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference over the largest wanted value; infinite when ``got`` has other NaN or infinities."""
    if wanted.size == 0:
        return 0.0
    worst = float(_distance(got, wanted).max())
    largest = _largest(wanted)
    return worst / largest if largest else (0.0 if worst == 0 else np.inf)


def cosine(got: np.ndarray, wanted: np.ndarray) -> float:
    a, b = got.astype(np.float64).ravel(), wanted.astype(np.float64).ravel()
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norm if norm and np.isfinite(norm) else float(np.array_equal(a, b))
