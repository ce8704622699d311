"""Keeps one narrow row a token where keys and values of all heads are made of it (multi-head latent attention).

Authors expand a token's latent row to keys and values of every head, and keep those. But a key is linear in the row:
query·(A·row) = (Aᵀ·query)·row, so each query is taken to the row's columns instead, the rows are kept and attended to as
they are, and a head's result is taken through its values' matrix afterwards. Where elements of keys and values come from
is followed by ``ir.elements``, whatever slices, broadcasts and concatenations lie between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from torch_mlir import ir

from adaptc.ir import dialect
from adaptc.ir.elements import Numbers
from adaptc.ir.functions import retype
from adaptc.ir.module import STEP, Program, joined
from adaptc.ir.rewrite import Node, definer, find, nodes, remove_dead, spec
from adaptc.plan import kind_of

PART = "latent"
"""The one part of a state that keeps rows."""


@dataclass(frozen=True)
class AbsorbLatent:
    """attention(q, k, v [, rows]) → latent_attention over one row a token, where columns of every head's keys are rows of one
    matrix times a latent, or columns that all heads share; and those of its values are rows of a matrix times the same
    latent. The matrices are applied to queries and results (``head_linear``), as they are stored. The fact "restated"
    names the states that then keep other rows than the captured program says.

    Declined, with a sentence in the fact "format_notes" where values are made of a row half as wide as they or narrower:
    shared columns that differ by head or stand between others, keys or values that something else was done to (a norm, a
    bias), windows, soft caps and optional operands (sinks, …), fewer key heads than query heads, states that layers share. Declined
    without one: rows so wide that what is kept shrinks by less than the arithmetic grows.
    """

    name: ClassVar[str] = "absorb_latent"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        slots = _slots(program)
        shared = {name for name, count in Counter(n for names in slots.values() for n in names).items() if count > 1}
        found: list[tuple[Node, _Latent]] = []
        notes: list[str] = []
        for function in program.functions().values():
            for node in nodes(function):
                if node.name != "attention":
                    continue
                latent = _latent(node)
                if isinstance(latent, _Latent) and shared & set(slots[node.op]):
                    latent = "other operators have its state too"
                if isinstance(latent, str):
                    notes += [f"attention in module {path} keeps keys and values of all heads: {latent}."
                              for path in dict.fromkeys(map(kind_of, _paths(program, function, node)))]
                elif latent is not None:
                    found.append((node, latent))
        kept = program.states()
        with program.editing():
            types = {name: dialect.to_type(replace(kept[name].spec, parts=((PART, 1, latent.width),)))
                     for node, latent in found for name in slots[node.op]}
        retype(program, types)
        if types:
            program.set_fact("restated", tuple(sorted({*program.fact("restated", ()), *types})))
        with program.editing():
            for node, latent in found:
                node.replace(latent.build(node))
            for function in program.functions().values():
                remove_dead(function)
        known = program.fact("format_notes", ())
        if new := tuple(note for note in notes if note not in known):
            program.set_fact("format_notes", known + new)


def _slots(program: Program) -> dict[ir.Operation, list[str]]:
    """Each stateful operator with the states that it has: one, or one for each call of its body."""
    found: dict[ir.Operation, list[str]] = {}
    for name, function in program.functions().items():
        calls = [Node(call.operation) for call in program.calls(name)]
        for node in nodes(function):
            if node.row is None or node.row.state is None:
                continue
            state = node.operands[node.row.state]
            given = [state] if definer(state) else [call.operands[ir.BlockArgument(state).arg_number] for call in calls]
            found[node.op] = [definer(value).op.attributes["symbol"].value for value in given]
    return found


def _paths(program: Program, function, node: Node) -> Iterator[str]:
    """The module of each place where an operator stands."""
    name = function.name.value
    for around in [""] if name == STEP else [Node(call.operation).source for call in program.calls(name)]:
        yield joined(around, node.source)


# ---- what is recognised


@dataclass(frozen=True)
class _Heads:
    """Columns of every head that are a matrix's rows times a latent: of head h the ``rows`` rows from ``start`` +
    h·``step`` on."""

    weight: ir.Value
    start: int
    step: int
    rows: int

    def apply(self, b, x: ir.Value, transposed: bool) -> ir.Value:
        return b.head_linear(x, self.weight, start=self.start, step=self.step, rows=self.rows, transposed=transposed)


@dataclass(frozen=True)
class _Latent:
    """Attention whose keys' columns [``first``, ``first`` + keys.rows) are ``keys`` of the latent [T, L], the others
    the columns from ``column`` on of a token's elements of ``shared``, and whose values are ``values`` of the latent."""

    latent: ir.Value
    keys: _Heads
    values: _Heads
    first: int
    shared: ir.Value | None
    column: int
    rest: int

    @property
    def width(self) -> int:
        """Of the row that is kept."""
        return spec(self.latent).shape[1] + self.rest

    def build(self, node: Node) -> ir.Value:
        query, _, _, positions, requests, state, *rows = node.operands
        b, row = node.builder(), self.latent
        last, end = self.first + self.keys.rows, self.keys.rows + self.rest
        taken = self.keys.apply(b, _columns(b, query, self.first, last), transposed=True)
        if self.rest:
            tokens = spec(row).shape[0]
            flat = b.reshape(self.shared, shape=(tokens, _elements(self.shared)))
            row = b.concat(row, _columns(b, flat, self.column, self.column + self.rest), axis=1)
            other = _columns(b, query, 0, self.first) if self.first else _columns(b, query, last, end)
            taken = b.concat(taken, other, axis=2)
        result = b.latent_attention(taken, row, positions, requests, state, *rows, scaling=node.attrs["scaling"],
                                    extras=node.attrs.get("extras", ()),
                                    value_width=spec(self.latent).shape[1])
        return self.values.apply(b, result, transposed=False)


