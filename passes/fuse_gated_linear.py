"""Fuses the gate and up projections of a gated MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, find, rewrite, used_once
from adaptc.ops.elementwise import UNARY


@dataclass(frozen=True)
class FuseGatedLinear:
    """act(x·gateᵀ [+ bias]) · (x·upᵀ [+ bias]) → gated_linear, for any unary activation of the table.

    Declined: projections of different inputs or shapes, or whose results are used elsewhere.
    """

    name: ClassVar[str] = "fuse_gated_linear"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        rewrite(program, {"mul": (_fuse,)})


def _fuse(b, node: Node):
    for left, right in node.swaps():
        act = find(left, *UNARY)
        gate, up = find(act.operands[0], "linear") if act else None, find(right, "linear")
        if gate is None or up is None or gate == up:
            continue
        alone = all(used_once(n.results[0]) for n in (act, gate, up))
        alike = gate.operands[0] == up.operands[0] and gate.operands[1].type == up.operands[1].type
        if alone and alike:
            return b.gated_linear(*gate.operands, *up.operands[1:], act=act.name)
    return None
