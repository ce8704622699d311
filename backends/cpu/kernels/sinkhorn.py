"""``sinkhorn``: a small matrix of each token lies in registers, a vector a row, while its columns and rows are divided by
their sums in turn. Threads share tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adaptc.backends.cpu.kernels.base import Emitter, Family, Value, vec
from adaptc.backends.cpu.levels import Level
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection

SIZES = (2, 4, 8)
"""Rows that a matrix may have, as many as its columns."""


def emit(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    size, eps = params["size"], params["eps"]
    source, out = e.buffer(0), e.buffer(1)
    kind = vec(size, "f32")

    def columns(rows: Sequence[Value]) -> list[Value]:
        total = e.add(e.tree(e.add, rows), eps)
        return [e.div(row, total) for row in rows]

    def both(rows: Sequence[Value]) -> list[Value]:
        return columns([e.div(row, e.splat(e.add(e.reduce(e.add, row), eps), size)) for row in rows])

    low, high = e.share(e.size(params["tokens"]))
    with e.loop(low, high) as token:
        at = lambda pointer, row: e.at(pointer, e.add(e.mul(token.index, size * size), row * size), "f32")  # noqa: E731
        rows = columns([e.load(at(source, row), kind) for row in range(size)])
        with e.loop(0, params["iterations"] - 1, init=rows) as turn:
            turn.end(*both(turn.args))
        for row, value in enumerate(turn.results):
            e.store(value, at(out, row))
    return e.text(symbol)


def signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    shape = f"f32[{params['tokens']},{params['size']},{params['size']}]"
    return f"in:{shape}", f"out:{shape}"


FAMILIES = {"sinkhorn": Family(emit, signature)}


def select(spec: OpSpec) -> Selection | None:
    tokens, size, _ = spec.operands[0].shape
    if size not in SIZES or not isinstance(tokens, str):
        return None
    params = {"eps": float(spec.attrs["eps"]), "iterations": spec.attrs["iterations"], "size": size, "tokens": tokens}
    return Selection((KernelUse(KernelSpec("sinkhorn", tuple(sorted(params.items()))), ("operand:0", "result:0")),))


SELECT = {"sinkhorn": select}

NEEDS = {"sinkhorn": f"matrices of {', '.join(map(str, SIZES))} rows"}
