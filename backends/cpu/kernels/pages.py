"""Where a state's rows lie, and a key block's rows as attention reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaptc.backends.cpu.kernels.base import PTR, Emitter, Value, vec
from adaptc.plan import DTYPE_BYTES

COLUMNS = 4
"""Widths and key blocks are multiples of this, at every level."""

LINE = 64
"""Bytes of a cache line."""


def common_lanes(e: Emitter, params: Mapping[str, Any]) -> int:
    """Lanes of the vectors of a kernel: the level's, or fewer where those don't divide the widths."""
    sizes = [params[name] for name in ("width", "value_width", "key_block") if name in params]
    return next(n for n in (e.lanes, 8, COLUMNS) if all(size % n == 0 for size in sizes))


def load_index(e: Emitter, pointer: Value, index: Value) -> Value:
    """Entry of an i32 array as i64."""
    return e.cast("extsi", e.load(e.at(pointer, index, "i32"), "i32"), "i64")


def room(e: Emitter, count: int, kind: str = "f32") -> Value:
    """Memory of the thread's stack for this call. Ask for it outside all loops."""
    return e.op(f"llvm.alloca {e.const(count, 'i64')} x {kind} {{alignment = 64 : i64}} : (i64) -> {PTR}", PTR)


def part_widths(params: Mapping[str, Any]) -> tuple[int, ...]:
    """Columns of the parts that a state keeps: keys and values, or ``latent`` rows, of which keys are all columns and
    values the first ones."""
    return (params["width"],) if params["latent"] else (params["width"], params["value_width"])


class Pages:
    """A state's pages: [page][part][head][slot][column], page = table[request][position / page_size], and scales
    [part][head][slot] at a page's end, as ``plan.State`` says."""

    def __init__(self, e: Emitter, params: Mapping[str, Any], pool: Value, table: Value):
        self.e, self.params, self.pool, self.table = e, params, pool, table
        self.dtype = params["dtype"]
        self.bytes = DTYPE_BYTES[self.dtype]
        self.widths = part_widths(params)
        self.slots = params["kv_heads"] * params["page_size"]
        self.row_bytes = sum(self.slots * width * self.bytes for width in self.widths)
        self.page_bytes = page_elements(params) * self.bytes

    def at(self, request: Value, position: Value) -> tuple[Value, Value]:
        """(pointer to the page, slot) of a position; the page is looked up, so it must be one that is needed."""
        e, p = self.e, self.params
        entry = e.add(e.mul(request, p["max_pages"]), e.div(position, p["page_size"]))
        page = e.cast("extsi", e.load(e.at(self.table, entry, "i32"), "i32"), "i64")
        return e.at(self.pool, e.mul(page, self.page_bytes)), e.rem(position, p["page_size"])

    def rows(self, page: Value, slot: Value, head: Value) -> tuple[Value, ...]:
        """Pointers to the row of each part."""
        e, before, found = self.e, 0, []
        row = e.add(e.mul(head, self.params["page_size"]), slot)
        for width in self.widths:
            start = e.mul(row, width * self.bytes)
            found.append(e.at(page, e.add(start, before) if before else start))
            before += self.slots * width * self.bytes
        return tuple(found)

    def scales(self, page: Value, slot: Value, head: Value) -> tuple[Value, ...]:
        """Pointers to the scale of each part's row; none where rows have no scales."""
        if not self.params["scale"]:
            return ()
        e = self.e
        first = e.at(e.at(page, self.row_bytes), e.add(e.mul(head, self.params["page_size"]), slot), "f32")
        return first, *(e.at(first, i * self.slots, "f32") for i in range(1, len(self.widths)))


