"""``head_linear``: each head's row by its own matrix, rows of one packed weight.

The matrix as it is stored is a linear map like others: threads share units of its rows (``dots``). Transposed, a lane
of a vector is one of the rows that are summed up: threads share quads of columns, and four sums for each row of x go
through all units of rows in order; then their lanes are added as a tree. Every row of x has the same operations in the
same order whatever is beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from adaptc.backends.cpu.kernels.base import Emitter, Family, Value, chosen_of
from adaptc.backends.cpu.kernels.dots import Floats, dot
from adaptc.backends.cpu.kernels.elementwise import dense
from adaptc.backends.cpu.kernels.linear import CHOICES, Tiles, chunks, store_rows
from adaptc.backends.cpu.kernels.weights import Packed, columns, float_columns, span_at
from adaptc.backends.cpu.levels import Level
from adaptc.backends.cpu.packing import BLOCK, SPAN, code_block_bytes, packable, scale_block_bytes
from adaptc.formats import FORMATS
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection

QUAD = 4
"""Columns that are summed up together."""

TURNED = 2
"""Rows of x that share one reading of transposed columns: with four sums each they fit 16 registers."""


def _matrix(e: Emitter, params: Mapping[str, Any], weight: Value, head: Value) -> Packed:
    """A head's rows of the weight at ``weight``."""
    format, k = FORMATS[params["format"]], params["columns"]
    whole = Packed.of(e, format, params["n"], k, weight)
    block = e.add(e.mul(head, params["step"] // BLOCK), params["start"] // BLOCK)
    return Packed(format, params["rows"], k, e.at(whole.codes, e.mul(block, code_block_bytes(format, k))),
                  e.at(whole.scales, e.mul(block, scale_block_bytes(format, k))))


def _emit_plain(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e, chosen = Emitter(level), chosen_of(CHOICES, params)
    heads, k, rows = params["heads"], params["columns"], params["rows"]
    x, weight, out = (e.buffer(i) for i in range(3))
    units = -(-rows // e.lanes)
    low, high = e.share(heads * units)

    def sweep(tiles: Tiles) -> None:
        with e.loop(low, high) as loop:
            head, unit = e.div(loop.index, units), e.rem(loop.index, units)
            matrix = _matrix(e, params, weight, head)
            here, there = e.at(x, e.mul(head, k), "f32"), e.at(out, e.mul(head, rows), "f32")

            def work(row: Value, tile: int) -> None:
                values = dot(e, matrix, unit, Floats.at(e, heads * k, (here,), row), tile, chosen["ahead"])
                store_rows(e, there, rows, row, unit, values, heads * rows)

            tiles(work)

    chunks(e, e.size(params["tokens"]), k, Floats, chosen, sweep)
    return e.text(symbol)


def _emit_transposed(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e, chosen = Emitter(level), chosen_of(CHOICES, params) | {"tile": TURNED}
    heads, k, rows = params["heads"], params["columns"], params["rows"]
    x, weight, out = (e.buffer(i) for i in range(3))
    per = 1 if FORMATS[params["format"]].is_float else SPAN // QUAD  # quads that a piece of work has
    pieces = k // QUAD // per
    low, high = e.share(heads * pieces)

    def sweep(tiles: Tiles) -> None:
        with e.loop(low, high) as loop:
            head, piece = e.div(loop.index, pieces), e.rem(loop.index, pieces)
            matrix = _matrix(e, params, weight, head)
            here = e.at(x, e.mul(head, rows), "f32")
            for quad in range(per):
                column = e.add(e.mul(piece, per * QUAD), quad * QUAD)
                there = e.at(out, e.add(e.mul(head, k), column), "f32")

                def work(row: Value, tile: int) -> None:
                    inputs = e.at(here, e.mul(row, heads * rows), "f32")
                    results = e.at(there, e.mul(row, heads * k), "f32")
                    sums = _sums(e, matrix, column, quad, [e.at(inputs, i * heads * rows, "f32") for i in range(tile)])
                    for i, parts in enumerate(sums):
                        for c, part in enumerate(parts):
                            e.store(e.reduce(e.add, part), e.at(results, i * heads * k + c, "f32"))

                tiles(work)

    chunks(e, e.size(params["tokens"]), rows, Floats, chosen, sweep)
    return e.text(symbol)


def _sums(e: Emitter, matrix: Packed, column: Value, quad: int, inputs: Sequence[Value]) -> list[list[Value]]:
    """For each row of x, vectors whose lanes add up to its products with four columns from ``column`` on, which are
    quad ``quad`` of their span."""
    rows = matrix.n
    with e.loop(0, matrix.units(e), init=[e.const(0.0, e.floats)] * (QUAD * len(inputs))) as unit:
        first = e.mul(unit.index, e.lanes)
        inside = e.mask(e.sub(rows, first)) if rows % e.lanes else None
        factors = [e.load(e.at(x, first, "f32"), e.floats, mask=inside) for x in inputs]
        sums = list(unit.args)
        for c, number in enumerate(_numbers(e, matrix, unit.index, column, quad)):
            for i, factor in enumerate(factors):
                sums[i * QUAD + c] = e.fma(number, factor, sums[i * QUAD + c])
        unit.end(*sums)
    return [list(unit.results[i * QUAD : (i + 1) * QUAD]) for i in range(len(inputs))]


def _numbers(e: Emitter, matrix: Packed, unit: Value, column: Value, quad: int) -> Iterator[Value]:
    """Values of a unit of rows in each of the four columns."""
    codes, scales = matrix.unit(e, unit)
    if matrix.format.is_float:
        for _, number in float_columns(e, matrix, codes, column, QUAD):
            yield number
        return
    codes, groups = span_at(e, matrix, codes, scales, e.shr(column, SPAN.bit_length() - 1))
    group = groups[quad * len(groups) // (SPAN // QUAD)]
    for _, number in columns(e, matrix.format, codes, [quad]):
        yield e.mul(number, group.scale) if group.minimum is None else e.fma(number, group.scale, group.minimum)


def _signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    heads, rows, k, tokens = (params[name] for name in ("heads", "rows", "columns", "tokens"))
    given, made = (rows, k) if params["transposed"] else (k, rows)
    return (f"in:f32[{tokens},{heads},{given}]", f"weight:{params['format']}[{params['n']},{k}]",
            f"out:f32[{tokens},{heads},{made}]")


def _emit(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    return (_emit_transposed if params["transposed"] else _emit_plain)(params, symbol, level)


def _select(spec: OpSpec) -> Selection | None:
    """None where a head's rows don't begin where a block of packed rows does, or columns aren't whole quads."""
    x, weight = spec.operands
    start, step, rows = (spec.attrs[name] for name in ("start", "step", "rows"))
    format, (n, k) = weight.format, weight.shape
    if format is None or FORMATS.get(format.name) != format or not packable(format, k) or not dense(x):
        return None
    if start % BLOCK or step % BLOCK or k % QUAD:
        return None
    params = {"columns": k, "format": format.name, "heads": x.shape[1], "n": n, "rows": rows, "start": start,
              "step": step, "tokens": x.shape[0], "transposed": spec.attrs["transposed"]}
    kernel = KernelSpec("head_linear", tuple(sorted(params.items())))
    return Selection((KernelUse(kernel, ("operand:0", "operand:1", "result:0")),))


FAMILIES: dict[str, Family] = {"head_linear": Family(_emit, _signature)}
SELECT: dict[str, Callable[[OpSpec], Selection | None]] = {"head_linear": _select}
