"""Rows of attention as they run over their keys (online softmax, https://arxiv.org/abs/1805.02867).

Rows meet a block in one of two forms: as it is stored (``Stored``, for the query heads of one token), or as f32 with
the keys transposed (``Copied``, where many tokens share the copy). Both add a product's terms in the same order, so a
row has the same bits either way: lane c of a vector sums every ``lanes``th column from c on, then the lanes are added
as a tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adaptc.backends.cpu.kernels import vmath
from adaptc.backends.cpu.kernels.base import Emitter, Value, vec
from adaptc.backends.cpu.kernels.base import lanes as lanes_of
from adaptc.backends.cpu.kernels.division import first_key, seen
from adaptc.backends.cpu.kernels.elementwise import STORED
from adaptc.backends.cpu.kernels.pages import Place, common_lanes, part_widths, prefetch, room
from adaptc.plan import DTYPE_BYTES

TOGETHER = 2
"""Rows that share the loads of a block."""

SUMS = 8
"""Sums that are kept in registers at once: enough to hide an addition's latency, few enough that with what is
multiplied they fit the 16 registers that every level has. With 12, one that lay in memory cost a quarter."""


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


def _in_order(lanes: int) -> list[int]:
    """Lanes in the order in which adding neighbours, then neighbouring sums, is the tree of ``_sums``."""
    return [start + i for start in range(0, lanes, 4) for i in (0, 2, 1, 3)]


def _transposed(e: Emitter, rows: Sequence[Value]) -> list[Value]:
    """n vectors of n lanes, n a multiple of 4, with rows and columns exchanged."""
    n = len(rows)
    quads = range(0, n, 4)
    groups = []  # for four rows each: column 0 to 3 of every four columns
    for start in quads:
        a, b, c, d = rows[start : start + 4]
        low, high = ([q + i + of for q in quads for i in pick for of in (0, n)] for pick in ((0, 1), (2, 3)))
        pairs = [(e.shuffle(a, b, pick), e.shuffle(c, d, pick)) for pick in (low, high)]
        firsts, lasts = ([q + i + of for q in quads for of in (0, n) for i in pick] for pick in ((0, 1), (2, 3)))
        groups.append([e.shuffle(x, y, pick) for x, y in pairs for pick in (firsts, lasts)])
    if n == 4:
        return groups[0]
    columns = []
    for q in quads:
        for column in range(4):
            parts = [e.shuffle(a[column], b[column], [*range(q, q + 4), *range(n + q, n + q + 4)])
                     for a, b in zip(groups[::2], groups[1::2])]
            while len(parts) > 1:
                parts = [e.shuffle(a, b, range(2 * lanes_of(a.type))) for a, b in zip(parts[::2], parts[1::2])]
            columns.append(parts[0])
    return columns


class Stored:
    """A block as it is stored."""

    def __init__(self, e: Emitter, params: Mapping[str, Any], place: Place, ahead: Place | None):
        """``ahead`` is the block that is read next; its rows are asked for one by one as these are read, as a burst of
        requests would fill the queue that this block's own reads stand in."""
        self.e, self.params, self.place, self.ahead = e, params, place, ahead
        self.dtype, self.lanes = params["dtype"], common_lanes(e, params)
        self.floats = vec(self.lanes, "f32")
        self.widths = part_widths(params)

    def _part(self, part: int) -> int:
        """Which of the state's parts keys (part 0) or values (part 1) are of."""
        return min(part, len(self.widths) - 1)

    def _row(self, start: Value, row: Value | int, width: int, column: Value | int) -> Value:
        e = self.e
        row = e.const(row, "i64") if isinstance(row, int) else row
        return e.at(e.at(start, e.mul(row, width), STORED[self.dtype]), column, STORED[self.dtype])

    def ask(self, part: int, key: Value, column: Value | int, columns: int) -> None:
        """Prefetches columns of a key's (part 0) or value's (part 1) row in the next block."""
        if self.ahead is not None:
            part = self._part(part)
            start, row = self.ahead.row(self.e, part, key)
            prefetch(self.e, self._row(start, row, self.widths[part], column), columns * DTYPE_BYTES[self.dtype])

    def key(self, key: Value) -> Value:
        """Pointer to a key's row; ``lanes`` rows follow one another from a multiple of ``lanes`` on."""
        start, row = self.place.row(self.e, 0, key)
        return self._row(start, row, self.params["width"], 0)

    def scale(self, part: int, key: Value) -> Value:
        """Pointer to the scale of a key (part 0) or its value (part 1); again ``lanes`` follow one another."""
        start, row = self.place.row(self.e, len(self.widths) + self._part(part), key)
        return self.e.at(start, row, "f32")

    def dots(self, queries: Sequence[Value], key: Value, vectors: int) -> list[list[Value]]:
        """For each query, its products with consecutive keys from ``key`` on, in one vector."""
        assert vectors == 1
        e, width, lanes, count = self.e, self.params["width"], self.lanes, len(queries)
        step = next(s for s in (lanes, 4, 2, 1) if s <= lanes and s * count <= SUMS)
        stage = step.bit_length() - 1
        parts: list[list[Value]] = [[] for _ in queries]
        begin = self.key(key)
        for first in range(0, lanes, step):
            start = self._row(begin, first, width, 0)
            for number in range(step):
                self.ask(0, e.add(key, first + number), 0, width)
            with e.loop(0, width, lanes, [e.const(0.0, self.floats)] * (step * count)) as column:
                loaded = [e.load(e.at(query, column.index, "f32"), self.floats) for query in queries]
                sums = [*column.args]
                for number in range(step):
                    row = e.load_floats(self._row(start, number, width, column.index), self.dtype, lanes)
                    for at, q in zip(range(number, len(sums), step), loaded):
                        sums[at] = e.fma(q, row, sums[at])
                column.end(*sums)
            for number, part in enumerate(parts):
                part.append(_sums(e, column.results[number * step : (number + 1) * step]))
        return [[_sums(e, part, stage)] for part in parts]

    def vectors(self, rows: int) -> int:
        return 1

    def value(self, key: Value, column: Value | int) -> Value:
        """``lanes`` columns of a key's value."""
        part = self._part(1)
        start, row = self.place.row(self.e, part, key)
        return self.e.load_floats(self._row(start, row, self.widths[part], column), self.dtype, self.lanes)


