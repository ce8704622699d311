"""Attention over paged keys and values: ``kv_append`` writes the step's rows, ``attend`` reads all rows in place.

A row is the softmax of one token and query head. Its keys lie in spans of ``SPAN_BLOCKS`` blocks of ``key_block`` keys,
both at absolute positions. A span's blocks are visited in order with a running maximum and sum (online softmax,
https://arxiv.org/abs/1805.02867), and a row's spans, each reduced by itself, are merged in order. A block or span
without a visible key is left out, and a key that is not visible is neither read from its page nor multiplied. So a
row's bits depend on its own query and keys only. Everything else here is shared work that doesn't enter any row's
arithmetic: a block is copied once, as f32, for all rows of a tile of tokens and of the query heads that share the key
head, and threads share tiles, key heads and spans (``Division``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adaptc.backends.cpu.kernels import vmath
from adaptc.backends.cpu.kernels.base import PTR, Emitter, Family, Value, vec
from adaptc.backends.cpu.kernels.base import lanes as lanes_of
from adaptc.backends.cpu.kernels.elementwise import STORED, narrow
from adaptc.backends.cpu.levels import Level
from adaptc.plan import DTYPE_BYTES
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection, StateSpec, TensorSpec

TILE_ROWS = 32
"""Rows that share a block's copy; with 64 columns their running results (8 KB) stay in the first-level cache."""

SPAN_BLOCKS = 16
"""Key blocks of a span. With 16 keys a block, a span of 64 columns in f16 is 64 KB of cache for a key head, which a
core reads in some 4 µs; a row's piece of it is then 1 % of what was read."""

SLOTS = 1024
"""Pieces that threads can share in one step at least, about 300 KB with 64 columns."""

UNITS_A_THREAD = 2
"""Tiles get smaller where there would be fewer of them for a thread."""

READ_COST = 3
"""What reading a key costs, in rows that are multiplied by it."""

WIDEST = 16
"""Lanes of the widest level's vectors."""

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


def _first_key(e: Emitter, params: Mapping[str, Any], position: Value) -> Value:
    """The first key that a token at ``position`` sees."""
    window = params["window"]
    return e.max(e.sub(position, window - 1), 0) if window else e.const(0, "i64")


class Count:
    """An integer on the thread's stack, for what is counted across loops and conditions. Ask for it outside both."""

    def __init__(self, e: Emitter):
        self.e = e
        self.place = e.op(f"llvm.alloca {e.const(1, 'i64')} x i64 {{alignment = 8 : i64}} : (i64) -> {PTR}", PTR)
        self.set(e.const(0, "i64"))

    def get(self) -> Value:
        return self.e.load(self.place, "i64")

    def set(self, value: Value) -> None:
        self.e.store(value, self.place)


@dataclass(frozen=True)
class Unit:
    """Tokens [first, end) that continue one request, seen by the query heads of one key head. Their keys lie in the
    spans [low, high). ``split``: threads share those spans, and what each leaves starts at slot ``base``."""

    first: Value
    end: Value
    head: Value
    position: Value
    low: Value
    high: Value
    split: Value
    base: Value


