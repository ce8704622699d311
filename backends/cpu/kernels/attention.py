"""Attention over paged keys and values: ``kv_append`` writes the step's rows, ``attend`` reads all rows in place,
``attend_merge`` puts together what threads have shared.

A row is the softmax of one token and query head. Its keys lie in spans of ``SPAN_BLOCKS`` blocks of ``key_block`` keys,
both at absolute positions. A span's blocks are visited in order with a running maximum and sum, and a row's spans, each
reduced by itself, are merged in order. A block or span without a visible key is left out, and a key that is not visible
is never multiplied. So a row's bits depend on its own query and keys only. Everything else here is shared work that
doesn't enter any row's arithmetic: rows of neighbouring tokens and of the query heads that share a key head read a
block together, and threads share tiles of tokens, sets of heads and spans (``Division``).

Latent attention is the same over one part whose rows are keys of all heads, and whose first columns are their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from adaptc.backends.cpu.kernels import vmath
from adaptc.backends.cpu.kernels.base import Emitter, Family, Value, vec
from adaptc.backends.cpu.kernels.division import TILE_ROWS, Count, Division, Unit, first_key, seen, tile_tokens
from adaptc.backends.cpu.kernels.elementwise import STORED, narrow
from adaptc.backends.cpu.kernels.online_softmax import TOGETHER, Bias, Copied, Rows, Running, Stored, Visit
from adaptc.backends.cpu.kernels.pages import (COLUMNS, Block, Pages, common_lanes, load_index, page_elements, part_widths,
                                               room)
from adaptc.backends.cpu.levels import Level
from adaptc.options import KEPT
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection, StateSpec, TensorSpec

SPAN_BLOCKS = 8
"""Key blocks of a span. With 32 keys a block, a span of 64 columns in f16 is 64 KB of cache for a key head, which a
core reads in some 4 µs; a row's piece of it is then 1 % of what was read."""

SLOTS = 1024
"""Pieces that threads can share in one step at least, about 300 KB with 64 columns."""

WIDEST = 16
"""Lanes of the widest level's vectors."""


# ---- kv_append


def _quantized(e: Emitter, source: Value, width: int, lanes: int, codes: Value, scale: Value) -> None:
    """A row as codes from -127 to 127 of its largest value, and the scale that they are multiplied by. A value that is
    infinite or not a number makes the scale so, and there are no codes."""
    floats = vec(lanes, "f32")
    with e.loop(0, width, lanes, [e.const(0.0, floats)]) as column:
        row = e.load(e.at(source, column.index, "f32"), floats)
        column.end(vmath.maximum(e, column.args[0], vmath.absolute(e, row)))
    step = e.div(e.reduce(lambda a, b: vmath.maximum(e, a, b), column.results[0]), 127.0)
    e.store(step, scale)
    coded = e.splat(e.and_(e.compare("ogt", step, 0.0), e.compare("olt", step, math.inf)), lanes)
    with e.loop(0, width, lanes) as column:
        row = e.div(e.load(e.at(source, column.index, "f32"), floats), e.splat(step, lanes))
        row = e.max(e.min(e.math("roundeven", e.select(coded, row, 0.0)), 127.0), -127.0)
        e.store(e.cast("trunci", e.cast("fptosi", row, "i32"), "i8"), e.at(codes, column.index))


