"""Replaces operators that a backend lacks by their decompositions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, ClassVar

from adaptc.errors import UnsupportedError
from adaptc.ir.module import Program, spec_of
from adaptc.ir.rewrite import Node, merge_equal, nodes, remove_dead
from adaptc.protocol import OpSpec, TensorSpec


@dataclass(frozen=True)
class Decompose:
    """Until ``supports`` has every operator, those it lacks become what their rows decompose into. Operators that
    alias their operand need no support. UnsupportedError lists every operator that is left, with its module."""

    supports: Callable[[OpSpec], bool]
    name: ClassVar[str] = "decompose"
    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        missing: list[str] = []
        with program.editing():
            for name, function in program.functions().items():
                while sum(self._lower(node) for node in nodes(function)):  # what came of them may be lacking too
                    pass
                merge_equal(function)
                remove_dead(function)
                missing += [f"  {_describe(node)} (in @{name})" for node in nodes(function) if self._lacks(node)]
        if missing:
            raise UnsupportedError(
                "the backend has no kernel and the operator table no decomposition for:\n" + "\n".join(missing),
                hint="\nChoose a backend that has them, or give the backend these operators.",
            )

    def _lacks(self, node: Node) -> bool:
        return node.row is not None and not node.row.aliases and not self.supports(spec_of(node.op))

    def _lower(self, node: Node) -> bool:
        if not self._lacks(node) or node.row.decompose is None:
            return False
        node.replace(*node.row.decompose(node.builder(), node.attrs, *node.operands))
        return True


def _describe(node: Node) -> str:
    found = spec_of(node.op)
    operands = ", ".join(f"{s.dtype}{list(s.shape)}" if isinstance(s, TensorSpec) else "state" for s in found.operands)
    stored = [s.format.name for s in found.operands if isinstance(s, TensorSpec) and s.format]
    text = f"{found.op}({operands}) in module {node.source or '<root>'}"
    return text + (f", weights {', '.join(stored)}" if stored else "")