class Copied:
    """A block as f32 (codes too) on the thread's stack: keys as [column][key], values as [key][column]."""

    def __init__(self, e: Emitter, params: Mapping[str, Any]):
        self.e, self.params = e, params
        self.block, self.lanes = params["key_block"], common_lanes(e, params)
        self.floats = vec(self.lanes, "f32")
        self.keys = room(e, self.block * params["width"])
        self.values = room(e, self.block * params["value_width"])
        self.scales = tuple(room(e, self.block) for _ in range(2 if params["scale"] else 0))

    def scale(self, part: int, key: Value) -> Value:
        """Pointer to the scale of a key (part 0) or its value (part 1)."""
        return self.e.at(self.scales[part], key, "f32")

    def ask(self, part: int, key: Value, column: Value, columns: int) -> None:
        """There is nothing to fetch."""

    def fill(self, block: Stored, low: Value, high: Value) -> None:
        """Copies keys [low, high) with those that share a vector with any; nobody sees others, which stay anything."""
        e, lanes = self.e, self.lanes
        first = e.sub(low, e.rem(low, lanes))
        with e.loop(first, high, lanes) as key, e.loop(0, self.params["width"], lanes) as column:
            place = block._row(block.key(key.index), 0, 0, column.index)
            starts = [block._row(place, i, self.params["width"], 0) for i in range(lanes)]
            rows = [e.load_floats(start, block.dtype, lanes) for start in starts]
            target = e.at(self.keys, e.add(e.mul(column.index, self.block), key.index), "f32")
            for number, turned in enumerate(_transposed(e, rows)):
                e.store(turned, e.at(target, number * self.block, "f32"))
        with e.loop(first, high, lanes) as key:
            for part in range(len(self.scales)):
                e.store(e.load(block.scale(part, key.index), self.floats), self.scale(part, key.index))
        with e.loop(low, high) as key, e.loop(0, self.params["value_width"], lanes) as column:
            target = e.add(e.mul(key.index, self.params["value_width"]), column.index)
            e.store(block.value(key.index, column.index), e.at(self.values, target, "f32"))

    def vectors(self, rows: int) -> int:
        """Vectors of keys that ``dots`` takes at once."""
        return max(v for v in (1, 2, 4) if self.block % (v * self.lanes) == 0 and (v == 1 or rows * v <= SUMS))

    def dots(self, queries: Sequence[Value], key: Value, vectors: int) -> list[list[Value]]:
        """For each query, its products with consecutive keys from ``key`` on, in ``vectors`` vectors."""
        e, lanes, count = self.e, self.lanes, len(queries) * vectors
        chains = max(c for c in (1, 2, 4) if c == 1 or count * c <= SUMS)
        order, stack = _in_order(lanes), []
        for turn in range(0, lanes, chains):
            offsets = order[turn : turn + chains]
            with e.loop(0, self.params["width"], lanes, [e.const(0.0, self.floats)] * (count * chains)) as column:
                start = e.at(self.keys, e.add(e.mul(column.index, self.block), key), "f32")
                sums = [*column.args]
                for chain, offset in enumerate(offsets):
                    places = [e.at(start, offset * self.block + v * lanes, "f32") for v in range(vectors)]
                    keys = [e.load(place, self.floats) for place in places]
                    for number, query in enumerate(queries):
                        factor = e.load(e.at(e.at(query, column.index, "f32"), offset, "f32"), "f32")
                        for v, row in enumerate(keys):
                            at = chain * count + number * vectors + v
                            sums[at] = e.fma(e.splat(factor, lanes), row, sums[at])
                column.end(*sums)
            for chain in range(chains):
                rank, sums = 0, list(column.results[chain * count : (chain + 1) * count])
                while stack and stack[-1][0] == rank:
                    sums = [e.add(a, b) for a, b in zip(stack.pop()[1], sums)]
                    rank += 1
                stack.append((rank, sums))
        ((_, sums),) = stack
        return [list(sums[i : i + vectors]) for i in range(0, count, vectors)]

    def value(self, key: Value, column: Value) -> Value:
        """``lanes`` columns of a key's value."""
        e = self.e
        place = e.at(self.values, e.add(e.mul(key, self.params["value_width"]), column), "f32")
        return e.load(place, self.floats)


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
        self.lanes = common_lanes(e, params)
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
        old, new = (vmath.exp_of_negative(e, e.sub(load(r.top), top)) for r in (whole, part))
        e.store(top, whole.top)
        e.store(e.fma(load(part.total), new, e.mul(load(whole.total), old)), whole.total)
        for to, source in self.each(whole.values, part.values):
            e.store(e.fma(load(source), new, e.mul(load(to), old)), to)

    def finish(self, row: Running, sink: Value | None, lse: Value | None = None) -> None:
        """Divides by the sum, to which ``sink`` (a pointer) adds a score without a value. The logarithm of the sum of
        exponentials of scores goes to ``lse``, if there is one; of a row that sees no keys it is -∞, and the row 0."""
        e = self.e
        one = e.reduce(e.add, e.load(row.total, self.floats))
        total = e.splat(one, self.lanes)
        if lse is not None:
            some = e.compare("une", one, 0.0)
            total = e.splat(e.select(some, one, e.const(1.0, "f32")), self.lanes)
            whole = e.add(vmath.log(e, total), e.load(row.top, self.floats))
            e.store(e.lane(whole, 0), lse)
        if sink is not None:  # where it is far above every key, the sum is infinite and the row 0
            score = e.splat(e.load(sink, "f32"), self.lanes)
            total = e.add(total, vmath.exp(e, e.sub(score, e.load(row.top, self.floats))))
        for (place,) in self.each(row.values):
            e.store(e.div(e.load(place, self.floats), total), place)

    def sees(self, position: Value, span: Value) -> Value:
        """Whether a row sees any key of a span."""
        e, start = self.e, self.e.mul(span, self.params["span"])
        ends = e.compare("sgt", e.add(start, self.params["span"]), first_key(e, self.params, position))
        return e.and_(e.compare("slt", start, seen(e, self.params, position)), ends)


