"""Fuses a residual addition with the norm that reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, defined_before, find, nodes, remove_dead, spec


@dataclass(frozen=True)
class FuseAddRmsNorm:
    """rms_norm(residual + x) → add_rms_norm, which also gives the sum, for tensors [T, D] without broadcasting.

    The fused operator stands where the sum did if the norm's weight is known there, else where the norm did if the
    sum's other users come later; otherwise nothing is done.
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
    if add is None:
        return
    residual, x = add.operands
    if len(spec(total).shape) != 2 or not spec(residual) == spec(x) == spec(total):
        return
    late = not defined_before(weight, add)
    if late and any(user.before(norm) for user in add.users):
        return
    b = (norm if late else add).builder()
    b.source = norm.source
    normed, kept = b.add_rms_norm(x, residual, weight, **norm.attrs)
    norm.replace(normed)
    add.replace(kept)
