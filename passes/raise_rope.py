"""Recognises rotary position embedding, in whatever way it is written.

Authors write a rotation with slices, concatenations, negations, reshapes and transposes around a few products. What
such moves do isn't matched step by step: a rotation is recognised by where elements come from (``ir.elements``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Iterator

import numpy as np
from torch_mlir import ir

from adaptc.ir.elements import MOVES, TOKENS, Numbers, moves
from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, find, rewrite, spec


@dataclass(frozen=True)
class RaiseRope:
    """The rotation of pairs (a, b) → (a·cos - b·sin, b·cos + a·sin) → rope. Pairs are the columns of two halves, or
    neighbours. Written as x·cos + turn(x)·sin, where turn(x) has -b in place of a, and a in place of b; or as
    concat(a·cos - b·sin, b·cos + a·sin), with a table entry for each pair. concat(rope(a), b) is then a rope of the
    first columns of concat(a, b), if that exists.

    Declined: other rotations, tables that differ between heads, tensors without tokens.
    """

    name: ClassVar[str] = "raise_rope"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        rewrite(program, {"add": (_by_column,), "concat": (_by_pair, _partial)})


def _by_column(b, node: Node):
    """x·cos + turn(x)·sin"""
    view = _View.of(node.results[0])
    plain, turned = (find(v, "mul") for v in node.operands)
    if view is None or view.width % 2 or plain is None or turned is None:
        return None
    numbers = Numbers()
    products = [(p, t) for pair in ((plain, turned), (turned, plain)) for p in pair[0].swaps() for t in pair[1].swaps()]
    for (x, cos), (other, sin) in products:
        if not spec(x) == spec(other) == spec(node.results[0]) or not find(other, *MOVES):
            continue
        columns, angles = view.rows(numbers.of(x)), view.rows(numbers.of(other))
        for interleaved in (False, True):
            if not np.array_equal(angles, _turn(columns, interleaved)):
                continue
            tables = [view.table(numbers, t, interleaved) for t in (cos, sin)]
            if all(tables) and tables[0].width == tables[1].width:
                return view.back(b, b.rope(view.there(b, x), *(t.build(b) for t in tables), interleaved=interleaved))
    return None


def _by_pair(b, node: Node):
    """concat(a·cos - b·sin, b·cos + a·sin)"""
    axis = node.attrs["axis"]
    view = _View.of(node.results[0], pairs=spec(node.operands[0]).shape[-1] == 1)
    if view is None or len(node.operands) != 2 or axis != len(view.shape) - 1:
        return None
    numbers, fits = Numbers(), []
    for first, second, cos, sin in _rotations(*node.operands):
        half = _View.of(first, view.pairs)
        if half is not None and spec(first) == spec(second) == spec(node.operands[0]):
            tables = [half.table(numbers, t) for t in (cos, sin)]
            source = _source(numbers, first, view.rows(np.concatenate([numbers.of(first), numbers.of(second)], axis)))
            fits += [(source, first, second, tables)] if all(tables) else []
    if not fits:
        return None
    # of one head, tables and tensor can be taken for each other: the tensor is what exists as a whole
    source, first, second, tables = next((fit for fit in fits if fit[0]), fits[0])
    x = source.build(b) if source else view.there(b, b.concat(first, second, axis=axis))
    return view.back(b, b.rope(x, *(t.build(b) for t in tables), interleaved=view.pairs))


def _rotations(left: ir.Value, right: ir.Value) -> Iterator[tuple[ir.Value, ir.Value, ir.Value, ir.Value]]:
    """(a, b, cos, sin) such that ``left`` is a·cos - b·sin and ``right`` b·cos + a·sin."""
    difference, total = find(left, "sub"), find(right, "add")
    parts = [find(v, "mul") for one in (difference, total) if one for v in one.operands]
    if len(parts) != 4 or None in parts:
        return
    wanted = {frozenset(part.operands) for part in parts[2:]}
    for a, cos in parts[0].swaps():
        for second, sin in parts[1].swaps():
            if {frozenset((second, cos)), frozenset((a, sin))} == wanted and find(a, *MOVES) and find(second, *MOVES):
                yield a, second, cos, sin


def _partial(b, node: Node):
    """concat(rope(x₁), x₂) → rope"""
    view = _View.of(node.results[0])
    if view is None or len(node.operands) != 2 or node.attrs["axis"] != len(view.shape) - 1:
        return None
    part, rest = (_View.of(v) for v in node.operands)
    rope = next((n for n in moves(node.operands[0]) if n.name == "rope"), None)
    if rope is None or rope.attrs["turned"] or part is None or rest is None or not find(node.operands[1], *MOVES):
        return None
    whole, numbers = _View.of(rope.results[0]), Numbers()
    if not np.array_equal(part.rows(numbers.of(node.operands[0])), whole.rows(numbers.of(rope.results[0]))):
        return None
    wanted = [whole.rows(numbers.of(rope.operands[0])), rest.rows(numbers.of(node.operands[1]))]
    source = _source(numbers, node.operands[1], np.concatenate(wanted, -1))
    if source is None:
        return None
    return view.back(b, b.rope(source.build(b), *rope.operands[1:], **{**rope.attrs, "turned": part.width}))


# ---- where elements come from


def _turn(columns: np.ndarray, interleaved: bool) -> np.ndarray:
    """What rope multiplies sin by, of the elements of rows."""
    if interleaved:
        return np.stack([-columns[..., 1::2], columns[..., ::2]], -1).reshape(columns.shape)
    half = columns.shape[-1] // 2
    return np.concatenate([-columns[..., half:], columns[..., :half]], -1)


def _source(numbers: Numbers, start: ir.Value, wanted: np.ndarray) -> _Source | None:
    """Where a tensor [T, H, D] of the elements ``wanted`` is, among those that moves have made ``start`` of."""
    for node in moves(start):
        for value in node.operands[:1] if node.name in MOVES else ():
            view = _View.of(value)
            if view and view.count == wanted[0].size and np.array_equal(
                    view.rows(numbers.of(value)).reshape(wanted.shape), wanted):
                return _Source(view, value, wanted.shape[-1])
    return None


@dataclass(frozen=True)
class _Source:
    """A value that is a tensor [T, H, ``width``] in the shape of ``view``."""

    view: _View
    value: ir.Value
    width: int

    def build(self, b) -> ir.Value:
        return self.view.there(b, self.value, self.width)


@dataclass(frozen=True)
class _View:
    """A tensor's shape as tokens, heads and columns: the last axis, or with ``pairs`` the last two, are the columns."""

    shape: tuple[int | str, ...]
    token: int
    pairs: bool

    @staticmethod
    def of(value: ir.Value, pairs: bool = False) -> _View | None:
        """None for a tensor without tokens or elements, with tokens on the columns' axes, or not of f32."""
        shape = getattr(spec(value), "shape", ())
        symbols = [i for i, d in enumerate(shape) if isinstance(d, str)]
        columns = 2 if pairs else 1
        if len(symbols) != 1 or symbols[0] >= len(shape) - columns or 0 in shape or spec(value).dtype != "f32":
            return None
        return _View(shape, symbols[0], pairs)

    @property
    def width(self) -> int:
        return int(np.prod(self.shape[-2:] if self.pairs else self.shape[-1:]))

    @property
    def count(self) -> int:
        """Elements of a token."""
        return int(np.prod([d for d in self.shape if isinstance(d, int)]))

    @property
    def plain(self) -> tuple[int | str, ...]:
        """The shape with its columns on one axis: transposes of it cancel against those of other views."""
        return (*self.shape[:-2], self.width) if self.pairs else self.shape

    @property
    def perm(self) -> tuple[int, ...]:
        """Tokens first."""
        return (self.token, *(i for i in range(len(self.plain)) if i != self.token))

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers of elements of this shape, [T, H, D]."""
        return np.moveaxis(numbers, self.token, 0).reshape(TOKENS, -1, self.width)

    def there(self, b, value: ir.Value, width: int = 0) -> ir.Value:
        """A value of this shape as [T, H, D]."""
        width = width or self.width
        value = _reshaped(b, value, self.plain)
        value = b.transpose(value, perm=self.perm) if self.token else value
        return _reshaped(b, value, (self.shape[self.token], self.count // width, width))

    def back(self, b, value: ir.Value) -> ir.Value:
        """[T, H, D] in this shape."""
        value = _reshaped(b, value, tuple(self.plain[p] for p in self.perm))
        value = b.transpose(value, perm=tuple(np.argsort(self.perm).tolist())) if self.token else value
        return _reshaped(b, value, self.shape)

    def table(self, numbers: Numbers, value: ir.Value, interleaved: bool | None = None) -> _Table | None:
        """A factor of a tensor of this shape as a table [T, D] that all heads share; None if it isn't one. Where both
        columns of every pair are known to have one entry, [T, D/2]."""
        tokens = self.shape[self.token]
        if tuple(d for d in spec(value).shape if d != 1) != (tokens, self.width):
            return None
        shape = [TOKENS if isinstance(d, str) else d for d in self.shape]
        try:
            rows = self.rows(np.broadcast_to(numbers.of(value), shape))
        except ValueError:
            return None
        if (rows != rows[:, :1]).any():
            return None
        whole, columns = _Table(value, 0, self.width), rows[:, 0]
        if interleaved is None:
            return whole
        one, other = (columns[:, ::2], columns[:, 1::2]) if interleaved else np.split(columns, 2, -1)
        return (_neighbours(numbers, value, one) if np.array_equal(one, other) else None) or whole


def _reshaped(b, value: ir.Value, shape: tuple[int | str, ...]) -> ir.Value:
    return value if spec(value).shape == shape else b.reshape(value, shape=shape)


@dataclass(frozen=True)
class _Table:
    """Columns from ``start`` of a tensor [T, W], apart from axes of size 1."""

    value: ir.Value
    start: int
    width: int

    def build(self, b) -> ir.Value:
        tokens, columns = (d for d in spec(self.value).shape if d != 1)
        flat = b.reshape(self.value, shape=(tokens, columns))
        end = self.start + self.width
        return flat if self.width == columns else b.slice(flat, starts=(0, self.start), limits=(-1, end), strides=(1, 1))


def _neighbours(numbers: Numbers, value: ir.Value, wanted: np.ndarray) -> _Table | None:
    """The elements ``wanted`` [T, n] as neighbouring columns of the tensor that moves have made ``value`` of."""
    *_, last = moves(value)
    root = last.operands[0] if last.name in MOVES else last.results[0]
    kind = tuple(d for d in spec(root).shape if d != 1)
    if len(kind) != 2 or not isinstance(kind[0], str) or not isinstance(kind[1], int):
        return None
    own, width = numbers.of(root).reshape(TOKENS, -1), wanted.shape[1]
    starts = (i for i in range(kind[1] - width + 1) if np.array_equal(own[:, i : i + width], wanted))
    start = next(starts, None)
    return None if start is None else _Table(root, start, width)