def emit_append(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    widths = part_widths(params)
    *given, positions, requests, pool, table = (e.buffer(i) for i in range(len(widths) + 4))
    pages, heads, dtype = Pages(e, params, pool, table), params["kv_heads"], params["dtype"]
    lanes = common_lanes(e, params)
    floats = vec(lanes, "f32")
    low, high = e.share(e.mul(e.size("T"), heads))

    def append(unit: Value, token: Value, row: Value) -> None:
        head = e.rem(unit, heads)
        page, slot = pages.at(load_index(e, requests, token), row)
        scales = pages.scales(page, slot, head) or (None,) * len(widths)
        for source, width, target, scale in zip(given, widths, pages.rows(page, slot, head), scales):
            start = e.at(source, e.mul(unit, width), "f32")
            if scale is not None:
                _quantized(e, start, width, lanes, target, scale)
                continue
            with e.loop(0, width, lanes) as column:
                values = e.load(e.at(start, column.index, "f32"), floats)
                e.store(narrow(e, values, dtype), e.at(target, column.index, STORED[dtype]))

    with e.loop(low, high) as unit:
        token = e.div(unit.index, heads)
        position, rate = load_index(e, positions, token), params["rate"]
        if rate == 1:
            append(unit.index, token, position)
        else:
            with e.when(e.compare("eq", e.rem(position, rate), rate - 1)):
                append(unit.index, token, e.div(position, rate))
    return e.text(symbol)


# ---- attend


def pieces_of(group: int) -> list[tuple[int, int, int]]:
    """How the rows of a token fall into sets that share loads, of nearly equal size: (from, to, rows a set)."""
    size = -(-group // -(-group // TOGETHER))
    short = -(-group // size) * size - group
    whole = group - short * (size - 1)
    return [s for s in ((0, whole, size), (whole, group, size - 1)) if s[0] < s[1]]


def emit_attend(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """Units by ``Division``: each span into a piece of its own, in a slot where the unit is split; else merged into
    the row at once."""
    e = Emitter(level)
    heads, group = params["heads"], params["heads"] // params["sets"]
    width, value_width, block, span = (params[k] for k in ("width", "value_width", "key_block", "span"))
    query, positions, requests, pool, table, *more = (e.buffer(i) for i in range(len(attend_signature(params))))
    sinks = more.pop(0) if params["sinks"] or params["query_sinks"] else None
    slopes = more.pop(0) if params["slopes"] else None
    distances = more.pop(0) if params["distances"] else None
    slots = more.pop(0) if params["slots"] else None
    lse = more.pop() if params["lse"] else None
    out = more.pop()
    rows, visit, copied = Rows(e, params), Visit(e, params), Copied(e, params)
    floats = rows.floats
    stored = Block(e, params, Pages(e, params, pool, table))
    most_rows = tile_tokens(params) * group
    pieces, tops, totals = (room(e, most_rows * size) for size in (rows.size, rows.lanes, rows.lanes))
    tokens_together = max(1, TOGETHER // group)

    def offset_of(unit: Unit, row: Value) -> Value:
        """A row's number among all rows of q, from that among the unit's."""
        token = e.add(unit.first, e.div(row, group))
        return e.add(e.mul(token, heads), e.add(e.mul(unit.set, group), e.rem(row, group)))

    def position_of(unit: Unit, row: Value) -> Value:
        return e.add(unit.position, e.div(row, group))

    def bias(unit: Unit, row: Value, base: Value) -> Bias:
        offset = offset_of(unit, row)
        slope = e.load(e.at(slopes, e.rem(offset, heads), "f32"), "f32") if slopes else None
        own = e.at(distances, e.mul(offset, params["distances"]), "f32") if distances else None
        return Bias(e.sub(position_of(unit, row), base), slope, own)

    def each_row(unit: Unit, body: Callable[[Value], None]) -> None:
        with e.loop(0, division.rows(unit)) as row:
            body(row.index)

    def whole(unit: Unit, row: Value) -> Running:
        values = e.at(out, e.mul(offset_of(unit, row), value_width), "f32")
        return Running(e.at(tops, row, floats), e.at(totals, row, floats), values)

    def look(unit: Unit, place: Value, data: Stored | Copied, base: Value, token: Value, count: int = 1) -> None:
        """The rows of ``count`` tokens from the unit's ``token`` on, over the keys that the first of them sees: all of
        the block's, if there are several tokens."""
        position = e.add(unit.position, token)
        low = e.max(e.sub(first_key(e, params, position), base), 0)
        high = e.min(e.sub(seen(e, params, position), base), block)

        def run(first: Value, number: int) -> None:
            chosen = [e.add(first, i) for i in range(number)]
            queries = [e.at(query, e.mul(offset_of(unit, row), width), "f32") for row in chosen]
            biases = [bias(unit, row, base) for row in chosen] if slopes or distances else None
            visit(data, [rows.piece(place, row) for row in chosen], queries, low, high, biases)

        with e.when(e.compare("slt", low, high)):
            first = e.mul(token, group)
            for begin, end, number in [(0, count * group, count * group)] if count > 1 else pieces_of(group):
                if end - begin == number:
                    run(e.add(first, begin), number)
                else:
                    with e.loop(begin, end, number) as h:
                        run(e.add(first, h.index), number)

    def look_at_copy(unit: Unit, place: Value, base: Value) -> None:
        """All tokens; several together where each of them sees the whole block."""
        count = e.sub(unit.end, unit.first)
        with e.loop(0, count, tokens_together) as token:
            end = e.add(token.index, tokens_together)
            if tokens_together > 1:
                sees = e.compare("sge", seen(e, params, e.add(unit.position, token.index)), e.add(base, block))
                last = first_key(e, params, e.add(unit.position, e.sub(end, 1)))
                all_see = e.and_(e.and_(e.compare("sle", end, count), sees), e.compare("sle", last, base))
                with e.when(all_see):
                    look(unit, place, copied, base, token.index, tokens_together)
                end = e.select(all_see, token.index, e.min(end, count))
            with e.loop(token.index, end) as one:
                look(unit, place, copied, base, one.index)

    def attend(unit: Unit, number: Value, place: Value) -> None:
        """All of a unit's rows over one span, into pieces that start at ``place``."""
        each_row(unit, lambda row: rows.clear(rows.piece(place, row)))
        request, one = load_index(e, requests, unit.first), e.compare("eq", e.sub(unit.end, unit.first), 1)
        head = unit.set if params["kv_heads"] == params["sets"] else e.div(unit.set, params["sets"] // params["kv_heads"])
        start = e.mul(number, span)
        end = seen(e, params, e.add(unit.position, e.sub(e.sub(unit.end, unit.first), 1)))
        least, most = e.max(start, first_key(e, params, unit.position)), e.min(e.add(start, span), end)
        with e.loop(e.div(least, block), e.div(e.add(most, block - 1), block)) as index:
            base = e.mul(index.index, block)
            after = e.add(base, block)
            low, high = e.max(base, least), e.min(after, most)
            if params["latent"]:  # so many heads read a block that copying it pays for one token too
                data = Stored(e, params, stored.find(request, head, low, high), None)
                copied.fill(data, e.sub(low, base), e.sub(high, base))
                look_at_copy(unit, place, base)
            else:
                ahead = stored.ahead(request, head, after, e.min(e.add(after, block), end))
                data = Stored(e, params, stored.find(request, head, low, high), ahead)
                with e.when(one):
                    look(unit, place, data, base, e.const(0, "i64"))
                with e.when(e.xor(one, True)):
                    copied.fill(data, e.sub(low, base), e.sub(high, base))
                    look_at_copy(unit, place, base)

    division = Division(e, params, positions, requests)

    def work(unit: Unit) -> None:
        low, high = division.mine(unit)
        with e.when(e.compare("slt", low, high)):
            alone = e.xor(unit.split, True)
            with e.when(alone):
                each_row(unit, lambda row: rows.clear(whole(unit, row)))
            with e.loop(low, high) as number:
                place = pieces
                if slots:
                    slot = e.add(unit.base, e.mul(division.rows(unit), e.sub(number.index, unit.low)))
                    place = e.select(unit.split, rows.piece(slots, slot).top, pieces)
                attend(unit, number.index, place)

                def add(row: Value) -> None:
                    with e.when(rows.sees(position_of(unit, row), number.index)):
                        rows.merge(whole(unit, row), rows.piece(place, row))

                with e.when(alone):
                    each_row(unit, add)

            def finish(row: Value) -> None:
                offset = offset_of(unit, row)
                number = offset if params["query_sinks"] else e.rem(offset, heads)
                rows.finish(whole(unit, row), e.at(sinks, number, "f32") if sinks else None,
                            e.at(lse, offset, "f32") if lse else None)

            with e.when(alone):
                each_row(unit, finish)

    division.units(work)
    return e.text(symbol)


# ---- attend_merge


def emit_merge(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """Rows of split units, from the pieces that ``attend`` has left in slots."""
    e = Emitter(level)
    heads, group = params["heads"], params["heads"] // params["sets"]
    positions, requests, *more = (e.buffer(i) for i in range(len(merge_signature(params))))
    sinks = more.pop(0) if params["sinks"] or params["query_sinks"] else None
    slots, out, *lse = more
    rows = Rows(e, params)
    top, total = room(e, rows.lanes), room(e, rows.lanes)
    with e.when(e.compare("sgt", e.n, 1)):
        division, turn = Division(e, params, positions, requests), Count(e)

        def work(unit: Unit) -> None:
            count = division.rows(unit)
            with e.when(unit.split), e.loop(0, count) as row:
                mine = e.compare("eq", e.rem(turn.get(), e.n), e.tid)
                turn.set(e.add(turn.get(), 1))
                with e.when(mine):
                    number = e.div(row.index, group)
                    head = e.add(e.mul(unit.set, group), e.rem(row.index, group))
                    offset = e.add(e.mul(e.add(unit.first, number), heads), head)
                    whole = Running(top, total, e.at(out, e.mul(offset, params["value_width"]), "f32"))
                    rows.clear(whole)
                    with e.loop(unit.low, unit.high) as span:
                        with e.when(rows.sees(e.add(unit.position, number), span.index)):
                            slot = e.add(unit.base, e.add(e.mul(count, e.sub(span.index, unit.low)), row.index))
                            rows.merge(whole, rows.piece(slots, slot))
                    number = offset if params["query_sinks"] else head
                    rows.finish(whole, e.at(sinks, number, "f32") if sinks else None,
                                e.at(lse[0], offset, "f32") if lse else None)

        division.units(work)
    return e.text(symbol)


# ---- declaration


def state_of(params: Mapping[str, Any]) -> tuple[str, str]:
    return f"state:{params['dtype']}[pages,{page_elements(params)}]", f"pages:i32[R,{params['max_pages']}]"


def append_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    heads = "" if params["latent"] else f"{params['kv_heads']},"
    rows = (f"in:f32[T,{heads}{width}]" for width in part_widths(params))
    return (*rows, "in:i32[T]", "in:i32[T]", *state_of(params))


def _pieces(params: Mapping[str, Any]) -> TensorSpec:
    """Memory for the pieces of split units, for vectors as wide as any level's."""
    return TensorSpec("f32", (params["slots"], params["value_width"] + 2 * WIDEST))


def _shared(params: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Entries for those of sinks and slopes that there are, one a head or a query, and for pieces, none or one."""
    shapes = {"sinks": "", "query_sinks": "T,", "slopes": ""}
    extras = [f"in:f32[{tokens}{params['heads']}]" for name, tokens in shapes.items() if params.get(name)]
    slots, size = _pieces(params).shape
    return extras, [f"scratch:f32[{slots},{size}]"] if slots else []


def attend_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    query, out = (f"f32[T,{params['heads']},{params[name]}]" for name in ("width", "value_width"))
    extras, slots = _shared(params)
    extras += [f"in:f32[T,{params['heads']},{params['distances']}]"] if params["distances"] else []
    return (f"in:{query}", "in:i32[T]", "in:i32[T]", *state_of(params), *extras, *slots, f"out:{out}", *lse_of(params))


def merge_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    sinks, slots = _shared(params)
    out = f"out:f32[T,{params['heads']},{params['value_width']}]"
    return ("in:i32[T]", "in:i32[T]", *sinks, *slots, out, *lse_of(params))


def lse_of(params: Mapping[str, Any]) -> list[str]:
    """An entry for the logarithms of rows' sums, if they are wanted."""
    return [f"out:f32[T,{params['heads']}]"] if params["lse"] else []


FAMILIES = {
    "kv_append": Family(emit_append, append_signature),
    "attend": Family(emit_attend, attend_signature),
    "attend_merge": Family(emit_merge, merge_signature),
}


def slots_for(state: StateSpec, heads: int) -> int:
    """Pieces (a row over a span) that one step can share between threads: all spans of one token, and at least
    ``SLOTS``; none where a context is one span."""
    span = SPAN_BLOCKS * state.key_block
    context = state.max_pages * state.page_size
    spans = -(-context // span)
    if state.window:
        spans = min(spans, -(-state.window // span) + 1)
    return max(heads * spans, SLOTS) if spans > 1 else 0


def select(spec: OpSpec) -> Selection | None:
    """Every row is written before any is read, and every piece before any is merged: a kernel each. None for widths
    that don't fill vectors. Between the queries and positions, requests and the state stand the rows that are kept,
    none in a ``recall``. Where a state has one part, a value is the first columns of its row."""
    place = next(i for i, operand in enumerate(spec.operands) if isinstance(operand, StateSpec))
    (_, heads, width), state = spec.operands[0].shape, spec.operands[place]
    kept = [f"operand:{i}" for i in range(1, place - 2)]
    extras = {name: f"operand:{place + 1 + i}" for i, name in enumerate(spec.attrs.get("extras", ()))}
    distances = next((spec.operands[place + 1 + i].shape[2] for i, name in enumerate(extras) if name == "distances"), 0)
    latent, kv_heads = len(state.parts) == 1, state.parts[0][1]
    value_width = int(spec.attrs["value_width"]) if latent else state.parts[1][2]
    if any(size % COLUMNS for size in (width, value_width, state.key_block)):
        return None
    if (state.dtype, state.scale) not in KEPT.values():
        return None
    paging = {
        "dtype": state.dtype, "kv_heads": kv_heads, "latent": latent, "max_pages": state.max_pages,
        "page_size": state.page_size, "rate": state.rate, "scale": state.scale, "value_width": value_width, "width": width,
    }  # fmt: skip
    division = {
        "chunked": bool(spec.attrs.get("chunked", False)), "heads": heads, "lse": len(spec.results) > 1,
        "query_sinks": "query_sinks" in extras, "sets": _sets(heads) if latent else kv_heads, "sinks": "sinks" in extras,
        "rate": state.rate, "slots": slots_for(state, heads), "span": SPAN_BLOCKS * state.key_block,
        "value_width": value_width,
        "window": int(spec.attrs.get("window", 0)),
    }  # fmt: skip
    attend = paging | division | {
        "distances": distances, "key_block": state.key_block, "scaling": float(spec.attrs["scaling"]),
        "slopes": "slopes" in extras, "softcap": float(spec.attrs.get("softcap", 0.0)),
    }  # fmt: skip
    merge = division | {"width": width, "key_block": state.key_block}  # which decide the vectors
    where, cache = (f"operand:{place - 2}", f"operand:{place - 1}"), (f"state:{place}", f"pages:{place}")
    slots = ["scratch:0"] if division["slots"] else []
    merged = [operand for name, operand in extras.items() if name in ("sinks", "query_sinks")]
    append = [("kv_append", paging, (*kept, *where, *cache))] if kept else []
    results = [f"result:{i}" for i in range(len(spec.results))]
    if "rows" in extras:
        return _select_chosen(append, paging, attend, spec.operands[-1].shape[1], extras,
                              ("operand:0", where[1], *cache, *extras.values(), *results))
    uses = [*append, ("attend", attend, ("operand:0", *where, *cache, *extras.values(), *slots, *results))]
    if slots:
        uses.append(("attend_merge", merge, (*where, *merged, *slots, *results)))
    return Selection(uses_of(uses), (_pieces(division),) if division["slots"] else ())


def _select_chosen(append: list[tuple], paging: Mapping[str, Any], attend: Mapping[str, Any], chosen: int,
                   extras: Mapping[str, str], args: tuple[str, ...]) -> Selection | None:
    """``attend_rows`` in place of ``attend``, which has neither biases by distance nor sinks of queries."""
    if set(extras) - {"sinks", "rows"}:
        return None
    names = ("heads", "key_block", "lse", "scaling", "sets", "softcap")
    params = dict(paging) | {name: attend[name] for name in names} | {"sinks": "sinks" in extras, "top_k": chosen}
    return Selection(uses_of([*append, ("attend_rows", params, args)]))


def uses_of(uses: list[tuple]) -> tuple[KernelUse, ...]:
    return tuple(KernelUse(KernelSpec(family, tuple(sorted(params.items()))), args) for family, params, args in uses)


def _sets(heads: int) -> int:
    """How many sets query heads that share all keys are divided into, each of no more rows than a tile has."""
    return next(sets for sets in range(1, heads + 1) if heads % sets == 0 and heads // sets <= TILE_ROWS)


SELECT = dict.fromkeys(("attention", "recall", "latent_attention"), select)

NEEDS = dict.fromkeys(SELECT, f"widths of keys and values that are multiples of {COLUMNS}")
