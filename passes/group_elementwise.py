"""Collects elementwise operators into groups, each one pass over memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, ClassVar

from torch_mlir import ir

from adaptc.ir.build import Builder
from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, defined_before, definer, nodes, remove_dead, scalar, spec
from adaptc.ops.table import row
from adaptc.protocol import OpSpec


@dataclass(frozen=True)
class GroupElementwise:
    """Maximal groups. An operator joins the group of its users when nobody else uses it and its result has the
    group's shape, or a smaller one if it costs no arithmetic, since it is then redone for each element. Groups of one
    shape that read a common tensor become one group with several results. Scalar constants become part of the body.
    An operator alone, without a constant, stays as it is.

    supports   says whether a backend has the group; a group that it lacks isn't formed. None: all are formed.
    """

    supports: Callable[[OpSpec], bool] | None = None
    name: ClassVar[str] = "group_elementwise"
    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        with program.editing():
            for function in program.functions().values():
                groups = _siblings(_chains(nodes(function)))
                for members in groups:
                    self._form(members)
                remove_dead(function)

    def _form(self, members: list[Node]) -> None:
        formed = _Body(members)
        if len(formed.rows) < 2:
            return
        attrs = {"body": tuple(formed.rows), "yields": tuple(formed.index[v] for v in formed.outputs)}
        operands = tuple(spec(v) for v in formed.operands)
        wanted = OpSpec("group", operands, row("group").results(attrs, operands), attrs)
        if self.supports and not self.supports(wanted):
            return
        # every operand of every member is known where the first output stands: see _siblings
        place = next(n for n in members if n.results[0] in formed.outputs)
        b = Builder(ir.InsertionPoint(place.op), place.source)
        made = b.group(*formed.operands, **attrs)
        for old, new in zip(formed.outputs, made if isinstance(made, tuple) else (made,)):
            old.replace_all_uses_with(new)
        for node in reversed(members):
            node.op.erase()


def _groupable(node: Node | None) -> bool:
    return node is not None and node.row is not None and node.row.elementwise and not node.op.regions


def _chains(block: list[Node]) -> list[list[Node]]:
    """Groups with one result each, last operator first in the block's order of ends; members in program order."""
    position = {node.op: i for i, node in enumerate(block)}
    taken: set = set()
    chains = []
    for end in reversed(block):
        if not _groupable(end) or end.op in taken:
            continue
        members = {end.op: end}
        queue = list(end.operands)
        shape = spec(end.results[0]).shape
        while queue:
            node = definer(queue.pop(0))
            if not _groupable(node) or node.op in members or node.op in taken:
                continue
            free = not node.row.cost(node.attrs, [spec(v) for v in node.operands], [spec(v) for v in node.results])
            if all(u.op in members for u in node.users) and (spec(node.results[0]).shape == shape or free):
                members[node.op] = node
                queue.extend(node.operands)
        taken.update(members)
        chains.append(sorted(members.values(), key=lambda n: position[n.op]))
    return chains[::-1]


def _siblings(chains: list[list[Node]]) -> list[list[Node]]:
    """Joins chains of one result shape that read a common tensor, when all that the later one reads is known where
    the earlier one ends."""
    joined: list[list[list[Node]]] = []
    for chain in chains:
        for group in joined:
            first = group[0][-1]
            same = spec(first.results[0]).shape == spec(chain[-1].results[0]).shape
            if same and _inputs(chain) & _inputs(group[0]) and all(defined_before(v, first) for v in _inputs(chain)):
                group.append(chain)
                break
        else:
            joined.append([chain])
    return [[node for chain in group for node in chain] for group in joined]


def _inputs(chain: list[Node]) -> set[ir.Value]:
    made = {r for node in chain for r in node.results}
    return {v for node in chain for v in node.operands if v not in made and not _scalar_constant(v)}


class _Body:
    """A group's operands, body rows and results, from its members in an order that respects uses."""

    def __init__(self, members: list[Node]):
        made = {r for node in members for r in node.results}
        self.operands: list[ir.Value] = []
        for node in members:
            for v in node.operands:
                if v not in made and v not in self.operands and not _scalar_constant(v):
                    self.operands.append(v)
        self.index: dict[ir.Value, int] = {v: i for i, v in enumerate(self.operands)}
        self.rows: list[tuple] = []
        for node in members:
            for v in node.operands:
                if v not in self.index:
                    self._row(definer(v))
            self._row(node)
        inside = {node.op for node in members}
        self.outputs = [r for node in members for r in node.results if any(u.op not in inside for u in node.users)]

    def _row(self, node: Node) -> None:
        operands = tuple(self.index[v] for v in node.operands)
        self.index[node.results[0]] = len(self.operands) + len(self.rows)
        self.rows.append((node.name, operands, tuple(sorted(node.attrs.items()))))


def _scalar_constant(value: ir.Value) -> bool:
    return scalar(value) is not None and spec(value).shape == ()
