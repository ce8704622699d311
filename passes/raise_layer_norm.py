"""Recognises layer normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, find, rewrite, spec, used_once
from adaptc.passes.raise_rms_norm import mean_of


@dataclass(frozen=True)
class RaiseLayerNorm:
    """rms_norm(x - mean(x), weight) → layer_norm(x, weight), and layer_norm(x, weight) + bias → layer_norm with a
    bias of one axis. Declined: another mean than the last axis's."""

    name: ClassVar[str] = "raise_layer_norm"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        rewrite(program, {"rms_norm": (_centred,), "add": (_bias,)})


def _centred(b, node: Node):
    centred, weight = node.operands
    difference = find(centred, "sub")
    mean = mean_of(difference.operands[1]) if difference else None
    return b.layer_norm(mean, weight, **node.attrs) if mean is not None and mean == difference.operands[0] else None


def _bias(b, node: Node):
    for normed, bias in node.swaps():
        norm = find(normed, "layer_norm")
        if norm and len(norm.operands) == 2 and used_once(normed) and spec(bias) == spec(norm.operands[1]):
            return b.layer_norm(*norm.operands, bias, **norm.attrs)
    return None