def _columns(b, value: ir.Value, low: int, high: int) -> ir.Value:
    """Columns [low, high) of the last axis; of a concatenation, the operand that is just those."""
    shape = spec(value).shape
    if (low, high) == (0, shape[-1]):
        return value
    source = find(value, "concat")
    if source is not None and source.attrs["axis"] == len(shape) - 1:
        start = 0
        for operand in source.operands:
            end = start + spec(operand).shape[-1]
            if start <= low and high <= end:
                return _columns(b, operand, low - start, high - start)
            start = end
    ends = tuple(-1 if isinstance(d, str) else d for d in shape[:-1])
    return b.slice(value, starts=(0,) * len(ends) + (low,), limits=(*ends, high), strides=(1,) * len(shape))


def _elements(value: ir.Value) -> int:
    return int(np.prod([d for d in spec(value).shape if isinstance(d, int)], dtype=np.int64))


def _latent(node: Node) -> _Latent | str | None:
    """What is attended to; a sentence's end that says why it can't be, of what looks as if; None for other attention."""
    query, key, value, *_ = node.operands
    numbers = Numbers()
    made = numbers.columns(numbers.of(value))
    linear = _linear(numbers, made[0].flat[0]) if made else None
    if linear is None or (made[0] != made[0].flat[0]).any():
        return None
    latent, (_, heads, value_width) = linear.operands[0], spec(value).shape
    width, key_width = spec(latent).shape[1], spec(key).shape[2]
    if 2 * width > heads * value_width:
        return None
    if len(linear.operands) > 2:
        return "a bias is added to what its values are made of"
    attrs = node.row.complete(node.attrs)
    more = [name for name in attrs["extras"] if name != "rows"]
    if more := [*more, *(name for name in ("window", "softcap") if attrs[name])]:
        return f"with {' and '.join(more)} it isn't done over latent rows"
    if spec(query).shape[1] != heads or spec(key).shape[1] != heads:
        return f"it has {heads} heads of values for {spec(query).shape[1]} of queries"
    keys = numbers.columns(numbers.of(key))
    own = [i for i in np.unique(keys[0]) if _makes(_linear(numbers, i), latent)] if keys else []
    if len(own) != 1:
        return "something else is done to its keys after they are made of the latent row"
    of_latent, columns = keys[0] == own[0], keys[1]
    places, others = np.flatnonzero(of_latent[0]), np.flatnonzero(~of_latent[0])
    if (of_latent != of_latent[0]).any() or not (_run(places) and _run(others)):
        return "the columns of its keys that are made of the latent row aren't the same in all heads, or not side by side"
    key_heads = _heads(_linear(numbers, own[0]).operands[1], columns[:, places])
    value_heads = _heads(linear.operands[1], made[1])
    if key_heads is None or value_heads is None:
        return "its heads aren't evenly apart in the matrix that makes them"
    sources, columns = keys[0][:, others], columns[:, others]
    if (sources != sources[:1, :1]).any() or (columns != columns[0]).any() or not _run(columns[0]):
        return "the other columns of its keys differ by head, or come from several places"
    if heads * (key_width + value_width) ** 2 <= (width + len(others)) * (2 * width + len(others)):
        return None  # what is kept would shrink by less than the arithmetic would grow
    shared, column = (list(numbers.roots)[sources[0, 0]], int(columns[0, 0])) if len(others) else (None, 0)
    return _Latent(latent, key_heads, value_heads, int(places[0]), shared, column, len(others))


def _linear(numbers: Numbers, root: int) -> Node | None:
    """The linear map of float values whose result is the root of that number."""
    node = find(list(numbers.roots)[root], "linear")
    return node if node is not None and spec(node.operands[0]).dtype == "f32" else None


def _makes(linear: Node | None, latent: ir.Value) -> bool:
    """Whether it maps the latent, and adds nothing."""
    return linear is not None and len(linear.operands) == 2 and linear.operands[0] == latent


def _run(numbers: np.ndarray) -> bool:
    """Whether numbers follow one another, each one more than the one before."""
    return bool((np.diff(numbers) == 1).all())


def _heads(weight: ir.Value, rows: np.ndarray) -> _Heads | None:
    """Rows [H, n] of a weight as a start, a step and a count, if they are that."""
    heads, count = rows.shape
    start, step = int(rows[0, 0]), int(rows[1, 0] - rows[0, 0]) if heads > 1 else count
    even = start + step * np.arange(heads)[:, None] + np.arange(count)
    return _Heads(weight, start, step, count) if step >= count and np.array_equal(rows, even) else None