class Division:
    """Who attends to what in a step. All the step's work in one order (tokens, key heads, spans of keys) is cut into as
    many parts of equal cost as there are threads; a cut falls between spans. Only a unit with a cut inside is split,
    and only as long as slots are left; any other belongs to the thread in whose part it starts. It depends on the
    step's positions and on the number of threads, and any thread finds all of it out by itself."""

    def __init__(self, e: Emitter, params: Mapping[str, Any], positions: Value, requests: Value):
        self.e, self.params, self.positions, self.requests = e, params, positions, requests
        self.group = params["heads"] // params["kv_heads"]
        self.tokens = e.size("T")
        tile = tile_tokens(params)
        each = e.div(e.mul(self.tokens, params["kv_heads"]), e.mul(e.n, UNITS_A_THREAD))
        self.size = e.select(e.compare("eq", e.n, 1), e.const(tile, "i64"), e.max(e.min(each, tile), 1))
        self.tiles = e.div(e.add(self.tokens, e.sub(self.size, 1)), self.size)
        self.before, self.slots = Count(e), Count(e)
        self._stretches(lambda first, end: self.before.set(
            e.add(self.before.get(), e.mul(self._cost(first, end), params["kv_heads"]))))
        self.total = self.before.get()
        self.before.set(e.const(0, "i64"))

    def rows(self, unit: Unit) -> Value:
        return self.e.mul(self.e.sub(unit.end, unit.first), self.group)

    def units(self, body: Callable[[Unit], None]) -> None:
        """``body(unit)`` for each unit, in order. To be called once."""
        e = self.e

        def stretch(first: Value, end: Value) -> None:
            position = load_index(e, self.positions, first)
            least, most = self._keys(first, end)
            low, high = (e.div(k, self.params["span"]) for k in (least, e.add(most, self.params["span"] - 1)))
            with e.loop(0, self.params["kv_heads"]) as head:
                unit = Unit(first, end, head.index, position, low, high, e.const(False, "i1"), self.slots.get())
                if self.params["slots"]:
                    needs = e.add(unit.base, e.mul(self.rows(unit), e.sub(high, low)))
                    after = e.div(e.add(e.mul(e.add(self.before.get(), 1), e.n), e.sub(self.total, 1)), self.total)
                    inside = e.compare("slt", self._span(unit, self._cut(after)), high)
                    split = e.and_(inside, e.compare("sle", needs, self.params["slots"]))
                    self.slots.set(e.select(split, needs, unit.base))
                    unit = replace(unit, split=split)
                body(unit)
                self.before.set(e.add(self.before.get(), self._cost(first, end)))

        self._stretches(stretch)

    def mine(self, unit: Unit) -> tuple[Value, Value]:
        """This thread's spans of a unit that ``units`` is at."""
        e, before = self.e, self.before.get()
        begin, end = self._cut(e.tid), self._cut(e.add(e.tid, 1))
        starts = e.and_(e.compare("sle", begin, before), e.compare("slt", before, end))
        last = e.select(starts, unit.high, unit.low)
        if not self.params["slots"]:
            return unit.low, last
        low, high = self._span(unit, begin), self._span(unit, end)
        return e.select(unit.split, low, unit.low), e.select(unit.split, high, last)

    def _cut(self, number: Value) -> Value:
        return self.e.div(self.e.mul(number, self.total), self.e.n)

    def _span(self, unit: Unit, cut: Value) -> Value:
        """The unit's first span that starts at a cost of ``cut`` or later; its end where there is none."""
        e = self.e
        least, _ = self._keys(unit.first, unit.end)
        weight = self._weight(unit.first, unit.end)
        key = e.add(least, e.div(e.add(e.sub(cut, self.before.get()), e.sub(weight, 1)), weight))
        span = e.div(e.add(key, self.params["span"] - 1), self.params["span"])
        return e.select(e.compare("sle", cut, self.before.get()), unit.low, e.min(span, unit.high))

    def _keys(self, first: Value, end: Value) -> tuple[Value, Value]:
        """Keys that any token of a stretch sees: from, up to."""
        e, start = self.e, load_index(self.e, self.positions, first)
        return _first_key(e, self.params, start), e.add(start, e.sub(end, first))

    def _weight(self, first: Value, end: Value) -> Value:
        """Cost of a key: to read it, and to multiply it by every row."""
        return self.e.add(self.e.mul(self.e.sub(end, first), self.group), READ_COST)

    def _cost(self, first: Value, end: Value) -> Value:
        least, most = self._keys(first, end)
        return self.e.mul(self.e.sub(most, least), self._weight(first, end))

    def _stretches(self, body: Callable[[Value, Value], None]) -> None:
        e = self.e
        with e.loop(0, self.tiles) as number:
            begin = e.mul(number.index, self.size)
            _runs(e, self.positions, self.requests, begin, e.min(e.add(begin, self.size), self.tokens), body)


@dataclass(frozen=True)
class Running:
    """Pointers to a row's maximum and sum so far, a vector each, and to the values that they weigh."""

    top: Value
    total: Value
    values: Value


