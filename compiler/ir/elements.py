"""Where elements come from, through operators that only move them.

Authors write one thing with slices, concatenations, reshapes and transposes in many orders. What such moves do isn't
matched step by step: ``Numbers`` carries the number of each element through them, and a pattern is recognised by
whose elements stand where.
"""

from __future__ import annotations

from typing import Iterator

import numpy as np
from torch_mlir import ir

from adaptc.ir.rewrite import Node, definer, find, spec
from adaptc.ops.table import row

MOVES = ("reshape", "transpose", "broadcast", "slice", "concat", "neg")
"""Operators whose results' elements are their operands', moved or negated."""

TOKENS = 3
"""Tokens that elements are numbered for: more than one, so that a move that mixes tokens shows."""

_APART = 40
"""Bits of an element's number within its tensor; the tensor's own number stands above them."""


def moves(value: ir.Value) -> Iterator[Node]:
    """The operations that define ``value``, up to the first that isn't a move of one operand, included."""
    while (node := definer(value)) is not None:
        yield node
        if node.name not in MOVES or node.name == "concat":
            return
        value = node.operands[0]


class Numbers:
    """Numbers elements: those of one tensor are known from those of another."""

    def __init__(self) -> None:
        self.roots: dict[ir.Value, int] = {}
        """Tensors before moves, by the order in which they were met."""

    def of(self, value: ir.Value) -> np.ndarray:
        """For each element of ``value`` (with ``TOKENS`` tokens) the number of the one that it is, before moves;
        negative when negated."""
        node = find(value, *MOVES)
        if node is not None:
            return row(node.name).meaning(node.attrs, *map(self.of, node.operands))[0]
        shape = [TOKENS if isinstance(d, str) else d for d in spec(value).shape]
        start = 1 + (self.roots.setdefault(value, len(self.roots)) << _APART)
        return start + np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)

    def columns(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """For numbers of elements of each token, [T, ...]: which of the ``roots`` each is of, and its place in a
        token's elements of that root. None where an element is negated, or isn't its own token's, or where tokens
        differ."""
        if (numbers < 1).any():
            return None
        which, places = (numbers - 1) >> _APART, (numbers - 1) & ((1 << _APART) - 1)
        sizes = np.array([_size(root) for root in self.roots])[which]
        tokens = np.arange(TOKENS).reshape(-1, *(1,) * (numbers.ndim - 1))
        columns = places - tokens * sizes
        own = (columns >= 0) & (columns < sizes)
        same = (which == which[:1]) & (columns == columns[:1])
        return (which[0], columns[0]) if (own & same).all() else None


def _size(root: ir.Value) -> int:
    """Elements of a token, of a tensor whose outermost axis, but for some of size 1, is the tokens'; else 0."""
    wide = [d for d in spec(root).shape if d != 1]
    tokens_first = wide and isinstance(wide[0], str) and all(isinstance(d, int) for d in wide[1:])
    return int(np.prod(wide[1:], dtype=np.int64)) if tokens_first else 0
