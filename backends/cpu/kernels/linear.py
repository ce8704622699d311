"""Matrix products with packed weights: ``linear``, ``linears`` and ``gated_linear``, from f32 or int8 activations.

Threads share the units of all weights (as many output columns as a vector has lanes). A thread keeps one in its caches
and runs over tiles of 4 rows of x, so one kernel serves decoding and prefill; fewer than 4 rows go one by one, and the
last tile overlaps the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adaptc.backends.cpu.kernels.base import Emitter, Family, Value
from adaptc.backends.cpu.kernels.dots import ACTIVATION_KINDS, Codes, Floats, dot
from adaptc.backends.cpu.kernels.vmath import ACTIVATIONS
from adaptc.backends.cpu.kernels.weights import Packed
from adaptc.backends.cpu.levels import Level
from adaptc.backends.cpu.packing import SPAN, packable
from adaptc.formats import FORMATS
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection, TensorSpec

TILE = 4
"""Rows of x that share one reading of a weight block: 2 chains and an accumulator each still fit 16 registers."""

_CACHED_BYTES = 1 << 18
"""Activations that a sweep over the weights works on: a part of a core's second-level cache."""

Work = Callable[[Value, int], None]
"""(first row, number of rows): computes and stores a tile of the result."""

Tiles = Callable[[Work], None]
"""Runs work over the rows of a chunk."""