def page_elements(params: Mapping[str, Any]) -> int:
    """Elements of a page; its scales count as so many."""
    slots, scale = params["kv_heads"] * params["page_size"], DTYPE_BYTES.get(params["scale"], 0)
    widths = part_widths(params)
    return slots * (sum(widths) + len(widths) * scale // DTYPE_BYTES[params["dtype"]])


@dataclass(frozen=True)
class Place:
    """Where the rows of a block are. Parts: those of the state and, if there are, the scales of each; ``piece`` rows
    of a part follow one another. ``starts`` are pointers to the parts, or, with several pieces, to a table of pointers
    to the parts of each."""

    starts: tuple[Value, ...]
    piece: int
    table: Value | None = None

    def row(self, e: Emitter, part: int, key: Value) -> tuple[Value, Value]:
        """(pointer to a part's piece, row within it) of a key of the block."""
        if self.table is None:
            return self.starts[part], key
        entry = e.add(e.mul(e.div(key, self.piece), PARTS), part)
        return e.load(e.at(self.table, entry, PTR), PTR, 8), e.rem(key, self.piece)


PARTS = 4
"""Entries of a piece in a table of pointers: keys, values, and the scales of either."""


class Copies:
    """Room for as many rows of a head as a key block has, as they are stored, one after the other."""

    def __init__(self, e: Emitter, params: Mapping[str, Any], pages: Pages):
        self.e, self.pages = e, pages
        self.row_bytes = [width * pages.bytes for width in pages.widths]
        self.row_bytes += [DTYPE_BYTES["f32"]] * (len(pages.widths) if params["scale"] else 0)
        size = params["key_block"]
        self.place = Place(tuple(room(e, size * row, "i8") for row in self.row_bytes), size)
        for copy, row in zip(self.place.starts, self.row_bytes):  # rows that never are copied are read, though masked then
            with e.loop(0, size * row, COLUMNS) as i:
                e.store(e.const(0, vec(COLUMNS, "i8")), e.at(copy, i.index))

    def put(self, row: Value, request: Value, head: Value, position: Value) -> None:
        """The row of a position that is needed, as row number ``row``."""
        e, place = self.e, self.pages.at(request, position)
        parts = (*self.pages.rows(*place, head), *self.pages.scales(*place, head))
        for source, target, size in zip(parts, self.place.starts, self.row_bytes):
            unit = next(u for u in (32, 16, 8, COLUMNS) if size % u == 0)
            with e.loop(0, size, unit) as c:
                data = e.load(e.at(source, c.index), vec(unit, "i8"))
                e.store(data, e.at(e.at(target, e.mul(row, size)), c.index))


class Block:
    """The rows of one key block of a head, as they are stored: read in their pages, or, where pages are so small or so
    odd that vectors of keys lie in several, copied one after the other."""

    def __init__(self, e: Emitter, params: Mapping[str, Any], pages: Pages):
        self.e, self.params, self.pages = e, params, pages
        self.size = params["key_block"]
        self.lanes = common_lanes(e, params)
        piece = math.gcd(params["page_size"], self.size)
        self.in_place = piece % self.lanes == 0
        self.piece = piece if self.in_place else self.size
        self.table = self.next = None
        if self.piece < self.size:
            self.table, self.next = (room(e, self.size // self.piece * PARTS, "i64") for _ in range(2))
        self.copies = None if self.in_place else Copies(e, params, pages)

    def _piece(self, request: Value, head: Value, position: Value) -> tuple[Value, ...]:
        """Pointers to the first rows of the piece that a position lies in."""
        e = self.e
        page, slot = self.pages.at(request, position)
        slot = e.sub(slot, e.rem(slot, self.piece))
        return (*self.pages.rows(page, slot, head), *self.pages.scales(page, slot, head))

    def find(self, request: Value, head: Value, low: Value, high: Value) -> Place:
        """The block's rows. Positions [low, high) of it are needed; others may lie in no page."""
        e = self.e
        if self.copies is not None:
            with e.loop(low, high) as position:
                self.copies.put(e.rem(position.index, self.size), request, head, position.index)
            return self.copies.place
        if self.table is None:
            return Place(self._piece(request, head, low), self.size)
        return self._found(request, head, low, high, self.table)

    def _found(self, request: Value, head: Value, low: Value, high: Value, table: Value) -> Place:
        e = self.e
        with e.loop(e.sub(low, e.rem(low, self.piece)), high, self.piece) as position:
            entry = e.mul(e.div(e.rem(position.index, self.size), self.piece), PARTS)
            for part, start in enumerate(self._piece(request, head, e.max(position.index, low))):
                e.store(start, e.at(table, e.add(entry, part), PTR), 8)
        return Place((), self.piece, table)

    def ahead(self, request: Value, head: Value, low: Value, high: Value) -> Place | None:
        """The rows of a block that is needed soon, if at all (low < high), to be asked for by ``prefetch``: pages are
        what processors can't foresee."""
        if not self.in_place:
            return None
        e = self.e
        if self.table is None:
            return Place(self._piece(request, head, e.min(low, e.sub(high, 1))), self.size)
        return self._found(request, head, low, high, self.next)


def prefetch(e: Emitter, pointer: Value, size: int) -> None:
    """Asks for ``size`` bytes; whatever the pointer is, nothing fails."""
    how = "<{cache = 1 : i32, hint = 3 : i32, rw = 0 : i32}>"  # data, into the nearest cache, to be read
    for line in range(0, size, LINE):
        e.line(f'"llvm.intr.prefetch"({e.at(pointer, line)}) {how} : ({PTR}) -> ()')
