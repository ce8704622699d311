"""Recognises root-mean-square normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir

from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, find, rewrite, scalar, spec, used_once


@dataclass(frozen=True)
class RaiseRmsNorm:
    """x · rsqrt(mean(x²) + eps) · weight → rms_norm, with any order of factors and a weight of one axis."""

    name: ClassVar[str] = "raise_rms_norm"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        rewrite(program, {"mul": (_raise,)})


def _raise(b, node: Node):
    for normed, weight in node.swaps():
        scaled = find(normed, "mul")
        if scaled is None or not used_once(normed) or len(spec(weight).shape) != 1:
            continue
        for x, inverse in scaled.swaps():
            eps = _inverse_rms(inverse, x)
            if eps is not None and spec(weight).shape == spec(x).shape[-1:] and spec(x) == spec(node.results[0]):
                return b.rms_norm(x, weight, eps=eps)
    return None


def _inverse_rms(value: ir.Value, x: ir.Value) -> float | None:
    """eps, if ``value`` is rsqrt(mean(x·x over the last axis, kept) + eps)."""
    root = find(value, "rsqrt")
    total = find(root.operands[0], "add") if root else None
    for mean, eps in total.swaps() if total else ():
        reduce = find(mean, "reduce")
        number = scalar(eps)
        if reduce is None or number is None:
            continue
        last = {"kind": "mean", "axes": (len(spec(x).shape) - 1,), "keepdims": True}
        square = find(reduce.operands[0], "mul")
        if reduce.attrs == last and square and square.operands == (x, x):
            return float(number)
    return None
