"""The operator table: an operator is declared once, here, and algorithms read its row and never its name.

Rows describe operators over ``TensorSpec`` (dtype, named shape, storage format), without MLIR, so that capture,
passes, planner, reference backend and code generators share one description. Rows come from the modules of this
package and from installed packages with an entry point in the group ``adaptc.operators`` (a module with ``ROWS``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from typing import Any, Callable, Mapping, Sequence

from adaptc import packages
from adaptc.errors import LegalityError
from adaptc.plan import STATE_KINDS
from adaptc.protocol import StateSpec, TensorSpec

REQUIRED = object()
"""Marks an attribute without a default."""

EXTRAS = "extras"
"""Attribute of operators with several optional operands: the names of those that are given."""

DECLARATIONS = ("weight", "state_slot", "get", "yield")
"""Operations of the dialect that aren't rows of the table: names that no row may have."""

Spec = TensorSpec | StateSpec
Form = dict[str, int]
"""A quantity as a sum of products of symbols: {"": constant, "T": per token, "T*C": per token and context row}."""


@dataclass(frozen=True)
class Part:
    """How much of an operand is read: its ``share`` of the elements by the whole operator, and the ``terms`` that one
    element of the result sums up."""

    share: Fraction
    terms: int


@dataclass(frozen=True)
class OpRow:
    """One operator.

    operands   names in order; a trailing ``?`` marks an optional last operand, ``*`` one or more last operands, ``+``
               a first operand that is one float tensor or the three results of ``quantize`` in its place; of several
               optional ones, the attribute ``extras`` names those that are given, in the order of the row
    attrs      attribute name → default value, which also says its kind, or REQUIRED
    infer      (attrs, operand specs) → result specs; raises LegalityError naming what doesn't fit
    factors    einsum-like rule of which dimensions correspond, e.g. "tk,nk->tn", with a term for each of ``operands``
               but a state, ``*`` where that repeats or is left out; "..." = elementwise over shared dims
    axes       (attrs, operand specs, result specs) → ``axes.AxisMap``, where attributes say what becomes of an axis
    cost       (attrs, operand specs, result specs) → FLOPs as a Form; bytes follow from the specs
    meaning    (attrs, *arrays) → tuple of arrays, in plain float32 numpy: the oracle
    decompose  (build, attrs, *values) → tuple of values in lower operators; None for the floor
    state      index of the operand that is a state, if the operator is stateful
    rows_read  (attrs, operand specs) → the rows of its state that a step reads, as a product of symbols; by default the
               context of each request, "R*C", as far as the state's window goes
    earlier    operands of a stateful operator that name, for each token, positions of its own request up to its own,
               ascending, then -1
    keeps      kind of that state (``plan.State``): "rows", of which every token appends one, or "fixed", a value
    appends    a stateful operator appends the step's rows to its state, or replaces the value; else it only reads what
               another one left there
    gathers    (table, indices): of operand ``table`` only the rows that operand ``indices`` names are read
    reads      (attrs, operand specs) → {operand: Part}, of operands whose axes don't say how much of them is read
    views      the result holds the operand's elements, moved or renamed, and nothing else
    aliases    a view that moves nothing: the result is the operand's memory under another shape
    elementwise  every result element depends on the operand elements at the same index (after broadcasting)
    matrices   operands whose rows may be stored in a packed format; a weight that any other operand reads is dense
    ranges     name → (generator, shape) → values of float operands that are hard for this operator: its kernels are
               verified over them beside what all are (``adaptc.verify.operators.RANGES``)
    domain     operand → (values) → values that it can have in earnest, from those of a range: where others make
               nothing but infinities, as decays above 0 do over a long past
    """

    name: str
    operands: tuple[str, ...]
    infer: Callable[[Mapping[str, Any], Sequence[Spec]], tuple[TensorSpec, ...]]
    meaning: Callable[..., tuple]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    factors: str = "..."
    axes: Callable[[Mapping[str, Any], Sequence[Spec], Sequence[TensorSpec]], tuple] | None = None
    cost: Callable[[Mapping[str, Any], Sequence[Spec], Sequence[TensorSpec]], Form] = lambda a, o, r: {}
    decompose: Callable[..., tuple] | None = None
    state: int | None = None
    rows_read: Callable[[Mapping[str, Any], Sequence[Spec]], str] | None = None
    earlier: tuple[str, ...] = ()
    keeps: str = "rows"
    appends: bool = True
    gathers: tuple[int, int] | None = None
    reads: Callable[[Mapping[str, Any], Sequence[Spec]], Mapping[int, Part]] = lambda a, o: {}
    views: bool = False
    aliases: bool = False
    elementwise: bool = False
    matrices: tuple[str, ...] = ()
    ranges: Mapping[str, Callable[[Any, tuple[int, ...]], Any]] = field(default_factory=dict)
    domain: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)

    def complete(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """``attrs`` with defaults filled in; unknown and missing ones are errors."""
        unknown = sorted(set(attrs) - set(self.attrs))
        if unknown:
            known = ", ".join(self.attrs) or "none"
            raise LegalityError(f"{self.name}: unknown attribute {unknown[0]!r}; it has: {known}.")
        full = {**self.attrs, **attrs}
        missing = [name for name, value in full.items() if value is REQUIRED]
        if missing:
            raise LegalityError(f"{self.name}: attribute {missing[0]!r} is missing.")
        return {name: _as_kind(self.name, name, value, self.attrs[name]) for name, value in full.items()}

    def quantized(self, operands: Sequence[Spec]) -> bool:
        """Whether a ``+`` operand is given as the three results of ``quantize``."""
        return bool(self.operands and self.operands[0].endswith("+") and operands and operands[0].dtype == "i8")

    def check_operands(self, attrs: Mapping[str, Any], operands: Sequence[Spec]) -> None:
        """Their number, and that the state, and nothing else, is one."""
        count = len(operands) - (2 if self.quantized(operands) else 0)
        optional = [name.rstrip("?") for name in self.operands if name.endswith("?")]
        least, most = len(self.operands) - len(optional), len(self.operands)
        many = any(name.endswith("*") for name in self.operands)
        if EXTRAS in self.attrs:
            given = attrs.get(EXTRAS, ())
            if list(given) != [name for name in optional if name in given]:
                raise LegalityError(f"{self.name}: {EXTRAS} are {list(given)}, expected some of {optional}, in this order.")
            least = most = least + len(given)
        if count < least or (count > most and not many):
            raise LegalityError(f"{self.name}: got {len(operands)} operands, expected ({', '.join(self.operands)})"
                                + (f" with {EXTRAS} {list(attrs.get(EXTRAS, ()))}." if EXTRAS in self.attrs else "."))
        for i, operand in enumerate(operands):
            if isinstance(operand, StateSpec) != (i == self.state):
                expected = "a state" if i == self.state else "a tensor"
                raise LegalityError(f"{self.name}: operand {i} must be {expected}, got {operand}.")
            if i == self.state and operand.kind != self.keeps:
                raise LegalityError(f"{self.name}: the state is of kind {operand.kind!r}, expected {self.keeps!r}.")

    def places(self, attrs: Mapping[str, Any], count: int) -> tuple[int, ...]:
        """Which entry of ``operands`` each of ``count`` operands is, where nothing is quantised."""
        absent = {name for name in self.operands if name.endswith("?") and EXTRAS in self.attrs
                  and name.rstrip("?") not in attrs.get(EXTRAS, ())}
        places = [i for i, name in enumerate(self.operands) if name not in absent]
        return tuple((places + places[-1:] * (count - len(places)))[:count])

    def matrix_operands(self, attrs: Mapping[str, Any], operands: Sequence[Spec]) -> tuple[int, ...]:
        """Which of ``operands`` are ``matrices``."""
        parts = 2 if self.quantized(operands) else 0
        places = (0,) * parts + self.places(attrs, len(operands) - parts)
        return tuple(i for i, place in enumerate(places) if self.operands[place].rstrip("?+") in self.matrices)

    def results(self, attrs: Mapping[str, Any], operands: Sequence[Spec]) -> tuple[TensorSpec, ...]:
        """What the operator gives; LegalityError when its attributes or operands don't fit."""
        self.check_operands(attrs, operands)
        return self.infer(self.complete(attrs), operands)


def _as_kind(operator: str, name: str, value: Any, default: Any) -> Any:
    """``value`` in the kind of ``default``: an int may stand for a float and a list for a tuple, nothing else."""
    if default is REQUIRED or type(value) is type(default):
        return value
    if isinstance(default, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    raise LegalityError(f"{operator}: attribute {name!r} must be of kind {type(default).__name__}, got {value!r}.")


_FUNCTIONS = ("infer", "meaning", "axes", "cost", "reads", "decompose", "rows_read")
"""Columns of a row that are called."""


def table() -> Mapping[str, OpRow]:
    """Every operator by name."""
    return _tables()[0]


def package_of(name: str) -> str | None:
    """The installed package that brings an operator; None for adaptc's own."""
    return _tables()[1].get(name)


@cache
def _tables() -> tuple[dict[str, OpRow], dict[str, str]]:
    """(rows by name, package by name of those that aren't our own)."""
    from adaptc.ops import dense, elementwise, index, mixing, recurrent, routing, shape

    rows = [*elementwise.ROWS, *shape.ROWS, *dense.ROWS, *mixing.ROWS, *index.ROWS, *recurrent.ROWS, *routing.ROWS]
    own = {row.name: row for row in rows}
    assert len(own) == len(rows), "an operator is declared twice"
    theirs = packages.added(packages.OPERATORS, "ROWS", own, problem)
    return own | {n: _blaming(a.extension, a.value) for n, a in theirs.items()}, {
        n: a.extension.package for n, a in theirs.items()}


def _blaming(extension: packages.Extension, row: OpRow) -> OpRow:
    functions = {name: getattr(row, name) for name in _FUNCTIONS if getattr(row, name) is not None}
    return replace(row, **{name: packages.blaming(extension, f"{name} of operator {row.name!r}", function)
                           for name, function in functions.items()})


def problem(row: Any) -> str:
    """What is wrong with a row by itself, as a sentence; "" when nothing is."""
    if not isinstance(row, OpRow):
        return f"{row!r} is a {type(row).__name__}, expected an adaptc.ops.table.OpRow."
    if not isinstance(row.name, str) or not re.fullmatch("[a-z][a-z0-9_]*", row.name) or row.name in DECLARATIONS:
        return f"operator {row.name!r}: a name has small letters, digits and _, and is none of {', '.join(DECLARATIONS)}."
    return next((f"operator {row.name!r}: {said}" for said in _problems(row) if said), "")


def _problems(row: OpRow):
    last = len(row.operands) - 1
    if isinstance(row.operands, str):
        yield f"operands are {row.operands!r}, expected a tuple of names."
    several = EXTRAS in row.attrs
    for i, name in enumerate(row.operands):
        follows = all(later.endswith("?") for later in row.operands[i + 1 :]) if several and name[-1] == "?" else i == last
        if not re.fullmatch(r"[A-Za-z]\w*[?*+]?", name) or name[-1] in "?*" and not follows or name[-1] == "+" and i:
            yield f"operand {name!r}: only the last name may end in ? or *, and the first in +."
    if several and row.attrs[EXTRAS] != ():
        yield f"the default of {EXTRAS} is {row.attrs[EXTRAS]!r}, expected ()."
    for name in _FUNCTIONS:
        function = getattr(row, name)
        if not callable(function) and not (function is None and name in ("axes", "decompose", "rows_read")):
            yield f"{name} is {function!r}, expected a function."
    if row.state is not None and row.state not in range(len(row.operands)):
        yield f"state is operand {row.state}, but there are {len(row.operands)}."
    if row.gathers and not all(i in range(len(row.operands)) for i in row.gathers):
        yield f"gathers {row.gathers}, but there are {len(row.operands)} operands."
    if unknown := set(row.earlier) - {name.rstrip("?+") for name in row.operands}:
        yield f"earlier names {sorted(unknown)[0]!r}, which is no operand."
    if unknown := set(row.matrices) - {name.rstrip("?+") for name in row.operands}:
        yield f"matrices name {sorted(unknown)[0]!r}, which is no operand."
    if not all(callable(draw) for draw in row.ranges.values()):
        yield "ranges hold something else than functions of a generator and a shape."
    if row.keeps not in STATE_KINDS:
        yield f"keeps is {row.keeps!r}, expected {' or '.join(map(repr, STATE_KINDS))}."
    if unknown := set(row.domain) - {name.rstrip("?*+") for name in row.operands}:
        yield f"domain names {sorted(unknown)[0]!r}, which is no operand."
    if not all(callable(map_) for map_ in row.domain.values()):
        yield "domain holds something else than functions of values."
    if row.factors != "...":
        left, arrow, right = row.factors.partition("->")
        terms, tensors = left.split(","), [n for i, n in enumerate(row.operands) if i != row.state]
        if not arrow or not all(re.fullmatch(r"(\.\.\.)?[a-z]*(\.\.\.)?\*?", t) for t in [*terms, *right.split(",")]):
            yield f"factors are {row.factors!r}, expected terms such as \"tk,nk->tn\"."
        elif [t.endswith("*") for t in terms] != [n.endswith("*") for n in tensors]:
            yield f"factors {row.factors!r} have {len(terms)} terms for the operands {', '.join(tensors)}: one each."


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


def context_symbol(window: int, rate: int = 1) -> str:
    """The symbol for the cache rows that a token reads: ``C``, ``C<512`` for at most 512 of them, ``C/4`` where there is
    one for every 4 tokens."""
    return ("C" if rate == 1 else f"C/{rate}") + (f"<{window}" if window else "")


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