def _chunks(e: Emitter, rows: Value, k: int, kind: type[Floats | Codes], body: Callable[[Tiles], None]) -> None:
    """Runs ``body`` for every chunk of rows that fits the cache."""
    chunk = max(TILE, _CACHED_BYTES // kind.row_bytes(k) // TILE * TILE)
    with e.loop(0, rows, chunk) as loop:
        count = e.min(e.sub(rows, loop.index), chunk)
        many = e.compare("sge", count, TILE)
        tiled, single = e.select(many, count, 0), e.select(many, 0, count)

        def tiles(work: Work) -> None:
            with e.loop(0, tiled, TILE) as rows_4:
                work(e.add(loop.index, e.min(rows_4.index, e.sub(tiled, TILE))), TILE)
            with e.loop(0, single) as rows_1:
                work(e.add(loop.index, rows_1.index), 1)

        body(tiles)


def store_rows(e: Emitter, out: Value, n: int, row: Value, unit: Value, values: Sequence[Value]) -> None:
    """Writes values[i] to row + i, columns lanes * unit.. of out f32[rows, n], and nothing beyond column n."""
    column = e.mul(unit, e.lanes)
    here = e.at(e.at(out, e.mul(row, n), "f32"), column, "f32")
    inside = e.mask(e.sub(n, column)) if n % e.lanes else None
    for i, value in enumerate(values):
        e.store(value, e.at(here, i * n, "f32"), mask=inside)


def _emit_linears(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    kind, k, shapes, with_bias = ACTIVATION_KINDS[params["x"]], params["k"], params["weights"], params["bias"]
    inputs, count = len(kind.shapes("", k)), len(shapes)
    x = [e.buffer(i) for i in range(inputs)]
    weights = [Packed.of(e, FORMATS[f], n, k, e.buffer(inputs + i)) for i, (f, n) in enumerate(shapes)]
    bias = e.buffer(inputs + count) if with_bias else None
    outs = [e.buffer(inputs + count + with_bias + i) for i in range(count)]
    rows = e.size(params["rows"])
    low, high = e.share(sum(weight.units(e) for weight in weights))

    def product(tiles: Tiles, weight: Packed, out: Value, unit: Value) -> None:
        start = bias_of(e, bias, weight.n, unit)

        def work(row: Value, tile: int) -> None:
            values = dot(e, weight, unit, kind.at(e, k, x, row), tile)
            store_rows(e, out, weight.n, row, unit, [e.add(v, start) if start else v for v in values])

        tiles(work)

    def sweep(tiles: Tiles) -> None:
        before = 0
        for weight, out in zip(weights, outs):
            own = [e.min(e.max(e.sub(end, before), 0), weight.units(e)) for end in (low, high)]
            before += weight.units(e)
            with e.loop(*own) as loop:
                product(tiles, weight, out, loop.index)

    _chunks(e, rows, k, kind, sweep)
    return e.text(symbol)


def bias_of(e: Emitter, bias: Value | None, n: int, unit: Value) -> Value | None:
    if bias is None:
        return None
    column = e.mul(unit, e.lanes)
    here = e.at(bias, column, "f32")
    return e.load(here, e.floats, mask=e.mask(e.sub(n, column)) if n % e.lanes else None)


def _emit_gated(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    kind, k, shapes = ACTIVATION_KINDS[params["x"]], params["k"], params["weights"]
    activation = ACTIVATIONS[params["act"]]
    inputs = len(kind.shapes("", k))
    x = [e.buffer(i) for i in range(inputs)]
    gate, up = (Packed.of(e, FORMATS[f], n, k, e.buffer(inputs + i)) for i, (f, n) in enumerate(shapes))
    out, rows = e.buffer(inputs + 2), e.size(params["rows"])
    low, high = e.share(gate.units(e))

    def sweep(tiles: Tiles) -> None:
        with e.loop(low, high) as loop:

            def work(row: Value, tile: int) -> None:
                here = kind.at(e, k, x, row)
                gates, ups = (dot(e, weight, loop.index, here, tile) for weight in (gate, up))
                store_rows(e, out, gate.n, row, loop.index, [e.mul(activation(e, g), u) for g, u in zip(gates, ups)])

            tiles(work)

    _chunks(e, rows, k, kind, sweep)
    return e.text(symbol)


def _signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    rows, k, shapes = params["rows"], params["k"], params["weights"]
    widths = [n for _, n in shapes][: 1 if "act" in params else None]
    return (
        *(f"in:{shape}" for shape in ACTIVATION_KINDS[params["x"]].shapes(rows, k)),
        *(f"weight:{f}[{n},{k}]" for f, n in shapes),
        *([f"weight:f32[{widths[0]}]"] if params.get("bias") else []),
        *(f"out:f32[{rows},{n}]" for n in widths),
    )


# --- selection --------------------------------------------------------------------------------------------------------

def _params(spec: OpSpec, weights: Sequence[TensorSpec]) -> dict[str, Any] | None:
    """What all three families share, or None where they don't apply."""
    x = spec.operands[0]
    kind = ACTIVATION_KINDS.get(x.dtype)
    if kind is None or len(x.shape) != 2 or not isinstance(x.shape[1], int):
        return None
    rows, k = x.shape
    if kind is Codes and k % SPAN:
        return None
    for weight in weights:
        if weight.format is None or FORMATS.get(weight.format.name) != weight.format:
            return None
        if len(weight.shape) != 2 or weight.shape[1] != k or not packable(weight.format, k):
            return None
    shapes = tuple((weight.format.name, weight.shape[0]) for weight in weights)
    return {"rows": rows, "k": k, "x": x.dtype, "weights": shapes}


def _inputs(spec: OpSpec) -> int:
    return 3 if spec.operands[0].dtype == Codes.dtype else 1


def _use(family: str, params: Mapping[str, Any], spec: OpSpec) -> Selection:
    args = [f"operand:{i}" for i in range(len(spec.operands))] + [f"result:{i}" for i in range(len(spec.results))]
    return Selection((KernelUse(KernelSpec(family, tuple(sorted(params.items()))), tuple(args)),))


def _select_linear(spec: OpSpec) -> Selection | None:
    first = _inputs(spec)
    rest = [operand for operand in spec.operands[first + 1 :] if operand is not None]
    params = _params(spec, spec.operands[first : first + 1])
    if params is None or len(rest) > 1 or any(b.dtype != "f32" or len(b.shape) != 1 for b in rest):
        return None
    present = OpSpec(spec.op, tuple(o for o in spec.operands if o is not None), spec.results, spec.attrs)
    return _use("linears", {**params, "bias": bool(rest)}, present)


def _select_linears(spec: OpSpec) -> Selection | None:
    params = _params(spec, spec.operands[_inputs(spec) :])
    return None if params is None else _use("linears", {**params, "bias": False}, spec)


def _select_gated(spec: OpSpec) -> Selection | None:
    params = _params(spec, spec.operands[_inputs(spec) :])
    if params is None or spec.attrs["act"] not in ACTIVATIONS or len(params["weights"]) != 2:
        return None
    return _use("gated_linear", {**params, "act": spec.attrs["act"]}, spec)


FAMILIES: dict[str, Family] = {
    "linears": Family(_emit_linears, _signature),
    "gated_linear": Family(_emit_gated, _signature),
}

SELECT: dict[str, Callable[[OpSpec], Selection | None]] = {
    "linear": _select_linear,
    "linears": _select_linears,
    "gated_linear": _select_gated,
}
