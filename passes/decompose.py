"""Replaces operators that a backend lacks by their decompositions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, ClassVar

from torch_mlir import ir

from adaptc.errors import MissingOperatorError
from adaptc.ir.build import Builder
from adaptc.ir.module import Program, spec_of
from adaptc.ir.rewrite import Node, merge_equal, nodes, remove_dead
from adaptc.protocol import OpSpec, TensorSpec


@dataclass(frozen=True)
class Decompose:
    """Until ``supports`` has every operator, those it lacks become what their rows decompose into. ``needs`` says of an
    operator what kernels for it take, for the error. Operators that
    alias their operand need no support. The fact "decomposed" says what became of which, for the coverage report.
    UnsupportedError lists every operator that is left, with its module."""

    supports: Callable[[OpSpec], bool]
    needs: Callable[[str], str] = lambda operator: ""
    name: ClassVar[str] = "decompose"
    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        missing: list[str] = []
        became: dict[str, set[str]] = {}
        with program.editing():
            for name, function in program.functions().items():
                # again and again, as what came of an operator may be lacking too
                while sum(self._lower(node, became) for node in nodes(function)):
                    pass
                merge_equal(function)
                remove_dead(function)
                missing += [f"  {_describe(node)} (in @{name}){self._wanted(node)}" for node in nodes(function)
                            if self._lacks(node)]
        if became:
            program.set_fact("decomposed", {name: sorted(into) for name, into in sorted(became.items())})
        if missing:
            raise MissingOperatorError(
                "the backend has no kernel and the operator table no decomposition for:\n" + "\n".join(missing),
                hint="\nChoose a backend that has them, or give the backend these operators.",
            )

    def _lacks(self, node: Node) -> bool:
        return node.row is not None and not node.row.aliases and not self.supports(spec_of(node.op))

    def _wanted(self, node: Node) -> str:
        needs = self.needs(node.name)
        return f"; kernels take {needs}" if needs else ""

    def _lower(self, node: Node, became: dict[str, set[str]]) -> bool:
        if not self._lacks(node) or node.row.decompose is None:
            return False
        name, builder = node.name, _Recorder(ir.InsertionPoint(node.op), node.source)
        node.replace(*node.row.decompose(builder, node.attrs, *node.operands))
        became.setdefault(name, set()).update(builder.built)
        return True


class _Recorder(Builder):
    """A builder that remembers which operators it built."""

    def __init__(self, point: ir.InsertionPoint, source: str):
        super().__init__(point, source)
        self.built: set[str] = set()

    def op(self, name: str, *operands: ir.Value, **attrs: Any):
        self.built.add(name)
        return super().op(name, *operands, **attrs)


def _describe(node: Node) -> str:
    found = spec_of(node.op)
    operands = ", ".join(f"{s.dtype}{list(s.shape)}" if isinstance(s, TensorSpec) else "state" for s in found.operands)
    stored = [s.format.name for s in found.operands if isinstance(s, TensorSpec) and s.format]
    text = f"{found.op}({operands}) in module {node.source or '<root>'}"
    return text + (f", weights {', '.join(stored)}" if stored else "")
