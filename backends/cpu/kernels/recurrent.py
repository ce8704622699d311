"""Operators with a value of fixed size a request: ``convolve``, ``recur``, ``running_max`` and ``pool``.

A request's value lies in the slots of a pool, [part][head][width] in float32. A step reads one slot, writes another and
leaves the first as it is (``plan.CacheGroup``). Every token advances the value in the same way, one after the other,
whatever else is in the step. Threads share what is independent: channels, heads, and columns of a head's matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from adaptc.backends.cpu.kernels import vmath
from adaptc.backends.cpu.kernels.base import Emitter, Family, Value, vec
from adaptc.backends.cpu.kernels.pages import load_index, room
from adaptc.backends.cpu.levels import Level
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection

COLUMNS = 32
"""Columns of a head's matrix that one thread advances at once. With 128 rows they take 16 KB, half a first-level cache,
and are stored one after the other, row by row: [columns / 32][rows][32], the last part with what columns are left."""

CHAINS = 4
"""Sums that go on side by side, in registers: as many as a multiplication takes cycles."""


class Slots:
    """The pool and the table of a step's slots, i32[R, 2]."""

    def __init__(self, e: Emitter, pool: Value, table: Value, size: int):
        self.e, self.pool, self.table, self.size = e, pool, table, size

    def of(self, request: Value, offset: Value) -> tuple[Value, Value, Value]:
        """(pointer to read from, whether the request has no value yet, pointer to write to), ``offset`` floats into the
        slots. Where there is no value yet, the pointer to read from is the other one: memory that may be read, and
        means nothing."""
        e = self.e
        entry = e.mul(request, 2)
        old, new = load_index(e, self.table, entry), load_index(e, self.table, e.add(entry, 1))
        fresh = e.compare("slt", old, 0)
        old, new = (e.at(self.pool, e.add(e.mul(slot, self.size), offset), "f32")
                    for slot in (e.select(fresh, new, old), new))
        return old, fresh, new


def stretches(e: Emitter, tokens: Value, requests: Value, body: Callable[[Value, Value, Value], None]) -> None:
    """``body(first, end, request)`` for the tokens [first, end) of each request of a step."""
    with e.loop(0, tokens, init=[e.const(0, "i64")]) as token:
        (first,) = token.args
        request, end = load_index(e, requests, token.index), e.add(token.index, 1)
        after = load_index(e, requests, e.min(end, e.sub(tokens, 1)))
        ends = e.or_(e.compare("eq", end, tokens), e.compare("ne", request, after))
        with e.when(ends):
            body(first, end, request)
        token.end(e.select(ends, end, first))


