"""Which result axis an operand's axis becomes: what token locality, gather sinking and sharding ask of an operator.

A row answers by its factor rule ("tk,nk->tn": axis 0 stays axis 0, axis 1 is contracted), or, where the answer
depends on attributes, by its ``axes`` column. Both mean: slice i of the result along an axis depends, of operands that
have the axis, on slice i alone (an operator that mixes slices, as a cumulative sum does, keeps no axis along which it
runs).
"""

from __future__ import annotations

import math
from typing import Any, Mapping, Sequence

from adaptc.ops.table import EXTRAS
from adaptc.protocol import StateSpec, TensorSpec

AxisMap = tuple[tuple[int | None, ...], ...]
"""For each operand, for each of its axes: the axis of the result that it becomes, or None when it is gone."""


def axis_map(row, attrs: Mapping[str, Any], operands: Sequence[TensorSpec | StateSpec],
             results: Sequence[TensorSpec], result: int = 0) -> AxisMap:
    """``row``'s axes, for its result number ``result``. A state has no axes."""
    if row.axes is not None:
        return row.axes(attrs, operands, results)
    left, right = (side.split(",") for side in row.factors.split("->")) if "->" in row.factors else ([], [])
    if row.quantized(operands):
        left[1:1] = [left[0][:1]] * 2  # scales and sums share the codes' leading axis
    rank = len(results[result].shape)
    if not left:
        return tuple(_aligned(len(spec.shape), rank) for spec in operands)
    out = _letters(right[min(result, len(right) - 1)].rstrip("*"), rank)
    places = row.places(attrs, len(operands)) if EXTRAS in row.attrs else range(len(operands))
    return tuple(
        () if isinstance(spec, StateSpec) else _by_factors(_rule(left, i - _before(row.state, i)), len(spec.shape), out)
        for i, spec in zip(places, operands)
    )


def _before(state: int | None, index: int) -> int:
    """1 when the operand that has no term stands before operand ``index``."""
    return int(state is not None and state < index)


def _rule(left: Sequence[str], index: int) -> str:
    """An operand's factors; operands beyond the rule have none, except that a last rule with * repeats."""
    if index < len(left):
        return left[index].rstrip("*")
    return left[-1].rstrip("*") if left[-1].endswith("*") else ""


def _letters(rule: str, rank: int) -> list[str]:
    """One name an axis: "...d" of rank 3 is two numbered leading axes and d."""
    head, dots, tail = rule.partition("...")
    named = len(head) + len(tail)
    return [*head, *(f"{i}" for i in range(rank - named)), *tail] if dots else list(rule)


def _by_factors(rule: str, rank: int, out: Sequence[str]) -> tuple[int | None, ...]:
    letters = _letters(rule, rank)
    letters += [""] * (rank - len(letters))
    return tuple(out.index(letter) if letter in out else None for letter in letters[:rank])


def _aligned(rank: int, wide: int) -> tuple[int, ...]:
    """Numpy's alignment of a broadcast operand."""
    return tuple(range(wide - rank, wide))


# ---- the ``axes`` column of operators whose structure is in their attributes


def reshaped(attrs, operands, results) -> AxisMap:
    """An axis is kept when as many elements lie before it, and after it, on both sides."""
    there = _places(results[0].shape)
    return (tuple(there.get(place) if dim != 1 else None for place, dim in _places(operands[0].shape, True)),)


def _places(shape, as_list: bool = False):
    """Each axis by (size, elements before, elements after), symbols multiplied as text."""
    places = [((dim, _count(shape[:i]), _count(shape[i + 1 :])), i) for i, dim in enumerate(shape)]
    return [(place, place[0]) for place, _ in places] if as_list else {place: i for place, i in places if place[0] != 1}


def _count(shape) -> tuple:
    return math.prod(d for d in shape if isinstance(d, int)), tuple(sorted(d for d in shape if isinstance(d, str)))


def transposed(attrs, operands, results) -> AxisMap:
    perm = tuple(attrs["perm"])
    return (tuple(perm.index(axis) for axis in range(len(perm))),)


def broadcast(attrs, operands, results) -> AxisMap:
    """``like`` only lends its length, along the dimension of its name."""
    shape = tuple(attrs["shape"])
    like = tuple(tuple(shape.index(d) if d in shape else None for d in spec.shape) for spec in operands[1:])
    return (tuple(attrs["dims"]), *like)


def resized(attrs, operands, results) -> AxisMap:
    """Axes whose length stays (slice, pad); a changed one isn't kept."""
    return tuple(
        tuple(i if d == results[0].shape[i] else None for i, d in enumerate(spec.shape)) for spec in operands
    )


def joined(attrs, operands, results) -> AxisMap:
    return tuple(tuple(None if i == attrs["axis"] else i for i in range(len(spec.shape))) for spec in operands)


def reduced(attrs, operands, results) -> AxisMap:
    axes, rank = set(attrs["axes"]), len(operands[0].shape)
    kept = [i for i in range(rank) if attrs["keepdims"] or i not in axes]
    return (tuple(None if i in axes else kept.index(i) for i in range(rank)),)


def contracted(attrs, operands, results) -> AxisMap:
    batch = tuple(attrs["batch"])
    free, place = len(batch), []
    for spec, gone in zip(operands, (attrs["contract_x"], attrs["contract_y"])):
        mapped: list[int | None] = []
        for axis in range(len(spec.shape)):
            kept = axis not in gone
            mapped.append(batch.index(axis) if axis in batch else free if kept else None)
            free += axis not in batch and kept
        place.append(tuple(mapped))
    return tuple(place)
