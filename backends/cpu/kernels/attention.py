"""Attention over paged keys and values: ``kv_append`` writes the step's rows, ``attend`` reads all rows in place.

A row is the softmax of one token and query head. Its keys are visited in blocks of ``key_block`` at absolute
positions, in order, with a running maximum and sum (online softmax, https://arxiv.org/abs/1805.02867); a block without
a visible key is not visited, and a key that is not visible is neither read from its page nor multiplied. So a row's
bits depend on its own query and keys only. Everything else here is shared work that doesn't enter any row's arithmetic:
a block is copied once, as f32, for all rows of a tile of tokens and of the query heads that share the key head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from adaptc.backends.cpu.kernels import vmath
from adaptc.backends.cpu.kernels.base import PTR, Emitter, Family, Value, vec
from adaptc.backends.cpu.kernels.base import lanes as lanes_of
from adaptc.backends.cpu.kernels.elementwise import STORED, narrow
from adaptc.backends.cpu.levels import Level
from adaptc.plan import DTYPE_BYTES
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection, StateSpec

TILE_ROWS = 32
"""Rows that share a block's copy; with 64 columns their running results (8 KB) stay in the first-level cache."""

TILES_A_THREAD = 4
"""Tiles a thread from which on tiles aren't divided among threads."""


COLUMNS = 8
"""Widths and key blocks are multiples of this, at every level."""


def _lanes(e: Emitter, params: Mapping[str, Any]) -> int:
    """Lanes of the vectors of a kernel: the level's, or fewer where those don't divide the widths."""
    sizes = [params[name] for name in ("width", "value_width", "key_block") if name in params]
    return next(n for n in (e.lanes, COLUMNS) if all(size % n == 0 for size in sizes))


class Pages:
    """Where a row of a state lies: [page][part][head][slot][column], page = table[request][position / page_size]."""

    def __init__(self, e: Emitter, params: Mapping[str, Any], pool: Value, table: Value):
        self.e, self.params, self.pool, self.table = e, params, pool, table
        self.bytes = DTYPE_BYTES[params["dtype"]]

    def at(self, request: Value, position: Value) -> tuple[Value, Value]:
        """(pointer to the page, slot) of a position; the page is looked up, so it must be one that is needed."""
        e, p = self.e, self.params
        entry = e.add(e.mul(request, p["max_pages"]), e.div(position, p["page_size"]))
        page = e.cast("extsi", e.load(e.at(self.table, entry, "i32"), "i32"), "i64")
        page_bytes = p["kv_heads"] * p["page_size"] * (p["width"] + p["value_width"]) * self.bytes
        return e.at(self.pool, e.mul(page, page_bytes)), e.rem(position, p["page_size"])

    def rows(self, page: Value, slot: Value, head: Value) -> tuple[Value, Value]:
        """Pointers to a key row and its value row."""
        e, p = self.e, self.params
        row = e.add(e.mul(head, p["page_size"]), slot)
        key = e.at(page, e.mul(row, p["width"] * self.bytes))
        values = p["kv_heads"] * p["page_size"] * p["width"] * self.bytes
        return key, e.at(page, e.add(e.mul(row, p["value_width"] * self.bytes), values))


def load_index(e: Emitter, pointer: Value, index: Value) -> Value:
    """Entry of an i32 array as i64."""
    return e.cast("extsi", e.load(e.at(pointer, index, "i32"), "i32"), "i64")


def room(e: Emitter, floats: int) -> Value:
    """Memory of the thread's stack for this call. Ask for it outside all loops."""
    return e.op(f"llvm.alloca {e.const(floats, 'i64')} x f32 {{alignment = 64 : i64}} : (i64) -> {PTR}", PTR)


# ---- kv_append


