"""Fuses a residual addition with the norm that reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, defined_before, find, nodes, remove_dead, spec

FUSED = {"rms_norm": "add_rms_norm", "layer_norm": "add_layer_norm"}
"""A norm and its form that adds first."""


@dataclass(frozen=True)
class FuseAddNorm:
    """norm(residual + x) → add_norm, which also gives the sum, for tensors [T, D] without broadcasting, and every norm
    that has such a form.

    The fused operator stands where the sum did if the norm's weight and bias are known there, else where the norm did
    if the sum's other users come later; otherwise nothing is done.
    """

    name: ClassVar[str] = "fuse_add_norm"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        with program.editing():
            for function in program.functions().values():
                for node in nodes(function):
                    if node.name in FUSED:
                        _fuse(node)
                remove_dead(function)


def _fuse(norm: Node) -> None:
    total, *vectors = norm.operands
    add = find(total, "add")
    if add is None:
        return
    residual, x = add.operands
    if len(spec(total).shape) != 2 or not spec(residual) == spec(x) == spec(total):
        return
    late = not all(defined_before(v, add) for v in vectors)
    if late and any(user.before(norm) for user in add.users):
        return
    b = (norm if late else add).builder()
    b.source = norm.source
    normed, kept = b.op(FUSED[norm.name], x, residual, *vectors, **norm.attrs)
    norm.replace(normed)
    add.replace(kept)
