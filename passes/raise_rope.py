"""Recognises rotary position embedding (GPT-NeoX halves)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir

from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, find, rewrite, spec


@dataclass(frozen=True)
class RaiseRope:
    """x·cos + concat(-x₂, x₁)·sin → rope, for x [T, H, D] with halves x₁, x₂ of D, and cos and sin the same for all
    heads."""

    name: ClassVar[str] = "raise_rope"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        rewrite(program, {"add": (_raise,)})


def _raise(b, node: Node):
    if len(spec(node.results[0]).shape) != 3:
        return None
    for plain, turned in node.swaps():
        plain_mul, turned_mul = find(plain, "mul"), find(turned, "mul")
        if plain_mul is None or turned_mul is None:
            continue
        for half, sin in turned_mul.swaps():
            x = _rotated(half)
            for other, cos in plain_mul.swaps():
                if x is not None and other == x and _per_token(cos, x) and _per_token(sin, x):
                    t, _, width = spec(x).shape
                    flat = [b.reshape(v, shape=(t, width)) for v in (cos, sin)]
                    return b.rope(x, *flat)
    return None


def _per_token(value: ir.Value, x: ir.Value) -> bool:
    t, _, width = spec(x).shape
    return spec(value).shape == (t, 1, width)


def _rotated(value: ir.Value) -> ir.Value | None:
    """x, if ``value`` is concat(-x[..., D/2:], x[..., :D/2])."""
    joined = find(value, "concat")
    if joined is None or len(joined.operands) != 2 or joined.attrs["axis"] != len(spec(value).shape) - 1:
        return None
    negated, low = find(joined.operands[0], "neg"), find(joined.operands[1], "slice")
    high = find(negated.operands[0], "slice") if negated else None
    if low is None or high is None or low.operands != high.operands:
        return None
    x = low.operands[0]
    width = spec(x).shape[-1]
    return x if _cut(low) == (0, width // 2) and _cut(high) == (width // 2, width) else None


def _cut(node: Node) -> tuple[int, int] | None:
    """(start, limit) of a slice that cuts the last axis alone, without stride."""
    a, shape = node.attrs, spec(node.operands[0]).shape
    whole = tuple(-1 if isinstance(d, str) else d for d in shape)
    others_whole = a["starts"][:-1] == (0,) * (len(shape) - 1) and a["limits"][:-1] == whole[:-1]
    return (a["starts"][-1], a["limits"][-1]) if others_whole and set(a["strides"]) == {1} else None