@contextmanager
def channels(e: Emitter, count: int) -> Iterator[tuple[Value, Value | None]]:
    """A loop over this thread's vectors of channels: (the first channel, mask of those that there are)."""
    low, high = e.share(-(-count // e.lanes))
    with e.loop(low, high) as block:
        first = e.mul(block.index, e.lanes)
        yield first, e.mask(e.sub(count, first)) if count % e.lanes else None


def _held(e: Emitter, fresh: Value, initial: float, pointer: Value, mask: Value | None) -> Value:
    """A vector of the value before the step."""
    return e.select(fresh, e.const(initial, e.floats), e.load(pointer, e.floats, mask=mask))


# ---- convolve


def emit_convolve(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """The rows of a window are in registers while a request's tokens go by."""
    e = Emitter(level)
    count, taps = params["channels"], params["taps"]
    x, weight, requests, pool, table, *bias, out = (e.buffer(i) for i in range(len(convolve_signature(params))))
    slots, tokens = Slots(e, pool, table, (taps - 1) * count), e.size("T")
    with channels(e, count) as (first, mask):
        wide = vec(e.lanes * taps, "f32")
        some = None if mask is None else e.mask(e.mul(e.sub(count, first), taps), e.lanes * taps)
        whole = e.load(e.at(weight, e.mul(first, taps), "f32"), wide, mask=some)
        factors = [e.shuffle(whole, whole, range(j, e.lanes * taps, taps)) for j in range(taps)]
        start = e.load(e.at(bias[0], first, "f32"), e.floats, mask=mask) if bias else e.const(0.0, e.floats)

        def advance(begin: Value, end: Value, request: Value) -> None:
            old, fresh, new = slots.of(request, first)
            window = [_held(e, fresh, 0.0, e.at(old, j * count, "f32"), mask) for j in range(taps - 1)]
            with e.loop(begin, end, init=window) as token:
                place = e.add(e.mul(token.index, count), first)
                rows = (*token.args, e.load(e.at(x, place, "f32"), e.floats, mask=mask))
                total = start
                for factor, row in zip(factors, rows):
                    total = e.fma(factor, row, total)
                e.store(total, e.at(out, place, "f32"), mask=mask)
                token.end(*rows[1:])
            for j, row in enumerate(token.results):
                e.store(row, e.at(new, j * count, "f32"), mask=mask)

        stretches(e, tokens, requests, advance)
    return e.text(symbol)


# ---- running_max


def emit_running_max(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    count = params["channels"]
    x, decay, requests, pool, table, out = (e.buffer(i) for i in range(6))
    slots, tokens = Slots(e, pool, table, count), e.size("T")
    with channels(e, count) as (first, mask):

        def advance(begin: Value, end: Value, request: Value) -> None:
            old, fresh, new = slots.of(request, first)
            with e.loop(begin, end, init=[_held(e, fresh, -math.inf, old, mask)]) as token:
                place = e.add(e.mul(token.index, count), first)
                value, change = (e.load(e.at(p, place, "f32"), e.floats, mask=mask) for p in (x, decay))
                largest = vmath.maximum(e, e.add(token.args[0], change), value)
                e.store(largest, e.at(out, place, "f32"), mask=mask)
                token.end(largest)
            e.store(token.results[0], new, mask=mask)

        stretches(e, tokens, requests, advance)
    return e.text(symbol)


# ---- recur


class _Decay:
    """e^decay of one head at one token: of each of its rows, on the thread's stack, or one for all."""

    def __init__(self, e: Emitter, decay: Value, width: int):
        self.e, self.decay, self.width = e, decay, width
        self.memory = room(e, -(-width // e.lanes) * e.lanes) if width > 1 else None
        self.one: Value | None = None

    def prepare(self, row: Value) -> None:
        e = self.e
        start = e.at(self.decay, e.mul(row, self.width), "f32")
        if self.memory is None:
            self.one = vmath.exp(e, e.splat(e.load(start, "f32")))
            return
        for k, mask in _vectors(e, self.width):
            value = vmath.exp(e, e.load(e.at(start, k, "f32"), e.floats, mask=mask))
            e.store(value, e.at(self.memory, k, "f32"))

    def of_row(self, k: Value) -> Value:
        """In every lane."""
        return self.one or self.e.splat(self.e.load(self.e.at(self.memory, k, "f32"), "f32"))

    def of_rows(self, k: Value | int) -> Value:
        """One row a lane, from row ``k`` on."""
        return self.one or self.e.load(self.e.at(self.memory, k, "f32"), self.e.floats)


def _vectors(e: Emitter, count: int) -> Iterator[tuple[Value, Value | None]]:
    """A loop over the vectors that cover ``count`` numbers, and what is left after it: (first, mask)."""
    whole = count - count % e.lanes
    if whole:
        with e.loop(0, whole, e.lanes) as block:
            yield block.index, None
    if whole < count:
        yield e.const(whole, "i64"), e.mask(e.const(count - whole, "i64"))


def emit_recur(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """By columns where a head's matrix has several, else by rows; heads of one number are lanes."""
    if params["value_width"] > 1:
        return _emit_columns(params, symbol, level)
    return (_emit_rows if params["width"] > 1 else _emit_numbers)(params, symbol, level)


def _operands(e: Emitter, params: Mapping[str, Any]) -> tuple[Value, ...]:
    """Query, key, value, decay, requests, pool, table, beta or None, out."""
    *given, out = (e.buffer(i) for i in range(len(recur_signature(params))))
    return (*given[:7], given[7] if params["beta"] else None, out)


def _emit_columns(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """A unit is up to ``COLUMNS`` columns of a head, which depend on no others."""
    e = Emitter(level)
    heads, width, columns = (params[name] for name in ("heads", "width", "value_width"))
    query, key, value, decay, requests, pool, table, beta, out = _operands(e, params)
    slots, tokens = Slots(e, pool, table, heads * width * columns), e.size("T")
    factors = _Decay(e, decay, params["decays"])

    def unit(head: Value, start: Value, size: int) -> None:
        """Columns [start, start + size) of a head."""
        count = -(-size // e.lanes)
        rest = e.mask(e.const(size % e.lanes, "i64")) if size % e.lanes else None
        masks = [None] * (count - 1) + [rest]
        ways = next(n for n in (4, 2, 1) if width % n == 0 and n * count <= max(CHAINS, count))

        def load(pointer: Value, at: Value | int = 0) -> list[Value]:
            pointer = e.at(pointer, at, "f32")
            return [e.load(e.at(pointer, i * e.lanes, "f32"), e.floats, mask=m) for i, m in enumerate(masks)]

        def store(row: list[Value], pointer: Value, at: Value | int = 0) -> None:
            pointer = e.at(pointer, at, "f32")
            for i, (part, mask) in enumerate(zip(row, masks)):
                e.store(part, e.at(pointer, i * e.lanes, "f32"), mask=mask)

        def summed(term: Callable[[Value, list[Value]], list[Value]]) -> list[Value]:
            """Σ over rows: ``term(k, sum so far)`` adds row k's."""
            zero = e.const(0.0, e.floats)
            with e.loop(0, width, ways, init=[zero] * ways * count) as rows:
                sums = []
                for way in range(ways):
                    sums += term(e.add(rows.index, way), list(rows.args[way * count : (way + 1) * count]))
                rows.end(*sums)
            return [e.tree(e.add, rows.results[i::count]) for i in range(count)]

        def advance(begin: Value, end: Value, request: Value) -> None:
            offset = e.mul(e.add(e.mul(head, columns), start), width)
            old, fresh, new = slots.of(request, offset)
            with e.when(fresh):
                with e.loop(0, width) as k:
                    store([e.const(0.0, e.floats)] * count, new, e.mul(k.index, size))
            with e.loop(begin, end) as token:
                source = e.select(e.compare("eq", token.index, begin), e.select(fresh, new, old), new)
                row = e.add(e.mul(token.index, heads), head)
                q, k_ = (e.at(p, e.mul(row, width), "f32") for p in (query, key))
                number = lambda p, k: e.splat(e.load(e.at(p, k, "f32"), "f32"))  # noqa: E731
                here = e.add(e.mul(row, columns), start)
                factors.prepare(row)

                def decayed(k: Value, held: list[Value]) -> list[Value]:
                    factor = factors.of_row(k)
                    return [e.mul(factor, part) for part in held]

                def by_key(k: Value, sums: list[Value]) -> list[Value]:
                    rows, by = decayed(k, load(source, e.mul(k, size))), number(k_, k)
                    return [e.fma(by, part, s) for part, s in zip(rows, sums)]

                update = load(value, here)
                if beta is not None:
                    share = e.splat(e.load(e.at(beta, row, "f32"), "f32"))
                    update = [e.mul(share, e.sub(v, s)) for v, s in zip(update, summed(by_key))]

                def by_query(k: Value, sums: list[Value]) -> list[Value]:
                    held, by_k, by_q = load(source, e.mul(k, size)), number(k_, k), number(q, k)
                    after = [e.fma(by_k, u, part) for u, part in zip(update, decayed(k, held))]
                    store(after, new, e.mul(k, size))
                    return [e.fma(by_q, part, s) for part, s in zip(held if params["before"] else after, sums)]

                store(summed(by_query), out, here)

        stretches(e, tokens, requests, advance)

    whole, left = columns // COLUMNS, columns % COLUMNS
    parts = whole + (left > 0)
    low, high = e.share(heads * parts)
    with e.loop(low, high) as number:
        head, part = e.div(number.index, parts), e.rem(number.index, parts)
        start, is_whole = e.mul(part, COLUMNS), e.compare("slt", part, whole)
        if whole:
            with e.when(is_whole):
                unit(head, start, COLUMNS)
        if left:
            with e.when(e.xor(is_whole, True)):
                unit(head, start, left)
    return e.text(symbol)


def _emit_rows(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """Matrices of one column: a vector has rows of a head, and sums go over its lanes at last."""
    e = Emitter(level)
    heads, width = params["heads"], params["width"]
    query, key, value, decay, requests, pool, table, beta, out = _operands(e, params)
    slots, tokens = Slots(e, pool, table, heads * width), e.size("T")
    factors, partial = _Decay(e, decay, params["decays"]), room(e, e.lanes)

    def summed(term: Callable[[Value, Value | None, Value], Value]) -> Value:
        """Σ over rows: ``term(k, mask, sum so far)`` adds those of a vector. The sum is on the stack, as the vectors are a
        loop and what is left after it; compiled it is a register."""
        e.store(e.const(0.0, e.floats), partial)
        for k, mask in _vectors(e, width):
            e.store(term(k, mask, e.load(partial, e.floats)), partial)
        return e.reduce(e.add, e.load(partial, e.floats))

    low, high = e.share(heads)
    with e.loop(low, high) as head:

        def advance(begin: Value, end: Value, request: Value) -> None:
            old, fresh, new = slots.of(request, e.mul(head.index, width))
            with e.when(fresh):
                for k, mask in _vectors(e, width):
                    e.store(e.const(0.0, e.floats), e.at(new, k, "f32"), mask=mask)
            with e.loop(begin, end) as token:
                source = e.select(e.compare("eq", token.index, begin), e.select(fresh, new, old), new)
                row = e.add(e.mul(token.index, heads), head.index)
                q, k_ = (e.at(p, e.mul(row, width), "f32") for p in (query, key))
                load = lambda p, k, mask: e.load(e.at(p, k, "f32"), e.floats, mask=mask)  # noqa: E731
                factors.prepare(row)

                def by_key(k: Value, mask: Value | None, total: Value) -> Value:
                    return e.fma(load(k_, k, mask), e.mul(factors.of_rows(k), load(source, k, mask)), total)

                update = e.load(e.at(value, row, "f32"), "f32")
                if beta is not None:
                    update = e.mul(e.load(e.at(beta, row, "f32"), "f32"), e.sub(update, summed(by_key)))
                update = e.splat(update)

                def by_query(k: Value, mask: Value | None, total: Value) -> Value:
                    held = load(source, k, mask)
                    after = e.fma(load(k_, k, mask), update, e.mul(factors.of_rows(k), held))
                    e.store(after, e.at(new, k, "f32"), mask=mask)
                    return e.fma(load(q, k, mask), held if params["before"] else after, total)

                e.store(summed(by_query), e.at(out, row, "f32"))

        stretches(e, tokens, requests, advance)
    return e.text(symbol)


def _emit_numbers(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """Matrices of one number: a vector has heads."""
    e = Emitter(level)
    heads = params["heads"]
    query, key, value, decay, requests, pool, table, beta, out = _operands(e, params)
    slots, tokens = Slots(e, pool, table, heads), e.size("T")
    with channels(e, heads) as (first, mask):

        def advance(begin: Value, end: Value, request: Value) -> None:
            old, fresh, new = slots.of(request, first)
            with e.loop(begin, end, init=[_held(e, fresh, 0.0, old, mask)]) as token:
                place = e.add(e.mul(token.index, heads), first)
                load = lambda p: e.load(e.at(p, place, "f32"), e.floats, mask=mask)  # noqa: E731
                (held,), k, update = token.args, load(key), load(value)
                decayed = e.mul(vmath.exp(e, load(decay)), held)
                if beta is not None:
                    update = e.mul(load(beta), e.sub(update, e.mul(k, decayed)))
                after = e.fma(k, update, decayed)
                e.store(e.mul(load(query), held if params["before"] else after), e.at(out, place, "f32"), mask=mask)
                token.end(after)
            e.store(token.results[0], new, mask=mask)

        stretches(e, tokens, requests, advance)
    return e.text(symbol)


# ---- pool


def pooled(series: int) -> list[tuple[int, int]]:
    """What is kept, in order: (series, how many windows ago) of each running softmax."""
    return [(one, ago) for one in range(series) for ago in range(series - one)]


def emit_pool(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """What is kept of a vector of channels is in registers while a request's tokens go by: three vectors for each running
    softmax of ``pooled``."""
    e = Emitter(level)
    count, series, rate = (params[name] for name in ("channels", "series", "rate"))
    value, gate, positions, requests, pool, table, *bias, out = (e.buffer(i) for i in range(len(pool_signature(params))))
    kept = pooled(series)
    slots, tokens = Slots(e, pool, table, 3 * len(kept) * count), e.size("T")
    nothing = (-math.inf, 0.0, 0.0)  # the largest gate, the sum of exponentials, that of values
    with channels(e, count) as (first, mask):

        def advance(begin: Value, end: Value, request: Value) -> None:
            old, fresh, new = slots.of(request, first)
            held = [_held(e, fresh, 0.0, e.at(old, j * count, "f32"), mask) for j in range(3 * len(kept))]
            with e.loop(begin, end, init=held) as token:
                position = load_index(e, positions, token.index)
                window, inside = e.div(position, rate), e.rem(position, rate)
                opens = e.compare("eq", inside, 0)
                at = lambda p, row: e.at(p, e.add(e.mul(row, count), first), "f32")  # noqa: E731
                load = lambda p, row: e.load(at(p, row), e.floats, mask=mask)  # noqa: E731
                before = {place: token.args[3 * i : 3 * i + 3] for i, place in enumerate(kept)}
                now = {}
                for one, ago in kept:
                    moved = before[one, ago - 1] if ago else [e.const(number, e.floats) for number in nothing]
                    now[one, ago] = [e.select(opens, x, y) for x, y in zip(moved, before[one, ago])]
                for one in range(series):
                    top, total, weighed = now[one, 0]
                    row = e.add(e.mul(token.index, series), one)
                    own = load(gate, row)
                    if bias:
                        own = e.add(own, load(bias[0], e.add(e.mul(inside, series), one)))
                    most = vmath.maximum(e, top, own)
                    shrinks, weight = (vmath.exp_of_negative(e, e.sub(x, most)) for x in (top, own))
                    now[one, 0] = [most, e.fma(total, shrinks, weight),
                                   e.fma(load(value, row), weight, e.mul(weighed, shrinks))]
                tops, read = [], []
                for one in range(series):
                    ago = series - 1 - one
                    top, *sums = now[one, ago]
                    read.append(sums)
                    tops.append(e.select(e.compare("sge", window, ago), top, e.const(-math.inf, e.floats)) if ago else top)
                most = tops[-1]
                for top in tops[:-1]:
                    most = vmath.maximum(e, most, top)
                total = weighed = e.const(0.0, e.floats)
                for top, sums in zip(tops, read):
                    weight = vmath.exp_of_negative(e, e.sub(top, most))
                    total, weighed = (e.fma(part, weight, so_far) for part, so_far in zip(sums, (total, weighed)))
                e.store(e.div(weighed, total), at(out, token.index), mask=mask)
                token.end(*(x for place in kept for x in now[place]))
            for j, row in enumerate(token.results):
                e.store(row, e.at(new, j * count, "f32"), mask=mask)

        stretches(e, tokens, requests, advance)
    return e.text(symbol)


# ---- declaration


def _state(size: int) -> tuple[str, str]:
    return f"state:f32[slots,{size}]", "pages:i32[R,2]"


def convolve_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    count, taps = params["channels"], params["taps"]
    bias = (f"in:f32[{count}]",) * params["bias"]
    return (f"in:f32[T,{count}]", f"in:f32[{count},{taps}]", "in:i32[T]", *_state((taps - 1) * count), *bias,
            f"out:f32[T,{count}]")


def running_max_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    rows = f"f32[T,{params['channels']}]"
    return (f"in:{rows}", f"in:{rows}", "in:i32[T]", *_state(params["channels"]), f"out:{rows}")


def recur_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    heads, width, columns = (params[name] for name in ("heads", "width", "value_width"))
    three = lambda last: f"f32[T,{heads},{last}]"  # noqa: E731
    beta = (f"in:f32[T,{heads}]",) * params["beta"]
    return (*(f"in:{three(n)}" for n in (width, width, columns, params["decays"])), "in:i32[T]",
            *_state(heads * width * columns), *beta, f"out:{three(columns)}")


def pool_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    count, series = params["channels"], params["series"]
    bias = (f"in:f32[{params['rate']},{series},{count}]",) * params["bias"]
    rows = f"in:f32[T,{series},{count}]"
    return (rows, rows, "in:i32[T]", "in:i32[T]", *_state(3 * len(pooled(series)) * count), *bias, f"out:f32[T,{count}]")


FAMILIES = {
    "convolve": Family(emit_convolve, convolve_signature),
    "recur": Family(emit_recur, recur_signature),
    "running_max": Family(emit_running_max, running_max_signature),
    "pool": Family(emit_pool, pool_signature),
}


def _selection(family: str, params: Mapping[str, Any], *args: str) -> Selection:
    return Selection((KernelUse(KernelSpec(family, tuple(sorted(params.items()))), args),))


def _select_convolve(spec: OpSpec) -> Selection:
    count, taps = spec.operands[1].shape
    bias = ("operand:5",) * (len(spec.operands) > 5)
    return _selection("convolve", {"bias": bool(bias), "channels": count, "taps": taps}, "operand:0", "operand:1",
                      "operand:3", "state:4", "pages:4", *bias, "result:0")


def _select_running_max(spec: OpSpec) -> Selection:
    return _selection("running_max", {"channels": spec.operands[0].shape[1]}, "operand:0", "operand:1", "operand:3",
                      "state:4", "pages:4", "result:0")


def _select_recur(spec: OpSpec) -> Selection:
    query, _, value, decay, *_ = spec.operands
    beta = ("operand:7",) * (len(spec.operands) > 7)
    params = {"before": spec.attrs["read"] == "before", "beta": bool(beta), "decays": decay.shape[2],
              "heads": query.shape[1], "value_width": value.shape[2], "width": query.shape[2]}
    return _selection("recur", params, *(f"operand:{i}" for i in range(4)), "operand:5", "state:6", "pages:6", *beta,
                      "result:0")


def _select_pool(spec: OpSpec) -> Selection:
    _, series, count = spec.operands[0].shape
    bias = ("operand:5",) * (len(spec.operands) > 5)
    params = {"bias": bool(bias), "channels": count, "rate": spec.attrs["rate"], "series": series}
    return _selection("pool", params, *(f"operand:{i}" for i in range(4)), "state:4", "pages:4", *bias, "result:0")


SELECT = {"convolve": _select_convolve, "recur": _select_recur, "running_max": _select_running_max, "pool": _select_pool}
