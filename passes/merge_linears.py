"""Merges linear maps of one input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir

from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, defined_before, nodes


@dataclass(frozen=True)
class MergeLinears:
    """linear(x, a), linear(x, b), … → linears(x, a, b, …), whatever the weights' formats. Declined: a bias, and
    weights that aren't known yet where the first of them stands."""

    name: ClassVar[str] = "merge_linears"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        with program.editing():
            for function in program.functions().values():
                groups: dict[ir.Value, list[Node]] = {}
                for node in nodes(function):
                    if node.name == "linear" and len(node.operands) == 2:
                        groups.setdefault(node.operands[0], []).append(node)
                for members in groups.values():
                    _merge(members)


def _merge(members: list[Node]) -> None:
    first = members[0]
    fit = [n for n in members if defined_before(n.operands[1], first)]
    if len(fit) < 2:
        return
    results = first.builder().linears(first.operands[0], *(n.operands[1] for n in fit))
    for node, result in zip(fit, results):
        node.replace(result)
