"""Weights that are used transposed are stored so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adaptc.ir.module import Program, Weight
from adaptc.ir.rewrite import Node, definer, rewrite, spec
from adaptc.ops.table import row

RULE = "transpose"
"""The rule of ``Weight.rows`` by which a file's tensor is read with its last two axes exchanged."""


@dataclass(frozen=True)
class BindTransposes:
    """transpose(w) → the weight "w.T", for a transpose of the last two axes of a weight that is stored as it is, or
    transposed: then "w.T" is the file's tensor as it is.

    Declined: other permutations, and weights that are read by another rule already.
    """

    name: ClassVar[str] = "bind_transposes"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        weights = program.weights()
        moving = [name for name in ("transpose",) if row(name).views]
        rewrite(program, {name: (lambda b, node: _bind(program, weights, b, node),) for name in moving})
        read = {op.operation.attributes["symbol"].value for op in program.step.entry_block.operations
                if op.operation.name == "adaptc.get"}
        with program.editing():
            for op in program.declared("weight"):
                if op.operation.attributes["sym_name"].value not in read:
                    op.operation.erase()


def _bind(program: Program, weights: dict[str, Weight], b, node: Node):
    source = definer(node.operands[0])
    weight = weights.get(source.op.attributes["symbol"].value) if source and source.name == "get" else None
    rank = len(spec(node.operands[0]).shape)
    swapped = (*range(rank - 2), rank - 1, rank - 2)
    if weight is None or weight.rows not in ((), (RULE, 0)) or node.attrs["perm"] != swapped:
        return None
    result = spec(node.results[0])
    name = f"{weight.name}.T"
    program.declare(Weight(name, result, weight.tensor, () if weight.rows else (RULE, 0), weight.stored))
    return b.raw("adaptc.get", [], [node.results[0].type], {"symbol": name}).results[0]
