"""Merges linear maps of one input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir

from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, defined_before, nodes


@dataclass(frozen=True)
class MergeLinears:
    """linear(x, a), linear(x, b, bias), … → linears(x, a, b, bias, …), whatever the weights' formats and with or
    without biases. Declined: weights or biases that aren't known yet where the first of them stands."""

    name: ClassVar[str] = "merge_linears"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        with program.editing():
            for function in program.functions().values():
                groups: dict[ir.Value, list[Node]] = {}
                for node in nodes(function):
                    if node.name == "linear":
                        groups.setdefault(node.operands[0], []).append(node)
                for members in groups.values():
                    _merge(members)


def _merge(members: list[Node]) -> None:
    first = members[0]
    fit = [n for n in members if all(defined_before(v, first) for v in n.operands[1:])]
    if len(fit) < 2:
        return
    results = first.builder().linears(first.operands[0], *(v for n in fit for v in n.operands[1:]))
    for node, result in zip(fit, results):
        node.replace(result)
