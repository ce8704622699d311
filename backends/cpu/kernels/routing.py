"""Choices and what they choose: ``top_k`` and linear maps of chosen experts.

``expert_linear`` reads the matrices of chosen experts and no others. Threads share the units of every expert (as
many output columns as a vector has lanes). A step with no more choices than experts takes them one by one; else a
thread keeps one unit of one expert in its caches and runs over the choices of that expert. Every choice is one row by itself, with the same
operations in the same order either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from adaptc.backends.cpu.kernels.base import Emitter, Family, Value
from adaptc.backends.cpu.kernels.dots import Floats, dot
from adaptc.backends.cpu.kernels.elementwise import dense, describe, product
from adaptc.backends.cpu.kernels.linear import bias_of, store_rows
from adaptc.backends.cpu.kernels.weights import Packed
from adaptc.backends.cpu.levels import Level
from adaptc.backends.cpu.packing import packable, packed_bytes
from adaptc.formats import FORMATS
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection

# ---- top_k


def emit_top_k(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """k sweeps over a row: each finds the largest element that comes after the last one found, by value and then by
    index. Elements that are NaN are never found; where all are, the indices are 0."""
    e = Emitter(level)
    *lead, count = params["shape"]
    k = params["k"]
    x, values, indices = (e.buffer(i) for i in range(3))
    low, high = e.share(product(e, lead))
    infinite, none = e.const(math.inf, "f32"), e.const(-1, "i64")
    with e.loop(low, high) as row:
        start = e.at(x, e.mul(row.index, count), "f32")
        with e.loop(0, k, init=[infinite, none]) as slot:
            last, place = slot.args
            with e.loop(0, count, init=[e.const(-math.inf, "f32"), none]) as column:
                best, where = column.args
                value = e.load(e.at(start, column.index, "f32"), "f32")
                tie = e.and_(e.compare("oeq", value, last), e.compare("sgt", column.index, place))
                after = e.or_(e.compare("olt", value, last), tie)
                better = e.or_(e.compare("ogt", value, best), e.compare("slt", where, 0))
                take = e.and_(after, better)
                column.end(e.select(take, value, best), e.select(take, column.index, where))
            best, where = column.results
            out = e.add(e.mul(row.index, k), slot.index)
            e.store(best, e.at(values, out, "f32"))
            e.store(e.cast("trunci", e.max(where, 0), "i32"), e.at(indices, out, "i32"))
            slot.end(best, where)
    return e.text(symbol)


def top_k_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    result = (*params["shape"][:-1], params["k"])
    return tuple(f"{role}:{describe(kind, shape)}" for role, kind, shape in (
        ("in", "f32", params["shape"]), ("out", "f32", result), ("out", "i32", result)))


def select_top_k(spec: OpSpec) -> Selection | None:
    (x,) = spec.operands
    if not dense(x) or x.dtype != "f32":
        return None
    kernel = KernelSpec("top_k", (("k", spec.attrs["k"]), ("shape", x.shape)))
    return Selection((KernelUse(kernel, ("operand:0", "result:0", "result:1")),))


# ---- expert_linear


def emit_experts(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    experts, n, k, slots = (params[name] for name in ("experts", "n", "k", "slots"))
    format, with_bias = FORMATS[params["format"]], params["bias"]
    x, chosen, weight = (e.buffer(i) for i in range(3))
    bias = e.buffer(3) if with_bias else None
    out = e.buffer(3 + with_bias)
    choices = e.mul(e.size(params["rows"]), slots)
    few = e.compare("sle", choices, experts)
    rounds = e.select(few, e.const(1, "i64"), e.const(experts, "i64"))

    def work(choice: Value, expert: Value, unit: Value) -> None:
        own = Packed.of(e, format, n, k, e.at(weight, e.mul(expert, packed_bytes(format, (n, k)))))
        row = choice if params["each"] else e.div(choice, slots)
        (value,) = dot(e, own, unit, Floats.at(e, k, (x,), row), 1)
        start = bias_of(e, e.at(bias, e.mul(expert, n), "f32") if bias else None, n, unit)
        store_rows(e, out, n, choice, unit, [e.add(value, start) if start else value])

    with e.loop(*e.share(-(-n // e.lanes))) as unit:
        with e.loop(0, rounds) as expert:
            with e.loop(0, choices) as choice:
                own = e.cast("extsi", e.load(e.at(chosen, choice.index, "i32"), "i32"), "i64")
                with e.when(e.or_(few, e.compare("eq", own, expert.index))):
                    work(choice.index, own, unit.index)
    return e.text(symbol)


def experts_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    experts, n, k, slots, rows = (params[name] for name in ("experts", "n", "k", "slots", "rows"))
    return (
        f"in:f32[{rows},{f'{slots},' if params['each'] else ''}{k}]",
        f"in:i32[{rows},{slots}]",
        f"weight:{params['format']}[{experts},{n},{k}]",
        *([f"weight:f32[{experts},{n}]"] if params["bias"] else []),
        f"out:f32[{rows},{slots},{n}]",
    )


def select_experts(spec: OpSpec) -> Selection | None:
    x, chosen, weight, *bias = spec.operands
    format = weight.format
    if format is None or FORMATS.get(format.name) != format or not packable(format, weight.shape[2]):
        return None
    if not all(map(dense, (x, chosen, *bias))) or x.dtype != "f32" or chosen.dtype != "i32":
        return None
    params = {
        "bias": bool(bias), "each": len(x.shape) == 3, "experts": weight.shape[0], "format": format.name,
        "k": weight.shape[2], "n": weight.shape[1], "rows": chosen.shape[0], "slots": chosen.shape[1],
    }  # fmt: skip
    args = tuple(f"operand:{i}" for i in range(len(spec.operands))) + ("result:0",)
    return Selection((KernelUse(KernelSpec("expert_linear", tuple(sorted(params.items()))), args),))


FAMILIES: dict[str, Family] = {
    "top_k": Family(emit_top_k, top_k_signature),
    "expert_linear": Family(emit_experts, experts_signature),
}
SELECT: dict[str, Callable[[OpSpec], Selection | None]] = {"top_k": select_top_k, "expert_linear": select_experts}
