"""Fuses a residual addition with the norm that reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, defined_before, find, nodes, remove_dead, spec


@dataclass(frozen=True)
class FuseAddRmsNorm:
    """rms_norm(residual + x) → add_rms_norm, which also gives the sum, for tensors [T, D] without broadcasting.

    The fused operator stands where the sum did, so that the sum's other users still find it; the norm's weight must
    be known there.
    """

    name: ClassVar[str] = "fuse_add_rms_norm"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        with program.editing():
            for function in program.functions().values():
                for node in nodes(function):
                    if node.name == "rms_norm":
                        _fuse(node)
                remove_dead(function)


def _fuse(norm: Node) -> None:
    total, weight = norm.operands
    add = find(total, "add")
    if add is None or not defined_before(weight, add):
        return
    residual, x = add.operands
    if len(spec(total).shape) != 2 or not spec(residual) == spec(x) == spec(total):
        return
    b = add.builder()
    b.source = norm.source
    normed, kept = b.add_rms_norm(x, residual, weight, **norm.attrs)
    norm.replace(normed)
    add.replace(kept)