class Rows:
    """The arithmetic of rows: how they start, how keys of a span are merged into them, spans into the whole, and how
    they end."""

    def __init__(self, e: Emitter, params: Mapping[str, Any]):
        self.e, self.params = e, params
        self.lanes = _lanes(e, params)
        self.floats = vec(self.lanes, "f32")
        self.columns = params["value_width"]

    @property
    def size(self) -> int:
        """Floats of a row that is kept in one piece."""
        return self.columns + 2 * self.lanes

    def piece(self, start: Value, number: Value) -> Running:
        """Row ``number`` of such rows."""
        e = self.e
        top = e.at(start, e.mul(number, self.size), "f32")
        return Running(top, e.at(top, self.lanes, "f32"), e.at(top, 2 * self.lanes, "f32"))

    def each(self, *pointers: Value) -> Iterator[tuple[Value, ...]]:
        """Pointers to every vector of rows of values."""
        with self.e.loop(0, self.columns, self.lanes) as c:
            yield tuple(self.e.at(p, c.index, "f32") for p in pointers)

    def clear(self, row: Running) -> None:
        e = self.e
        e.store(e.const(-math.inf, self.floats), row.top)
        e.store(e.const(0.0, self.floats), row.total)
        for (place,) in self.each(row.values):
            e.store(e.const(0.0, self.floats), place)

    def merge(self, whole: Running, part: Running) -> None:
        """Adds a span in which a row sees keys to the spans before it."""
        e = self.e
        load = lambda pointer: e.load(pointer, self.floats)  # noqa: E731
        top = _lane_maximum(e, load(whole.top), load(part.top))
        old, new = (vmath.exp(e, e.sub(load(r.top), top)) for r in (whole, part))
        e.store(top, whole.top)
        e.store(e.fma(load(part.total), new, e.mul(load(whole.total), old)), whole.total)
        for to, source in self.each(whole.values, part.values):
            e.store(e.fma(load(source), new, e.mul(load(to), old)), to)

    def finish(self, row: Running, sink: Value | None) -> None:
        """Divides by the sum, to which ``sink`` (a pointer) adds a score without a value."""
        e = self.e
        total = e.splat(e.reduce(e.add, e.load(row.total, self.floats)), self.lanes)
        if sink is not None:  # where it is far above every key, the sum is infinite and the row 0
            score = e.splat(e.load(sink, "f32"), self.lanes)
            total = e.add(total, vmath.exp(e, e.sub(score, e.load(row.top, self.floats))))
        for (place,) in self.each(row.values):
            e.store(e.div(e.load(place, self.floats), total), place)

    def sees(self, position: Value, span: Value) -> Value:
        """Whether a row sees any key of a span."""
        e, start = self.e, self.e.mul(span, self.params["span"])
        ends = e.compare("sgt", e.add(start, self.params["span"]), _first_key(e, self.params, position))
        return e.and_(e.compare("sle", start, position), ends)


