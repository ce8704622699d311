"""How the threads of a step divide the work of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from adaptc.backends.cpu.kernels.base import PTR, Emitter, Value
from adaptc.backends.cpu.kernels.pages import load_index

TILE_ROWS = 32
"""Rows that share a block's copy; with 64 columns their running results (8 KB) stay in the first-level cache."""

UNITS_A_THREAD = 2
"""Tiles get smaller where there would be fewer of them for a thread."""

READ_COST = 3
"""What reading a key costs, in rows that are multiplied by it."""


def runs(e: Emitter, positions: Value, requests: Value, low: Value, high: Value,
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


def first_key(e: Emitter, params: Mapping[str, Any], position: Value) -> Value:
    """The first key that a token at ``position`` sees."""
    window = params["window"]
    if params["chunked"]:
        return e.sub(position, e.rem(position, window))
    return e.max(e.sub(position, window - 1), 0) if window else e.const(0, "i64")


def seen(e: Emitter, params: Mapping[str, Any], position: Value) -> Value:
    """How many rows a token at ``position`` sees, counted from the first of all (``plan.State``)."""
    return e.div(e.add(position, 1), params["rate"]) if params["rate"] > 1 else e.add(position, 1)


def tile_tokens(params: Mapping[str, Any]) -> int:
    """Tokens that share the reading of their keys, at most."""
    return max(1, min(16, TILE_ROWS // (params["heads"] // params["sets"])))


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
    """Tokens [first, end) that continue one request, and one of the ``sets`` of query heads that read keys together
    (those of a key head, or some of it): ``set``. Their keys lie in the
    spans [low, high). ``split``: threads share those spans, and what each leaves starts at slot ``base``."""

    first: Value
    end: Value
    set: Value
    position: Value
    low: Value
    high: Value
    split: Value
    base: Value


class Division:
    """Who attends to what in a step. All the step's work in one order (tokens, sets of heads, spans of keys) is cut into as
    many parts of equal cost as there are threads; a cut falls between spans. Only a unit with a cut inside is split,
    and only as long as slots are left; any other belongs to the thread in whose part it starts. It depends on the
    step's positions and on the number of threads, and any thread finds all of it out by itself."""

    def __init__(self, e: Emitter, params: Mapping[str, Any], positions: Value, requests: Value):
        self.e, self.params, self.positions, self.requests = e, params, positions, requests
        self.group = params["heads"] // params["sets"]
        self.tokens = e.size("T")
        tile = tile_tokens(params)
        each = e.div(e.mul(self.tokens, params["sets"]), e.mul(e.n, UNITS_A_THREAD))
        self.size = e.select(e.compare("eq", e.n, 1), e.const(tile, "i64"), e.max(e.min(each, tile), 1))
        self.tiles = e.div(e.add(self.tokens, e.sub(self.size, 1)), self.size)
        self.before, self.slots = Count(e), Count(e)
        self._stretches(lambda first, end: self.before.set(
            e.add(self.before.get(), e.mul(self._cost(first, end), params["sets"]))))
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
            if self.params["rate"] > 1:  # tokens that see nothing have a span without keys
                high = e.max(high, 1)
            with e.loop(0, self.params["sets"]) as number:
                unit = Unit(first, end, number.index, position, low, high, e.const(False, "i1"), self.slots.get())
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
        return first_key(e, self.params, start), seen(e, self.params, e.add(start, e.sub(e.sub(end, first), 1)))

    def _weight(self, first: Value, end: Value) -> Value:
        """Cost of a key: to read it, and to multiply it by every row."""
        return self.e.add(self.e.mul(self.e.sub(end, first), self.group), READ_COST)

    def _cost(self, first: Value, end: Value) -> Value:
        least, most = self._keys(first, end)
        return self.e.mul(self.e.max(self.e.sub(most, least), 1), self._weight(first, end))

    def _stretches(self, body: Callable[[Value, Value], None]) -> None:
        e = self.e
        with e.loop(0, self.tiles) as number:
            begin = e.mul(number.index, self.size)
            runs(e, self.positions, self.requests, begin, e.min(e.add(begin, self.size), self.tokens), body)


