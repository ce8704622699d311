"""Recognises root-mean-square normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir

from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, find, rewrite, scalar, spec, used_once, users


@dataclass(frozen=True)
class RaiseRmsNorm:
    """x · rsqrt(mean(x²) + eps) · weight → rms_norm, with any order of factors and a weight of one axis; so is
    x / sqrt(mean(x²) + eps). Without a weight, or with one of other axes: rms_norm with ones."""

    name: ClassVar[str] = "raise_rms_norm"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        rewrite(program, {"mul": (_weighted, _plain), "div": (_plain,)})


def _weighted(b, node: Node):
    for normed, weight in node.swaps():
        inner = find(normed, "mul", "div")
        found = _normalised(inner) if inner and used_once(normed) else None
        if found and _is_weight(weight, found[0]) and spec(found[0]) == spec(node.results[0]):
            return b.rms_norm(found[0], weight, eps=found[1])
    return None


def _plain(b, node: Node):
    found = _normalised(node)
    if found is None:
        return None
    for user in users(node.results[0]) if used_once(node.results[0]) else ():
        if user.name == "mul" and any(_is_weight(v, found[0]) for v in user.operands):
            return None  # _weighted takes both
    x, eps = found
    return b.rms_norm(x, b.constant(value=1.0, shape=spec(x).shape[-1:]), eps=eps)


def _is_weight(value: ir.Value, x: ir.Value) -> bool:
    return spec(value).shape == spec(x).shape[-1:]


def _normalised(node: Node) -> tuple[ir.Value, float] | None:
    """(x, eps), if ``node`` is x · rsqrt(mean(x·x over the last axis, kept) + eps) or x / sqrt of that."""
    root, pairs = ("rsqrt", node.swaps()) if node.name == "mul" else ("sqrt", [node.operands])
    for x, scale in pairs:
        inner = find(scale, root)
        total = find(inner.operands[0], "add") if inner else None
        for mean, eps in total.swaps() if total else ():
            square = mean_of(mean)
            product = find(square, "mul") if square is not None else None
            if product and product.operands == (x, x) and scalar(eps) is not None:
                return x, float(scalar(eps))
    return None


def mean_of(value: ir.Value) -> ir.Value | None:
    """x, if ``value`` is its mean over the last axis, which is kept."""
    reduce = find(value, "reduce")
    if reduce is None:
        return None
    x = reduce.operands[0]
    last = {"kind": "mean", "axes": (len(spec(x).shape) - 1,), "keepdims": True}
    return x if reduce.attrs == last else None
