"""Matrix products with packed weights: ``linear``, ``linears`` and ``gated_linear``, from f32 or int8 activations.

Threads share the units of all weights (as many output columns as a vector has lanes). A thread keeps one in its caches
and runs over tiles of rows of x, so one kernel serves decoding and prefill; fewer rows than a tile go one by one, and
the last tile overlaps the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adaptc.backends.cpu.kernels.base import Emitter, Family, Value, chosen_of
from adaptc.backends.cpu.kernels.dots import ACTIVATION_KINDS, Codes, Floats, dot
from adaptc.backends.cpu.kernels.vmath import ACTIVATIONS
from adaptc.backends.cpu.kernels.weights import Packed
from adaptc.backends.cpu.levels import Level
from adaptc.backends.cpu.packing import SPAN, packable
from adaptc.formats import FORMATS
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection, TensorSpec

CHOICES: Mapping[str, tuple[int, ...]] = {
    # rows of x that share one reading of a weight block: of 4, 2 chains and an accumulator each fit 16 registers
    "tile": (4, 2, 3, 6, 8),
    # bytes before they are needed that one row asks for codes; 0 = not. What a machine fetches by itself ends at each
    # 4 KiB: asking took decoding with weights in memory to 0.75-0.9 of the time, on one core and on two
    "ahead": (2048, 0, 1024, 3072, 4096),
    # bytes of activations that a sweep over the weights works on: a part of a core's second-level cache
    "chunk": (1 << 18, 1 << 16, 1 << 17, 1 << 19),
}
"""What tuning may choose. None of it enters the arithmetic of a row of x."""

Work = Callable[[Value, int], None]
"""(first row, number of rows): computes and stores a tile of the result."""

Tiles = Callable[[Work], None]
"""Runs work over the rows of a chunk."""


def chunks(e: Emitter, rows: Value, k: int, kind: type[Floats | Codes], chosen: Mapping[str, int],
           body: Callable[[Tiles], None]) -> None:
    """Runs ``body`` for every chunk of rows that fits the cache."""
    tile = chosen["tile"]
    chunk = max(tile, chosen["chunk"] // kind.row_bytes(k) // tile * tile)
    with e.loop(0, rows, chunk) as loop:
        count = e.min(e.sub(rows, loop.index), chunk)
        many = e.compare("sge", count, tile)
        tiled, single = e.select(many, count, 0), e.select(many, 0, count)

        def tiles(work: Work) -> None:
            with e.loop(0, tiled, tile) as first:
                work(e.add(loop.index, e.min(first.index, e.sub(tiled, tile))), tile)
            with e.loop(0, single) as row:
                work(e.add(loop.index, row.index), 1)

        body(tiles)


def store_rows(e: Emitter, out: Value, n: int, row: Value, unit: Value, values: Sequence[Value], apart: int = 0) -> None:
    """Writes values[i] to row + i, columns lanes * unit.. of out f32[rows, n], and nothing beyond column n. Rows stand
    ``apart`` elements from each other, by default n."""
    apart = apart or n
    column = e.mul(unit, e.lanes)
    here = e.at(e.at(out, e.mul(row, apart), "f32"), column, "f32")
    inside = e.mask(e.sub(n, column)) if n % e.lanes else None
    for i, value in enumerate(values):
        e.store(value, e.at(here, i * apart, "f32"), mask=inside)


Map = tuple[Packed, Value | None]
"""A weight and its bias."""


def _buffers(e: Emitter, params: Mapping[str, Any]) -> tuple[list[Value], list[Map], int]:
    """The activation's buffers, the maps', and the number of the first one after them. Each weight is followed by
    its bias if it has one."""
    k = params["k"]
    place = len(ACTIVATION_KINDS[params["x"]].shapes("", k))
    x, maps = [e.buffer(i) for i in range(place)], []
    for (f, n), biased in zip(params["weights"], params["bias"], strict=True):
        maps.append((Packed.of(e, FORMATS[f], n, k, e.buffer(place)), e.buffer(place + 1) if biased else None))
        place += 1 + biased
    return x, maps, place


def _emit_linears(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e, chosen = Emitter(level), chosen_of(CHOICES, params)
    kind, k = ACTIVATION_KINDS[params["x"]], params["k"]
    x, maps, after = _buffers(e, params)
    outs = [e.buffer(after + i) for i in range(len(maps))]
    rows = e.size(params["rows"])
    low, high = e.share(sum(weight.units(e) for weight, _ in maps))

    def product(tiles: Tiles, weight: Packed, bias: Value | None, out: Value, unit: Value) -> None:
        start = bias_of(e, bias, weight.n, unit)

        def work(row: Value, tile: int) -> None:
            values = dot(e, weight, unit, kind.at(e, k, x, row), tile, chosen["ahead"])
            store_rows(e, out, weight.n, row, unit, [e.add(v, start) if start else v for v in values])

        tiles(work)

    def sweep(tiles: Tiles) -> None:
        before = 0
        for (weight, bias), out in zip(maps, outs):
            own = [e.min(e.max(e.sub(end, before), 0), weight.units(e)) for end in (low, high)]
            before += weight.units(e)
            with e.loop(*own) as loop:
                product(tiles, weight, bias, out, loop.index)

    chunks(e, rows, k, kind, chosen, sweep)
    return e.text(symbol)


def bias_of(e: Emitter, bias: Value | None, n: int, unit: Value) -> Value | None:
    if bias is None:
        return None
    column = e.mul(unit, e.lanes)
    here = e.at(bias, column, "f32")
    return e.load(here, e.floats, mask=e.mask(e.sub(n, column)) if n % e.lanes else None)


def _emit_gated(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e, chosen = Emitter(level), chosen_of(CHOICES, params)
    kind, k, activation = ACTIVATION_KINDS[params["x"]], params["k"], ACTIVATIONS[params["act"]]
    x, maps, after = _buffers(e, params)
    gate = maps[0][0]
    out, rows = e.buffer(after), e.size(params["rows"])
    low, high = e.share(gate.units(e))

    def sweep(tiles: Tiles) -> None:
        with e.loop(low, high) as loop:
            starts = [bias_of(e, bias, gate.n, loop.index) for _, bias in maps]

            def work(row: Value, tile: int) -> None:
                here = kind.at(e, k, x, row)
                products = [dot(e, weight, loop.index, here, tile, chosen["ahead"]) for weight, _ in maps]
                gates, ups = ([e.add(v, start) if start else v for v in values]
                              for values, start in zip(products, starts))
                store_rows(e, out, gate.n, row, loop.index, [e.mul(activation(e, g), u) for g, u in zip(gates, ups)])

            tiles(work)

    chunks(e, rows, k, kind, chosen, sweep)
    return e.text(symbol)


def _signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    rows, k, shapes = params["rows"], params["k"], params["weights"]
    widths = [n for _, n in shapes][: 1 if "act" in params else None]
    return (
        *(f"in:{shape}" for shape in ACTIVATION_KINDS[params["x"]].shapes(rows, k)),
        *(text for (f, n), biased in zip(shapes, params["bias"], strict=True)
          for text in (f"weight:{f}[{n},{k}]", f"weight:f32[{n}]")[: 1 + biased]),
        *(f"out:f32[{rows},{n}]" for n in widths),
    )


# --- selection --------------------------------------------------------------------------------------------------------

def _params(spec: OpSpec) -> dict[str, Any] | None:
    """What all families share, or None where they don't apply."""
    x = spec.operands[0]
    kind = ACTIVATION_KINDS.get(x.dtype)
    if kind is None or len(x.shape) != 2 or not isinstance(x.shape[1], int):
        return None
    rows, k = x.shape
    if kind is Codes and k % SPAN:
        return None
    maps: list[list[TensorSpec]] = []
    for operand in spec.operands[3 if kind is Codes else 1 :]:
        if operand is not None and len(operand.shape) == 1 and maps:
            maps[-1].append(operand)
        elif operand is not None:
            maps.append([operand])
    for weight, *bias in maps:
        if weight.format is None or FORMATS.get(weight.format.name) != weight.format:
            return None
        if len(weight.shape) != 2 or weight.shape[1] != k or not packable(weight.format, k):
            return None
        if len(bias) > 1 or any(b.dtype != "f32" or b.format is not None for b in bias):
            return None
    shapes = tuple((weight.format.name, weight.shape[0]) for weight, *_ in maps)
    return {"rows": rows, "k": k, "x": x.dtype, "weights": shapes, "bias": tuple(len(one) == 2 for one in maps)}


def _use(family: str, params: Mapping[str, Any], spec: OpSpec) -> Selection:
    operands = [i for i, operand in enumerate(spec.operands) if operand is not None]
    args = [*(f"operand:{i}" for i in operands), *(f"result:{i}" for i in range(len(spec.results)))]
    return Selection((KernelUse(KernelSpec(family, tuple(sorted(params.items()))), tuple(args)),))


def _select_linears(spec: OpSpec) -> Selection | None:
    params = _params(spec)
    return None if params is None else _use("linears", params, spec)


def _select_gated(spec: OpSpec) -> Selection | None:
    params = _params(spec)
    if params is None or spec.attrs["act"] not in ACTIVATIONS or len(params["weights"]) != 2:
        return None
    return _use("gated_linear", {**params, "act": spec.attrs["act"]}, spec)


FAMILIES: dict[str, Family] = {
    "linears": Family(_emit_linears, _signature, CHOICES),
    "gated_linear": Family(_emit_gated, _signature, CHOICES),
}

SELECT: dict[str, Callable[[OpSpec], Selection | None]] = {
    "linear": _select_linears,
    "linears": _select_linears,
    "gated_linear": _select_gated,
}
