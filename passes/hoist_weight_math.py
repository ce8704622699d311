"""Moves arithmetic on weights alone out of the bodies, and cancels offsets that a file format added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir

from adaptc.ir.build import Builder
from adaptc.ir.functions import bodies, refresh_signature, replace_call
from adaptc.ir.module import Program, joined
from adaptc.ir.rewrite import Node, definer, nodes, remove_dead, rewrite, scalar, spec


@dataclass(frozen=True)
class HoistWeightMath:
    """Elementwise operators and transposes on weights alone move from a body to its callers; (w + c) - c on a weight becomes w.

    A model may add a constant to a parameter (norms that scale by 1 + weight) that its file had subtracted or has
    already added. The two meet only in @step. They cancel exactly on weights, where the constant is part of how the
    value is written down; on activations it would change rounding, and nothing is done.
    """

    name: ClassVar[str] = "hoist_weight_math"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        with program.editing():
            for _, function, calls in bodies(program):
                _hoist(function, calls, weight_values(program))
        rewrite(program, {"add": (_cancel,), "sub": (_cancel,)})


def weight_values(program: Program) -> set[ir.Value]:
    """Values of @step that depend on nothing but weights and constants, and on at least one weight."""
    found: set[ir.Value] = set()
    weights = program.weights()
    for node in nodes(program.step):
        if node.name == "get" and node.op.attributes["symbol"].value in weights:
            found.update(node.results)
        elif _arithmetic(node, found):
            found.update(node.results)
    return found


def _arithmetic(node: Node, weights: set[ir.Value]) -> bool:
    """Whether an operator is elementwise on values of ``weights`` and scalar constants alone, or moves the elements of
    one about."""
    moves = node.row is not None and node.row.views and not node.row.aliases
    if node.row is None or not (node.row.elementwise or moves) or node.op.regions:
        return False
    return any(v in weights for v in node.operands) and all(
        v in weights or scalar(v) is not None for v in node.operands
    )


def _hoist(function, calls: list[Node], weights: set[ir.Value]) -> None:
    arguments = list(function.entry_block.arguments)
    alone = {a for a in arguments if all(call.operands[a.arg_number] in weights for call in calls)}
    moved: list[Node] = []
    for node in nodes(function):
        if _arithmetic(node, alone):
            alone.update(node.results)
            moved.append(node)
    inside = {node.op for node in moved}
    outputs = [r for node in moved for r in node.results if any(user.op not in inside for user in node.users)]
    if not outputs:
        return
    for call in calls:
        values = dict(zip(arguments, call.operands))
        builder = Builder(ir.InsertionPoint(call.op), call.source)
        for node in moved:
            values[node.results[0]] = _copy(builder, node, values)
        replace_call(call, [*call.operands, *(values[o] for o in outputs)], [r.type for r in call.results],
                     range(len(call.results)))
    for output in outputs:
        argument = function.entry_block.add_argument(output.type, ir.Location.unknown())
        output.replace_all_uses_with(argument)
    remove_dead(function)
    refresh_signature(function)


def _copy(builder: Builder, node: Node, values: dict) -> ir.Value:
    for operand in node.operands:
        if operand not in values:
            values[operand] = builder.op("constant", **definer(operand).attrs)
    inside = Builder(builder.point, joined(builder.source, node.source))
    return inside.op(node.name, *(values[v] for v in node.operands), **node.attrs)


def _offset(node: Node | None) -> tuple[ir.Value, float] | None:
    """(x, c) when a node is x + c or x - c."""
    if node is None or node.name not in ("add", "sub"):
        return None
    x, y = node.operands
    if scalar(y) is not None:
        return x, scalar(y) if node.name == "add" else -scalar(y)
    if node.name == "add" and scalar(x) is not None:
        return y, scalar(x)
    return None


def _on_weight(value: ir.Value) -> bool:
    node = definer(value)
    return node is not None and node.name == "get"


def _cancel(b, node: Node):
    """(w + c) + (-c) → w, for a weight w"""
    outer = _offset(node)
    inner = _offset(definer(outer[0])) if outer else None
    if inner is None or not _on_weight(inner[0]) or outer[1] + inner[1] != 0:
        return None
    return inner[0] if spec(inner[0]).shape == spec(node.results[0]).shape else None
