"""The operator table: an operator is declared once, here, and algorithms read its row and never its name.

Rows describe operators over ``TensorSpec`` (dtype, named shape, storage format), without MLIR, so that capture,
passes, planner, reference backend and code generators share one description. Rows come from the modules of this
package and from installed packages with an entry point in the group ``adaptc.operators`` (a list of rows).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Callable, Mapping, Sequence

from adaptc.errors import LegalityError
from adaptc.protocol import StateSpec, TensorSpec

REQUIRED = object()
"""Marks an attribute without a default."""

Spec = TensorSpec | StateSpec
Form = dict[str, int]
"""A quantity as a sum of products of symbols: {"": constant, "T": per token, "T*C": per token and context row}."""


@dataclass(frozen=True)
class OpRow:
    """One operator.

    operands   names in order; a trailing ``?`` marks an optional last operand, ``*`` any number of last operands
    attrs      attribute name → default value, or REQUIRED
    infer      (attrs, operand specs) → result specs; raises LegalityError naming what doesn't fit
    factors    einsum-like rule of which dimensions correspond, e.g. "tk,nk->tn"; "..." = elementwise over shared dims
    cost       (attrs, operand specs, result specs) → FLOPs as a Form; bytes follow from the specs
    meaning    (attrs, *arrays) → tuple of arrays, in plain float32 numpy: the oracle
    decompose  (build, attrs, *values) → tuple of values in lower operators; None for the floor
    state      index of the operand that is a state, if the operator is stateful
    views      the result holds the operand's elements, moved or renamed, and nothing else
    elementwise  every result element depends on the operand elements at the same index (after broadcasting)
    token_local  a token's result depends on no other token of the step (stateful operators meet theirs in the state)
    """

    name: str
    operands: tuple[str, ...]
    infer: Callable[[Mapping[str, Any], Sequence[Spec]], tuple[TensorSpec, ...]]
    meaning: Callable[..., tuple]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    factors: str = "..."
    cost: Callable[[Mapping[str, Any], Sequence[Spec], Sequence[TensorSpec]], Form] = lambda a, o, r: {}
    decompose: Callable[..., tuple] | None = None
    state: int | None = None
    views: bool = False
    elementwise: bool = False
    token_local: bool = True

    def complete(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """``attrs`` with defaults filled in; unknown and missing ones are errors."""
        unknown = sorted(set(attrs) - set(self.attrs))
        if unknown:
            raise LegalityError(f"{self.name}: unknown attribute {unknown[0]!r}; it has: {', '.join(self.attrs)}.")
        full = {**self.attrs, **attrs}
        missing = [name for name, value in full.items() if value is REQUIRED]
        if missing:
            raise LegalityError(f"{self.name}: attribute {missing[0]!r} is missing.")
        return full

    def check_arity(self, count: int) -> None:
        least = sum(not name.endswith(("?", "*")) for name in self.operands)
        most = 10**9 if any(name.endswith("*") for name in self.operands) else len(self.operands)
        if not least <= count <= most:
            raise LegalityError(f"{self.name}: got {count} operands, expected ({', '.join(self.operands)}).")

    def results(self, attrs: Mapping[str, Any], operands: Sequence[Spec]) -> tuple[TensorSpec, ...]:
        self.check_arity(len(operands))
        return self.infer(self.complete(attrs), operands)


@cache
def table() -> Mapping[str, OpRow]:
    """Every operator by name."""
    from adaptc.ops import dense, elementwise, mixing, shape

    rows = [*elementwise.ROWS, *shape.ROWS, *dense.ROWS, *mixing.ROWS]
    for point in sorted(entry_points(group="adaptc.operators"), key=lambda p: p.name):
        rows.extend(point.load())
    result: dict[str, OpRow] = {}
    for row in rows:
        if row.name in result:
            raise LegalityError(f"operator {row.name!r} is declared twice; operator names must be unique.")
        result[row.name] = row
    return result


def row(name: str) -> OpRow:
    try:
        return table()[name]
    except KeyError:
        raise LegalityError(f"unknown operator {name!r}; the table has: {', '.join(sorted(table()))}.") from None


# ---- shape algebra shared by rows


def size(shape: Sequence[int | str]) -> Form:
    """Elements of a shape as a Form, e.g. ("T", 9, 64) → {"T": 576}."""
    number, symbols = 1, []
    for dim in shape:
        if isinstance(dim, int):
            number *= dim
        else:
            symbols.append(dim)
    return {"*".join(sorted(symbols)): number}


def scaled(form: Form, factor: int) -> Form:
    return {key: value * factor for key, value in form.items()}


def added(*forms: Form) -> Form:
    total: Form = {}
    for form in forms:
        for key, value in form.items():
            total[key] = total.get(key, 0) + value
    return total


def broadcast_shapes(name: str, *shapes: Sequence[int | str]) -> tuple[int | str, ...]:
    """Numpy's alignment, but a dimension only meets its own symbol, its own size, or a static 1."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    result = []
    for axis, dims in enumerate(zip(*padded)):
        wide = {d for d in dims if d != 1}
        if len(wide) > 1:
            raise LegalityError(
                f"{name}: dimension {axis} is {' and '.join(map(str, dims))}; dimensions broadcast only when they "
                f"are equal, the same symbol, or a static 1. Shapes: {', '.join(map(str, shapes))}."
            )
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise LegalityError(message)
