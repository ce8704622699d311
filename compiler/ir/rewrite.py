"""Reading and rewriting operations in place: what passes are written in.

A pass is mostly a table of rules: ``{"add": (rule, ...)}``. A rule looks at one operation and returns the values
that replace its results, built just before it, or None when it doesn't apply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping, Sequence

from torch_mlir import ir

from adaptc.ir import dialect
from adaptc.ir.build import Builder, attrs_of, is_operator, short_name
from adaptc.ir.module import Program, source_of
from adaptc.ops.table import OpRow, row


@dataclass(frozen=True)
class Node:
    """An operation as rules read it."""

    op: ir.Operation

    @property
    def name(self) -> str:
        """Its name in the operator table; for other dialects the whole name ("func.call")."""
        return short_name(self.op)

    @property
    def row(self) -> OpRow | None:
        """Its row, or None when it isn't an operator of the table."""
        return row(self.name) if is_operator(self.op) else None

    @property
    def attrs(self) -> dict[str, Any]:
        return attrs_of(self.op)

    @property
    def operands(self) -> tuple[ir.Value, ...]:
        return tuple(self.op.operands)

    @property
    def results(self) -> tuple[ir.Value, ...]:
        return tuple(self.op.results)

    @property
    def source(self) -> str:
        return source_of(self.op)

    @property
    def users(self) -> list[Node]:
        return [node for result in self.results for node in users(result)]

    @property
    def pure(self) -> bool:
        """Whether it may be removed when unused and merged with an equal one."""
        return self.name == "get" or (self.row is not None and self.row.state is None)

    def builder(self) -> Builder:
        """Builds just before this operation, in its module."""
        return Builder(ir.InsertionPoint(self.op), self.source)

    def builder_after(self) -> Builder:
        """Builds just after this operation, in its module."""
        return Builder(ir.InsertionPoint.after(self.op), self.source)

    def swaps(self) -> Iterator[tuple[ir.Value, ir.Value]]:
        """Both orders of a commutative operator's operands."""
        a, b = self.operands
        yield a, b
        yield b, a

    def before(self, other: Node) -> bool:
        return self.op.is_before_in_block(other.op)

    def replace(self, *values: ir.Value) -> None:
        """Its results become ``values``; it is erased."""
        for old, new in zip(self.results, values, strict=True):
            old.replace_all_uses_with(new)
        self.op.erase()


Rule = Callable[[Builder, Node], ir.Value | tuple[ir.Value, ...] | None]


def nodes(function) -> list[Node]:
    """A function's operations in program order, its terminator included; a snapshot."""
    return [Node(op.operation) for op in function.entry_block.operations]


def definer(value: ir.Value) -> Node | None:
    """The operation whose result ``value`` is; None for an argument."""
    return None if isinstance(value.owner, ir.Block) else Node(value.owner.operation)


def find(value: ir.Value, *names: str) -> Node | None:
    """The operation that defines ``value``, if it is one of ``names``."""
    node = definer(value)
    return node if node is not None and node.name in names else None


def users(value: ir.Value) -> list[Node]:
    """The operations that use ``value``, one entry a use."""
    return [Node(use.owner.operation) for use in value.uses]


def used_once(value: ir.Value) -> bool:
    return sum(1 for _ in value.uses) == 1


def scalar(value: ir.Value) -> float | int | None:
    """The number that ``value`` is, if it is a constant with one number in it."""
    node = find(value, "constant")
    number = node.attrs["value"] if node else None
    return number if isinstance(number, (int, float)) and not isinstance(number, bool) else None


def spec(value: ir.Value):
    return dialect.to_spec(value.type)


def defined_before(value: ir.Value, node: Node) -> bool:
    """Whether ``value`` can be an operand of an operation put where ``node`` is (same block)."""
    source = definer(value)
    return source is None or source.before(node)


def rewrite(program: Program, rules: Mapping[str, Sequence[Rule]]) -> int:
    """Applies rules until none applies; dead operations go. Returns the number of rewrites."""
    total = 0
    with program.editing():
        for function in program.functions().values():
            while count := _sweep(function, rules):
                total += count
                remove_dead(function)
    return total


def _sweep(function, rules: Mapping[str, Sequence[Rule]]) -> int:
    count = 0
    for node in nodes(function):
        for rule in rules.get(node.name, ()):
            found = rule(node.builder(), node)
            if found is not None:
                node.replace(*(found if isinstance(found, tuple) else (found,)))
                count += 1
                break
    return count


def dead_nodes(function) -> list[Node]:
    """Pure operations whose results nobody uses but others of them; users before what they use."""
    dead: dict[ir.Operation, Node] = {}
    for node in reversed(nodes(function)):
        if node.pure and all(user.op in dead for user in node.users):
            dead[node.op] = node
    return list(dead.values())


def remove_dead(function) -> int:
    """Erases dead operations; returns their number."""
    dead = dead_nodes(function)
    for node in dead:
        node.op.erase()
    return len(dead)


def merge_equal(function) -> int:
    """Gives users of equal pure operations the first of them (common subexpressions)."""
    seen: dict[tuple, Node] = {}
    count = 0
    for node in nodes(function):
        if not node.pure:
            continue
        attributes = node.op.attributes
        key = (
            node.name,
            node.operands,
            tuple((n, attributes[n]) for n in attributes if n not in dialect.NOTES),
            str(node.attrs["body"]) + str(node.attrs["yields"]) if len(node.op.regions) else "",
            tuple(r.type for r in node.results),
        )
        if key in seen:
            node.replace(*seen[key].results)
            count += 1
        else:
            seen[key] = node
    return count