def emit_append(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    keys, values, positions, requests, pool, table = (e.buffer(i) for i in range(6))
    pages, heads, dtype = Pages(e, params, pool, table), params["kv_heads"], params["dtype"]
    lanes = _lanes(e, params)
    floats = vec(lanes, "f32")
    low, high = e.share(e.mul(e.size("T"), heads))
    with e.loop(low, high) as unit:
        token, head = e.div(unit.index, heads), e.rem(unit.index, heads)
        page, slot = pages.at(load_index(e, requests, token), load_index(e, positions, token))
        sources = ((keys, params["width"]), (values, params["value_width"]))
        for (source, width), target in zip(sources, pages.rows(page, slot, head)):
            start = e.at(source, e.mul(unit.index, width), "f32")
            with e.loop(0, width, lanes) as column:
                row = e.load(e.at(start, column.index, "f32"), floats)
                e.store(narrow(e, row, dtype), e.at(target, column.index, STORED[dtype]))
    return e.text(symbol)


# ---- attend


def _lane_maximum(e: Emitter, a: Value, b: Value) -> Value:
    """The larger of two by one instruction; a NaN gives a NaN sooner or later, as its exp is one."""
    return e.select(e.compare("ogt", a, b), a, b)


def _everywhere(e: Emitter, a: Value) -> Value:
    """The largest lane, in all lanes."""
    count = distance = lanes_of(a.type)
    while distance > 1:
        distance //= 2
        a = _lane_maximum(e, a, e.shuffle(a, a, [i ^ distance for i in range(count)]))
    return a


def _picks(lanes: int, stage: int) -> tuple[list[int], list[int]]:
    """Lanes of two neighbours that are added at each stage of turning ``lanes`` vectors into the vector of their sums:
    within quarters of four lanes first, then whole quarters."""
    if stage < 2:
        pick = ((0, "a"), (0, "b"), (1, "a"), (1, "b")) if stage == 0 else ((0, "a"), (1, "a"), (0, "b"), (1, "b"))
        low = [i + first + lanes * (which == "b") for first in range(0, lanes, 4) for i, which in pick]
        return low, [i + 2 for i in low]
    low = [start + i for start in range(0, 2 * lanes, 8) for i in range(4)]
    return low, [i + 4 for i in low]


def _sums(e: Emitter, parts: Sequence[Value], stage: int = 0) -> Value:
    """2^k vectors → one, by k stages of the tree from ``stage`` on; after all stages, lane i is part i's sum."""
    while len(parts) > 1:
        low, high = _picks(lanes_of(parts[0].type), stage)
        pairs = zip(parts[::2], parts[1::2])
        parts = [e.add(e.shuffle(a, b, low), e.shuffle(a, b, high)) for a, b in pairs]
        stage += 1
    return parts[0]


def _dots(e: Emitter, queries: Sequence[Value], keys: Value, width: int, lanes: int) -> list[Value]:
    """For each query the vector of its products with ``lanes`` consecutive keys. Lane c sums every ``lanes``th column
    from c on, then the lanes are added as a tree. Several queries share the loads of four keys, one query takes all
    at once."""
    floats = vec(lanes, "f32")
    step = 4 if len(queries) > 1 else lanes
    halves: list[list[Value]] = [[] for _ in queries]
    for first in range(0, lanes, step):
        with e.loop(0, width, lanes, [e.const(0.0, floats)] * (step * len(queries))) as column:
            start = e.at(keys, column.index, "f32")
            loaded = [e.load(e.at(query, column.index, "f32"), floats) for query in queries]
            sums = [*column.args]
            for key in range(step):
                row = e.load(e.at(start, (first + key) * width, "f32"), floats)
                for at, q in zip(range(key, len(sums), step), loaded):
                    sums[at] = e.fma(q, row, sums[at])
            column.end(*sums)
        for number, half in enumerate(halves):
            half.append(_sums(e, column.results[number * step : (number + 1) * step]))
    return [_sums(e, half, stage=2) for half in halves]


def _runs(e: Emitter, positions: Value, requests: Value, low: Value, high: Value,
          body: Callable[[Value, Value], None]) -> None:
    """Calls ``body(first, end)`` for each stretch of tokens in [low, high) that continue one request."""

    def follows(token: Value) -> Value:
        """The token continues the one before it."""
        before = e.sub(token, 1)
        same = e.compare("eq", load_index(e, requests, token), load_index(e, requests, before))
        step = e.sub(load_index(e, positions, token), load_index(e, positions, before))
        return e.and_(same, e.compare("eq", step, 1))

    yes = e.const(True, "i1")
    with e.loop(low, high) as token:
        # whether the first token continues one of another tile doesn't matter, nor may what lies before it be read
        inside = e.compare("sgt", token.index, low)
        starts = e.op(f"scf.if {inside} -> (i1) {{", "i1")
        e.line(f"scf.yield {e.xor(follows(token.index), True)} : i1")
        e.line(f"}} else {{ scf.yield {yes} : i1 }}")
        with e.when(starts):
            first = token.index
            begin = e.add(first, 1)
            with e.loop(begin, high, init=[begin, yes]) as later:
                end, going = later.args
                going = e.and_(going, follows(later.index))
                later.end(e.add(end, e.cast("extui", going, "i64")), going)
            body(first, later.results[0])


def emit_attend(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    heads, group = params["heads"], params["heads"] // params["kv_heads"]
    width, value_width, block, window = (params[k] for k in ("width", "value_width", "key_block", "window"))
    query, positions, requests, pool, table = (e.buffer(i) for i in range(5))
    sinks = e.buffer(5) if params.get("sinks") else None
    out = e.buffer(6 if sinks else 5)
    tokens = e.size("T")
    lanes = _lanes(e, params)
    floats = vec(lanes, "f32")
    pages = Pages(e, params, pool, table)
    tile = max(1, min(16, TILE_ROWS // group))
    together = next(n for n in (3, 2, 1) if group % n == 0)  # rows that share loads; 4 would spill registers
    keys, values, weights = room(e, block * width), room(e, block * value_width), room(e, together * block)
    maxima, sums = room(e, tile * group * lanes), room(e, tile * group * lanes)
    with e.loop(0, block * width, lanes) as i:  # rows that are never filled are multiplied, though masked afterwards
        e.store(e.const(0.0, floats), e.at(keys, i.index, "f32"))

    def first_key(position: Value) -> Value:
        return e.max(e.sub(position, window - 1), 0) if window else e.const(0, "i64")

    def fill(request: Value, head: Value, base: Value, low: Value, high: Value) -> None:
        """Copies the keys and values of positions [low, high) to their places in the block that starts at base."""
        one_page = params["page_size"] % block == 0
        page, slot = pages.at(request, low)
        with e.loop(low, high) as position:
            here = (page, e.add(slot, e.sub(position.index, low))) if one_page else pages.at(request, position.index)
            sources = pages.rows(*here, head)
            for source, target, columns in zip(sources, (keys, values), (width, value_width)):
                target = e.at(target, e.mul(e.sub(position.index, base), columns), "f32")
                with e.loop(0, columns, lanes) as c:
                    row = e.load_floats(e.at(source, c.index, STORED[params["dtype"]]), params["dtype"], lanes)
                    e.store(row, e.at(target, c.index, "f32"))

    def visit(row: Value, count: int, q: Value, result: Value, low: Value, high: Value) -> None:
        """Merges keys [low, high) of a block, relative to its start, into the maxima, sums and results of ``count``
        neighbouring rows of one token."""
        numbers = e.const(tuple(range(lanes)), vec(lanes, "i32"))
        lows, highs = (e.splat(e.cast("trunci", x, "i32"), lanes) for x in (low, high))
        each = range(count)
        tops, totals = ([e.at(p, e.add(row, i), floats) for i in each] for p in (maxima, sums))
        queries = [e.at(q, i * width, "f32") for i in each]
        results = [e.at(result, i * value_width, "f32") for i in each]
        scores = [e.at(weights, i * block, "f32") for i in each]
        old = [e.load(top, floats) for top in tops]
        with e.loop(0, block, lanes, old) as key:
            at = e.add(e.splat(e.cast("trunci", key.index, "i32"), lanes), numbers)
            visible = e.and_(e.compare("sge", at, lows), e.compare("slt", at, highs))
            most = []
            for i, score in enumerate(_dots(e, queries, e.at(keys, e.mul(key.index, width), "f32"), width, lanes)):
                score = e.select(visible, scale(score), -math.inf)
                e.store(score, e.at(scores[i], key.index, "f32"))
                most.append(_lane_maximum(e, key.args[i], score))
            key.end(*most)
        new = [_everywhere(e, top) for top in key.results]
        shrink = [vmath.exp(e, e.sub(a, b)) for a, b in zip(old, new)]
        with e.loop(0, block, lanes, [e.mul(e.load(t, floats), s) for t, s in zip(totals, shrink)]) as key:
            added = []
            for i in each:
                place = e.at(scores[i], key.index, "f32")
                weight = vmath.exp(e, e.sub(e.load(place, floats), new[i]))
                e.store(weight, place)
                added.append(e.add(key.args[i], weight))
            key.end(*added)
        for value, place in zip((*new, *key.results), (*tops, *totals)):
            e.store(value, place)
        most_vectors = 8 if count == 1 else 4  # with their loads they fit the 16 registers
        vectors = next(v for v in range(most_vectors, 0, -1) if value_width // lanes % v == 0)
        with e.loop(0, value_width, vectors * lanes) as chunk:
            places = [e.at(e.at(r, chunk.index, "f32"), v * lanes, "f32") for r in results for v in range(vectors)]
            start = e.at(values, chunk.index, "f32")
            begin = [e.mul(e.load(p, floats), shrink[i // vectors]) for i, p in enumerate(places)]
            with e.loop(low, high, init=begin) as key:
                v = e.at(start, e.mul(key.index, value_width), "f32")
                rows = [e.load(e.at(v, i * lanes, "f32"), floats) for i in range(vectors)]
                ahead = []
                for i in each:
                    weight = e.splat(e.load(e.at(scores[i], key.index, "f32"), "f32"), lanes)
                    ahead += [e.fma(weight, r, acc) for r, acc in zip(rows, key.args[i * vectors :])]
                key.end(*ahead)
            for place, acc in zip(places, key.results):
                e.store(acc, place)

    def scale(score: Value) -> Value:
        cap, scaling = params["softcap"], params["scaling"]
        return e.mul(vmath.tanh(e, e.mul(score, scaling / cap)), cap) if cap else e.mul(score, scaling)

    def each_row(first: Value, end: Value, head: Value, low: Value, high: Value, body: Callable, step: int = 1) -> None:
        """``body(token, row, offset, count)`` for the rows of tokens [first, end) and query heads [low, high) of a key
        head: ``step`` heads at a time, then one at a time."""
        whole = e.sub(high, e.rem(e.sub(high, low), step))
        with e.loop(first, end) as token:
            for count, begin, last in ((step, low, whole), (1, whole, high))[: 1 if step == 1 else 2]:
                with e.loop(begin, last, count) as h:
                    row = e.add(e.mul(e.sub(token.index, first), group), e.sub(h.index, e.mul(head, group)))
                    body(token.index, row, e.add(e.mul(token.index, heads), h.index), count)

    def columns(pointer: Value) -> Iterator[Value]:
        with e.loop(0, value_width, lanes) as c:
            yield e.at(pointer, c.index, "f32")

    def run(first: Value, end: Value, head: Value, low: Value, high: Value) -> None:
        """One key head's rows of consecutive tokens of a request."""

        def clear(token: Value, row: Value, offset: Value, count: int) -> None:
            top, total = e.const(-math.inf, floats), e.const(0.0, floats)
            if sinks:  # a score that is there from the start, with a value of 0
                score = e.load(e.at(sinks, e.sub(offset, e.mul(token, heads)), "f32"), "f32")
                top, total = e.splat(score, lanes), e.const((1.0, *[0.0] * (lanes - 1)), floats)
            e.store(top, e.at(maxima, row, floats))
            e.store(total, e.at(sums, row, floats))
            for place in columns(e.at(out, e.mul(offset, value_width), "f32")):
                e.store(e.const(0.0, floats), place)

        def finish(token: Value, row: Value, offset: Value, count: int) -> None:
            total = e.splat(e.reduce(e.add, e.load(e.at(sums, row, floats), floats)), lanes)
            for place in columns(e.at(out, e.mul(offset, value_width), "f32")):
                e.store(e.div(e.load(place, floats), total), place)

        each_row(first, end, head, low, high, clear)
        request, start = load_index(e, requests, first), load_index(e, positions, first)
        least, most = first_key(start), e.add(start, e.sub(end, first))  # keys that any row of the run sees
        with e.loop(e.div(least, block), e.add(e.div(e.sub(most, 1), block), 1)) as number:
            base = e.mul(number.index, block)
            fill(request, head, base, e.max(base, least), e.min(e.add(base, block), most))

            def look(token: Value, row: Value, offset: Value, count: int) -> None:
                position = e.add(start, e.sub(token, first))
                from_ = e.max(e.sub(first_key(position), base), 0)
                to = e.min(e.add(e.sub(position, base), 1), block)
                with e.when(e.compare("slt", from_, to)):
                    q = e.at(query, e.mul(offset, width), "f32")
                    visit(row, count, q, e.at(out, e.mul(offset, value_width), "f32"), from_, to)

            each_row(first, end, head, low, high, look, together)
        each_row(first, end, head, low, high, finish)

    # With tiles enough, threads take whole tiles in turn. Else each takes part of every tile's heads, each time another
    # part: then parts that can't be equal even out over the tiles, as does the growing number of keys.
    enough = e.mul(e.n, TILES_A_THREAD)
    fewer = e.max(e.min(e.div(tokens, enough), tile), 1)
    size = e.select(e.compare("eq", e.n, 1), e.const(tile, "i64"), fewer)
    tiles = e.div(e.add(tokens, e.sub(size, 1)), size)
    parts = e.select(e.compare("sge", tiles, enough), 1, e.n)
    with e.loop(0, tiles) as number:
        turn = e.rem(e.add(e.tid, number.index), e.n)
        low, high = (e.min(e.div(e.mul(t, heads), parts), heads) for t in (turn, e.add(turn, 1)))
        begin = e.mul(number.index, size)

        def stretch(first: Value, end: Value) -> None:
            with e.loop(e.div(low, group), e.div(e.add(high, group - 1), group)) as head:
                start = e.mul(head.index, group)
                run(first, end, head.index, e.max(low, start), e.min(high, e.add(start, group)))

        with e.when(e.compare("slt", low, high)):
            _runs(e, positions, requests, begin, e.min(e.add(begin, size), tokens), stretch)
    return e.text(symbol)


# ---- declaration


def _state(params: Mapping[str, Any]) -> tuple[str, str]:
    page = params["kv_heads"] * params["page_size"] * (params["width"] + params["value_width"])
    return f"state:{params['dtype']}[pages,{page}]", f"pages:i32[R,{params['max_pages']}]"


def append_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    heads = params["kv_heads"]
    rows = (f"in:f32[T,{heads},{params['width']}]", f"in:f32[T,{heads},{params['value_width']}]")
    return (*rows, "in:i32[T]", "in:i32[T]", *_state(params))


def attend_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    query, out = (f"f32[T,{params['heads']},{params[name]}]" for name in ("width", "value_width"))
    sinks = [f"weight:f32[{params['heads']}]"] if params.get("sinks") else []
    return (f"in:{query}", "in:i32[T]", "in:i32[T]", *_state(params), *sinks, f"out:{out}")


FAMILIES = {
    "kv_append": Family(emit_append, append_signature),
    "attend": Family(emit_attend, attend_signature),
}


def select(spec: OpSpec) -> Selection | None:
    """Two kernels, as every row must be written before any is read; None for widths that don't fill vectors."""
    query, key, value, _, _, state, *sinks = spec.operands
    assert isinstance(state, StateSpec)
    width, value_width = key.shape[2], value.shape[2]
    sizes = (width, value_width, state.key_block)
    if any(size % COLUMNS for size in sizes) or state.dtype not in ("f32", "f16", "bf16"):
        return None
    paging = {
        "dtype": state.dtype, "kv_heads": key.shape[1], "max_pages": state.max_pages, "page_size": state.page_size,
        "value_width": value_width, "width": width,
    }  # fmt: skip
    attend = paging | {
        "heads": query.shape[1], "key_block": state.key_block, "scaling": float(spec.attrs["scaling"]),
        "softcap": float(spec.attrs.get("softcap", 0.0)), "window": int(spec.attrs.get("window", 0)),
    }  # fmt: skip
    attend |= {"sinks": True} if sinks else {}
    where = ("operand:3", "operand:4", "state:5", "pages:5")
    return Selection(
        (
            KernelUse(KernelSpec("kv_append", tuple(sorted(paging.items()))), ("operand:1", "operand:2", *where)),
            KernelUse(KernelSpec("attend", tuple(sorted(attend.items()))), ("operand:0", *where, *(["operand:6"] if sinks else []), "result:0")),
        )
    )


SELECT = {"attention": select}
