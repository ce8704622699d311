"""Operands for an operator called alone: made up, over numbers of rows and ranges of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from adaptc.ops.axes import axis_map
from adaptc.ops.dense import split_activation
from adaptc.ops.elementwise import NUMPY
from adaptc.ops.table import OpRow, row
from adaptc.protocol import OpSpec, StateSpec, TensorSpec
from adaptc.verify import tolerances

ROWS = (1, 2, 3, 5, 17)
"""Numbers of tokens, requests and sampled rows, beside the plan's maximum: remainders of every tile of kernels."""
LONG = 600
"""Tokens before a step of one case of a stateful operator: kernels may treat long contexts in pieces."""
LARGE_FLOPS = 2e9
"""Above this, a case takes the oracle more than a second; the largest number of rows is then left to fewer ranges."""


def _normal(rng, shape):
    return rng.standard_normal(shape)


def _outliers(rng, shape):
    """One value in fifty is 10⁴ times as large, as in real models' residual streams."""
    return rng.standard_normal(shape) * np.where(rng.random(shape) < 0.02, 1e4, 1.0)


def _equal(rng, shape):
    return np.broadcast_to(rng.standard_normal((*shape[:-1], 1)) if shape else 1.0, shape)


def _infinite(rng, shape):
    """As masks are: one value in five -∞, one in fifty +∞, and the first row nothing but -∞."""
    draw = rng.random(shape)
    values = np.where(draw < 0.2, -np.inf, np.where(draw > 0.98, np.inf, rng.standard_normal(shape)))
    if len(shape) > 1:
        values[0] = -np.inf
    return values


RANGES: dict[str, Callable] = {
    "normal": _normal,
    "outliers": _outliers,
    "equal": _equal,
    "zero": lambda rng, shape: np.zeros(shape),
    "subnormal": lambda rng, shape: rng.standard_normal(shape) * 1e-40,
    "small": lambda rng, shape: rng.standard_normal(shape) * 1e-12,
    "infinite": _infinite,
}
"""Ranges of float operands. A row may have more: ``OpRow.ranges``."""


@dataclass(frozen=True)
class Case:
    """One call: sizes of the symbols, and values of the operands; None for what isn't made up (weights, states). Of a
    stateful operator one request has at least ``past`` tokens behind it, as far as the context allows."""

    sizes: Mapping[str, int]
    operands: list
    what: str
    past: int = 0


@dataclass(frozen=True)
class Maker:
    """Makes up operands of one operator. ``most``: the plan's largest sizes by symbol; ``context``: tokens that a
    request may have."""

    spec: OpSpec
    most: Mapping[str, int]
    context: int
    rng: np.random.Generator

    @property
    def row(self) -> OpRow:
        return row(self.spec.op)

    @property
    def ranges(self) -> Mapping[str, Callable]:
        """Ranges of every operator, and those of this one's row."""
        return RANGES | self.row.ranges

    def cases(self) -> Iterator[Case]:
        """Every number of rows with ordinary values, then every range with few rows and, unless that takes the oracle
        long, with many."""
        tensors = [t for t in (*self.spec.operands, *self.spec.results) if isinstance(t, TensorSpec)]
        dynamic = any(isinstance(d, str) for t in tensors for d in t.shape)
        largest = max(self.most.values())
        for count in dict.fromkeys((*ROWS, largest)) if dynamic else (1,):
            yield self.case(count, "normal")
        if self.row.state is not None:
            yield replace(self.case(3, "normal"), past=LONG)
        counts = (3, largest) if dynamic and self.flops() <= LARGE_FLOPS else (3,)
        for name in self.ranges:
            if name != "normal" and (name != "infinite" or self.infinite()):
                yield from (self.case(count, name) for count in counts)

    def infinite(self) -> bool:
        """Whether the operator says what infinities give: codes of infinite values, and scores of infinite rows of a
        cache, are nothing."""
        return self.row.state is None and not any(r.dtype in ("i8", "u8") for r in self.spec.results) \
            and not self.row.quantized(self.spec.operands)

    def flops(self) -> float:
        """Of the largest case."""
        form = self.row.cost(self.spec.attrs, self.spec.operands, self.spec.results)
        return sum(factor * prod(float(self.most.get(s, 64)) for s in symbols.split("*") if s)
                   for symbols, factor in form.items())

    def case(self, count: int, values: str) -> Case:
        sizes = {name: min(count, most) for name, most in self.most.items()}
        what = f"{', '.join(f'{k}={v}' for k, v in sizes.items())}, {values} values"
        return Case(sizes, self.operands(sizes, values), what)

    def operands(self, sizes: Mapping[str, int], values: str = "normal") -> list:
        made = [self._operand(i, sizes, values) for i in range(len(self.spec.operands))]
        return self._quantized(made) if self.row.quantized(self.spec.operands) else made

    def _operand(self, index: int, sizes: Mapping[str, int], values: str):
        kind = self.spec.operands[index]
        if isinstance(kind, StateSpec) or kind is None or kind.format is not None:
            return None
        shape = tuple(sizes[d] if isinstance(d, str) else d for d in kind.shape)
        if kind.dtype in tolerances.UNIT:
            drawn = np.ascontiguousarray(self.ranges[values](self.rng, shape))
            return self._legal(index, drawn).astype(NUMPY[kind.dtype])
        low, high = {"i1": (0, 2), "i8": (-127, 128), "u8": (0, 128)}.get(kind.dtype, (0, self._limit(index, sizes)))
        return self.rng.integers(low, high, shape).astype(NUMPY[kind.dtype])

    def _legal(self, index: int, drawn: np.ndarray) -> np.ndarray:
        """Values that operand ``index`` can have, from those that were drawn (``OpRow.domain``)."""
        names = [name.rstrip("?") for name in self.row.operands]
        domain = self.row.domain.get(names[index]) if index < len(names) else None
        return domain(drawn) if domain else drawn

    def _limit(self, index: int, sizes: Mapping[str, int]) -> int:
        """Integers below this are valid in operand ``index``: of an operator that picks by them, the extent of what
        they pick from; elsewhere any number is."""
        spec, row = self.spec, self.row
        size = lambda d: sizes[d] if isinstance(d, str) else d  # noqa: E731
        if row.gathers and row.gathers[1] == index:
            return size(spec.operands[row.gathers[0]].shape[0])
        if row.elementwise or row.views or row.state is not None:
            return self.context
        axes = axis_map(row, row.complete(spec.attrs), spec.operands, spec.results)
        return min((size(d) for operand, kept in zip(spec.operands, axes) for d, axis in zip(operand.shape, kept)
                    if axis is None), default=self.context)

    def _quantized(self, operands: list) -> list:
        """``operands`` with the parts of a quantised activation made by ``quantize`` itself: codes, scales and sums
        that belong together, of the scales' own range."""
        parts = len(split_activation(self.spec.operands)[0])
        codes, scales = operands[:2]
        group = codes.shape[1] // scales.shape[1]
        with np.errstate(all="ignore"):
            floats = (codes.astype(np.float64) * np.repeat(scales.astype(np.float64), group, 1)).astype(np.float32)
        return [*row("quantize").meaning({"group": group}, floats), *operands[parts:]]
