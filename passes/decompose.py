"""Replaces operators that a backend lacks by their decompositions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, ClassVar

from adaptc.errors import UnsupportedError
from adaptc.ir.module import Program, spec_of
from adaptc.ir.rewrite import Node, merge_equal, nodes, remove_dead
from adaptc.protocol import OpSpec


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
                while any([self._lower(node) for node in nodes(function)]):
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
    brief = lambda s: f"{getattr(s, 'dtype')}{list(getattr(s, 'shape', ()))}"  # noqa: E731
    stored = [s.format.name for s in found.operands if getattr(s, "format", None)]
    text = f"{found.op}({', '.join(brief(s) for s in found.operands)}) in module {node.source or '<root>'}"
    return text + (f", weights {', '.join(stored)}" if stored else "")