@dataclass(frozen=True)
class Bias:
    """What a row's scores have added by distance: ``place`` is the row's own position from the block's start (i64),
    ``slope`` (f32) what each later key adds, ``distances`` a pointer to what the key at each distance adds."""

    place: Value
    slope: Value | None = None
    distances: Value | None = None


class Visit:
    """Merges keys of a block into rows: ``visit(block, parts, queries, low, high, biases)``."""

    def __init__(self, e: Emitter, params: Mapping[str, Any]):
        self.e, self.params = e, params
        self.lanes, self.block = common_lanes(e, params), params["key_block"]
        self.floats = vec(self.lanes, "f32")
        self.weights, self.shrink = room(e, TOGETHER * self.block), room(e, TOGETHER * self.lanes)

    def _times(self, block: Stored | Copied, part: int, key: Value, x: Value) -> Value:
        """``x`` times the scales of keys (part 0) or values (part 1) from ``key`` on, where there are scales."""
        e = self.e
        return e.mul(x, e.load(block.scale(part, key), self.floats)) if self.params["scale"] else x

    def _scaled(self, score: Value) -> Value:
        e, cap, scaling = self.e, self.params["softcap"], self.params["scaling"]
        return e.mul(vmath.tanh(e, e.mul(score, scaling / cap)), cap) if cap else e.mul(score, scaling)

    def _biased(self, score: Value, bias: Bias, first: Value) -> Value:
        """The scores of keys from ``first`` (i64, from the block's start) on with what their distance adds."""
        e, lanes, order = self.e, self.lanes, vec(self.lanes, "i32")
        last = e.sub(e.sub(bias.place, first), lanes - 1)
        ascending = e.add(e.splat(e.cast("trunci", last, "i32"), lanes), e.const(tuple(range(lanes)), order))
        if bias.slope is not None:
            distance = e.cast("sitofp", e.shuffle(ascending, ascending, range(lanes)[::-1]), "f32")
            score = e.fma(e.splat(e.neg(bias.slope), lanes), distance, score)
        if bias.distances is not None:  # keys ascend, so their distances descend
            known = e.and_(e.compare("sge", ascending, 0), e.compare("slt", ascending, self.params["distances"]))
            near = e.load(e.at(bias.distances, last, "f32"), self.floats, mask=known)
            score = e.add(score, e.shuffle(near, near, range(lanes)[::-1]))
        return score

    def __call__(self, block: Stored | Copied, parts: Sequence[Running], queries: Sequence[Value], low: Value,
                 high: Value, biases: Sequence[Bias] | None = None) -> None:
        """Rows ``parts`` with their ``queries`` all see keys [low, high) of a block, relative to its start."""
        e, lanes, floats = self.e, self.lanes, self.floats
        count = len(parts)
        each = range(count)
        weights = [e.at(self.weights, i * self.block, "f32") for i in each]
        lows, highs = (e.splat(e.cast("trunci", x, "i32"), lanes) for x in (low, high))
        old = [e.load(part.top, floats) for part in parts]
        vectors = block.vectors(count)
        # a vector without a visible key is left out: it would add nothing
        first = e.sub(low, e.rem(low, vectors * lanes))
        with e.loop(first, high, vectors * lanes, old) as key:
            most = [*key.args]
            scores = block.dots(queries, key.index, vectors)
            number = e.splat(e.cast("trunci", key.index, "i32"), lanes)
            for v in range(vectors):
                at = e.add(number, e.const(tuple(range(v * lanes, (v + 1) * lanes)), vec(lanes, "i32")))
                visible = e.and_(e.compare("sge", at, lows), e.compare("slt", at, highs))
                for i in each:
                    score = self._times(block, 0, e.add(key.index, v * lanes), scores[i][v])
                    score = self._scaled(score)
                    if biases:
                        score = self._biased(score, biases[i], e.add(key.index, v * lanes))
                    score = e.select(visible, score, -math.inf)
                    e.store(score, e.at(e.at(weights[i], key.index, "f32"), v * lanes, "f32"))
                    most[i] = _lane_maximum(e, most[i], score)
            key.end(*most)
        new = [_everywhere(e, top) for top in key.results]
        shrink = self._shrink(old, new)
        start = e.sub(low, e.rem(low, lanes))
        with e.loop(start, high, lanes, [e.mul(e.load(p.total, floats), s) for p, s in zip(parts, shrink)]) as key:
            added = []
            for i in each:
                place = e.at(weights[i], key.index, "f32")
                weight = vmath.exp_of_negative(e, e.sub(e.load(place, floats), new[i]))
                e.store(self._times(block, 1, key.index, weight), place)
                added.append(e.add(key.args[i], weight))
            key.end(*added)
        for part, top, total in zip(parts, new, key.results):
            e.store(top, part.top)
            e.store(total, part.total)
        vectors = max(1, SUMS // count)
        whole, rest = divmod(self.params["value_width"] // lanes, vectors)
        with e.loop(0, whole * vectors * lanes, vectors * lanes) as chunk:
            self._weigh(block, parts, weights, shrink, chunk.index, vectors, low, high)
        if rest:
            self._weigh(block, parts, weights, shrink, e.const(whole * vectors * lanes, "i64"), rest, low, high)

    def _shrink(self, old: Sequence[Value], new: Sequence[Value]) -> list[Value]:
        """What rows' sums so far are multiplied by when their maxima move: mostly none moves, and it is 1 without an
        exponential."""
        e = self.e
        places = [e.at(self.shrink, i * self.lanes, "f32") for i in range(len(old))]
        for place in places:
            e.store(e.const(1.0, self.floats), place)
        moved = [e.compare("une", e.lane(a, 0), e.lane(b, 0)) for a, b in zip(old, new)]
        while len(moved) > 1:
            moved = [e.or_(moved[0], moved[1]), *moved[2:]]
        with e.when(moved[0]):
            for place, a, b in zip(places, old, new):
                e.store(vmath.exp_of_negative(e, e.sub(a, b)), place)
        return [e.load(place, self.floats) for place in places]

    def _weigh(self, block: Stored | Copied, parts: Sequence[Running], weights: Sequence[Value],
               shrink: Sequence[Value], column: Value, vectors: int, low: Value, high: Value) -> None:
        """Adds to ``vectors`` vectors of the rows' values, from ``column`` on, those of keys [low, high)."""
        e = self.e
        offsets = [e.add(column, v * self.lanes) for v in range(vectors)]
        places = [e.at(part.values, offset, "f32") for part in parts for offset in offsets]
        begin = [e.mul(e.load(p, self.floats), shrink[i // vectors]) for i, p in enumerate(places)]
        with e.loop(low, high, init=begin) as key:
            factors = [e.splat(e.load(e.at(weight, key.index, "f32"), "f32"), self.lanes) for weight in weights]
            sums = [*key.args]
            block.ask(1, key.index, column, vectors * self.lanes)
            for v, offset in enumerate(offsets):
                value = block.value(key.index, offset)
                for i, factor in enumerate(factors):
                    sums[i * vectors + v] = e.fma(factor, value, sums[i * vectors + v])
            key.end(*sums)
        for place, total in zip(places, key.results):
            e.store(total, place)