def tile_tokens(params: Mapping[str, Any]) -> int:
    """Tokens that share the reading of their keys, at most."""
    return max(1, min(16, TILE_ROWS // (params["heads"] // params["kv_heads"])))


def emit_attend(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """Units by ``Division``: each span into a piece of its own, in a slot where the unit is split; else merged into
    the row at once."""
    e = Emitter(level)
    heads, group = params["heads"], params["heads"] // params["kv_heads"]
    width, value_width, block, span = (params[k] for k in ("width", "value_width", "key_block", "span"))
    query, positions, requests, pool, table, *more = (e.buffer(i) for i in range(len(attend_signature(params))))
    sinks = more.pop(0) if params["sinks"] else None
    slots = more.pop(0) if params["slots"] else None
    out = more.pop()
    rows = Rows(e, params)
    lanes, floats = rows.lanes, rows.floats
    pages = Pages(e, params, pool, table)
    most_rows = tile_tokens(params) * group
    together = next(n for n in (3, 2, 1) if group % n == 0)  # rows that share loads; 4 would spill registers
    keys, values, weights = room(e, block * width), room(e, block * value_width), room(e, together * block)
    pieces, tops, totals = room(e, most_rows * rows.size), room(e, most_rows * lanes), room(e, most_rows * lanes)
    with e.loop(0, block * width, lanes) as i:  # rows that are never filled are multiplied, though masked afterwards
        e.store(e.const(0.0, floats), e.at(keys, i.index, "f32"))

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

    def visit(parts: Sequence[Running], q: Value, low: Value, high: Value) -> None:
        """Merges keys [low, high) of a block, relative to its start, into neighbouring rows of one token."""
        numbers = e.const(tuple(range(lanes)), vec(lanes, "i32"))
        lows, highs = (e.splat(e.cast("trunci", x, "i32"), lanes) for x in (low, high))
        count = len(parts)
        each = range(count)
        queries = [e.at(q, i * width, "f32") for i in each]
        scores = [e.at(weights, i * block, "f32") for i in each]
        old = [e.load(part.top, floats) for part in parts]
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
        with e.loop(0, block, lanes, [e.mul(e.load(p.total, floats), s) for p, s in zip(parts, shrink)]) as key:
            added = []
            for i in each:
                place = e.at(scores[i], key.index, "f32")
                weight = vmath.exp(e, e.sub(e.load(place, floats), new[i]))
                e.store(weight, place)
                added.append(e.add(key.args[i], weight))
            key.end(*added)
        for part, top, total in zip(parts, new, key.results):
            e.store(top, part.top)
            e.store(total, part.total)
        most_vectors = 8 if count == 1 else 4  # with their loads they fit the 16 registers
        vectors = next(v for v in range(most_vectors, 0, -1) if value_width // lanes % v == 0)
        with e.loop(0, value_width, vectors * lanes) as chunk:
            places = [e.at(e.at(p.values, chunk.index, "f32"), v * lanes, "f32") for p in parts for v in range(vectors)]
            start = e.at(values, chunk.index, "f32")
            begin = [e.mul(e.load(p, floats), shrink[i // vectors]) for i, p in enumerate(places)]
            with e.loop(low, high, init=begin) as key:
                v = e.at(start, e.mul(key.index, value_width), "f32")
                loaded = [e.load(e.at(v, i * lanes, "f32"), floats) for i in range(vectors)]
                ahead = []
                for i in each:
                    weight = e.splat(e.load(e.at(scores[i], key.index, "f32"), "f32"), lanes)
                    ahead += [e.fma(weight, r, acc) for r, acc in zip(loaded, key.args[i * vectors :])]
                key.end(*ahead)
            for place, acc in zip(places, key.results):
                e.store(acc, place)

    def scale(score: Value) -> Value:
        cap, scaling = params["softcap"], params["scaling"]
        return e.mul(vmath.tanh(e, e.mul(score, scaling / cap)), cap) if cap else e.mul(score, scaling)

    def each_row(unit: Unit, body: Callable[[Value, Value, Value], None], step: int = 1) -> None:
        """``body(position, row, offset)`` for every ``step``th row: the row's number among the unit's, and among those
        of q."""
        with e.loop(unit.first, unit.end) as token:
            number = e.sub(token.index, unit.first)
            with e.loop(0, group, step) as h:
                offset = e.add(e.mul(token.index, heads), e.add(e.mul(unit.head, group), h.index))
                body(e.add(unit.position, number), e.add(e.mul(number, group), h.index), offset)

    def whole(row: Value, offset: Value) -> Running:
        return Running(e.at(tops, row, floats), e.at(totals, row, floats), e.at(out, e.mul(offset, value_width), "f32"))

    def attend(unit: Unit, number: Value, place: Value) -> None:
        """All of a unit's rows over one span, into pieces that start at ``place``."""
        each_row(unit, lambda position, row, offset: rows.clear(rows.piece(place, row)))
        request = load_index(e, requests, unit.first)
        start = e.mul(number, span)
        least = e.max(start, _first_key(e, params, unit.position))
        most = e.min(e.add(start, span), e.add(unit.position, e.sub(unit.end, unit.first)))
        with e.loop(e.div(least, block), e.div(e.add(most, block - 1), block)) as index:
            base = e.mul(index.index, block)
            fill(request, unit.head, base, e.max(base, least), e.min(e.add(base, block), most))

            def look(position: Value, row: Value, offset: Value) -> None:
                low = e.max(e.sub(_first_key(e, params, position), base), 0)
                high = e.min(e.add(e.sub(position, base), 1), block)
                with e.when(e.compare("slt", low, high)):
                    q = e.at(query, e.mul(offset, width), "f32")
                    visit([rows.piece(place, e.add(row, i)) for i in range(together)], q, low, high)

            each_row(unit, look, together)

    division = Division(e, params, positions, requests)

    def work(unit: Unit) -> None:
        low, high = division.mine(unit)
        with e.when(e.compare("slt", low, high)):
            alone = e.xor(unit.split, True)
            with e.when(alone):
                each_row(unit, lambda position, row, offset: rows.clear(whole(row, offset)))
            with e.loop(low, high) as number:
                place = pieces
                if slots:
                    slot = e.add(unit.base, e.mul(division.rows(unit), e.sub(number.index, unit.low)))
                    place = e.select(unit.split, rows.piece(slots, slot).top, pieces)
                attend(unit, number.index, place)

                def add(position: Value, row: Value, offset: Value) -> None:
                    with e.when(rows.sees(position, number.index)):
                        rows.merge(whole(row, offset), rows.piece(place, row))

                with e.when(alone):
                    each_row(unit, add)

            def finish(position: Value, row: Value, offset: Value) -> None:
                head = e.rem(offset, heads)
                rows.finish(whole(row, offset), e.at(sinks, head, "f32") if sinks else None)

            with e.when(alone):
                each_row(unit, finish)

    division.units(work)
    return e.text(symbol)


# ---- attend_merge


def emit_merge(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """Rows of split units, from the pieces that ``attend`` has left in slots."""
    e = Emitter(level)
    heads, group = params["heads"], params["heads"] // params["kv_heads"]
    positions, requests, *more = (e.buffer(i) for i in range(len(merge_signature(params))))
    sinks = more.pop(0) if params["sinks"] else None
    slots, out = more
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
                    head = e.add(e.mul(unit.head, group), e.rem(row.index, group))
                    offset = e.add(e.mul(e.add(unit.first, number), heads), head)
                    whole = Running(top, total, e.at(out, e.mul(offset, params["value_width"]), "f32"))
                    rows.clear(whole)
                    with e.loop(unit.low, unit.high) as span:
                        with e.when(rows.sees(e.add(unit.position, number), span.index)):
                            slot = e.add(unit.base, e.add(e.mul(count, e.sub(span.index, unit.low)), row.index))
                            rows.merge(whole, rows.piece(slots, slot))
                    rows.finish(whole, e.at(sinks, head, "f32") if sinks else None)

        division.units(work)
    return e.text(symbol)


# ---- declaration


def _state(params: Mapping[str, Any]) -> tuple[str, str]:
    page = params["kv_heads"] * params["page_size"] * (params["width"] + params["value_width"])
    return f"state:{params['dtype']}[pages,{page}]", f"pages:i32[R,{params['max_pages']}]"


def append_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    heads = params["kv_heads"]
    rows = (f"in:f32[T,{heads},{params['width']}]", f"in:f32[T,{heads},{params['value_width']}]")
    return (*rows, "in:i32[T]", "in:i32[T]", *_state(params))


def _pieces(params: Mapping[str, Any]) -> TensorSpec:
    """Memory for the pieces of split units, for vectors as wide as any level's."""
    return TensorSpec("f32", (params["slots"], params["value_width"] + 2 * WIDEST))


def _shared(params: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Entries for sinks and for pieces, each none or one."""
    sinks = [f"weight:f32[{params['heads']}]"] if params["sinks"] else []
    slots, size = _pieces(params).shape
    return sinks, [f"scratch:f32[{slots},{size}]"] if slots else []


def attend_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    query, out = (f"f32[T,{params['heads']},{params[name]}]" for name in ("width", "value_width"))
    sinks, slots = _shared(params)
    return (f"in:{query}", "in:i32[T]", "in:i32[T]", *_state(params), *sinks, *slots, f"out:{out}")


def merge_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    sinks, slots = _shared(params)
    return ("in:i32[T]", "in:i32[T]", *sinks, *slots, f"out:f32[T,{params['heads']},{params['value_width']}]")


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
    that don't fill vectors."""
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
    division = {
        "heads": query.shape[1], "kv_heads": key.shape[1], "sinks": bool(sinks),
        "slots": slots_for(state, query.shape[1]), "span": SPAN_BLOCKS * state.key_block, "value_width": value_width,
        "window": int(spec.attrs.get("window", 0)),
    }  # fmt: skip
    attend = paging | division | {
        "key_block": state.key_block, "scaling": float(spec.attrs["scaling"]),
        "softcap": float(spec.attrs.get("softcap", 0.0)),
    }  # fmt: skip
    merge = division | {"width": width, "key_block": state.key_block}  # which decide the vectors
    where, cache = ("operand:3", "operand:4"), ("state:5", "pages:5")
    shared = ["operand:6"] if sinks else []
    shared += ["scratch:0"] if division["slots"] else []
    uses = [
        ("kv_append", paging, ("operand:1", "operand:2", *where, *cache)),
        ("attend", attend, ("operand:0", *where, *cache, *shared, "result:0")),
    ]
    if division["slots"]:
        uses.append(("attend_merge", merge, (*where, *shared, "result:0")))
    kernels = (KernelUse(KernelSpec(family, tuple(sorted(params.items()))), args) for family, params, args in uses)
    return Selection(tuple(kernels), (_pieces(division),) if division["slots"] else ())


SELECT = {"attention": select}
