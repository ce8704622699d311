"""Where a state's rows lie, and a key block's rows as attention reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptc.backends.cpu.kernels.base import PTR, Emitter, Value, vec
from adaptc.backends.cpu.kernels.elementwise import STORED
from adaptc.plan import DTYPE_BYTES

COLUMNS = 8
"""Widths and key blocks are multiples of this, at every level."""

LINE = 64
"""Bytes of a cache line."""


def common_lanes(e: Emitter, params: Mapping[str, Any]) -> int:
    """Lanes of the vectors of a kernel: the level's, or fewer where those don't divide the widths."""
    sizes = [params[name] for name in ("width", "value_width", "key_block") if name in params]
    return next(n for n in (e.lanes, COLUMNS) if all(size % n == 0 for size in sizes))


def load_index(e: Emitter, pointer: Value, index: Value) -> Value:
    """Entry of an i32 array as i64."""
    return e.cast("extsi", e.load(e.at(pointer, index, "i32"), "i32"), "i64")


def room(e: Emitter, count: int, kind: str = "f32") -> Value:
    """Memory of the thread's stack for this call. Ask for it outside all loops."""
    return e.op(f"llvm.alloca {e.const(count, 'i64')} x {kind} {{alignment = 64 : i64}} : (i64) -> {PTR}", PTR)


class Pages:
    """A state's pages, of keys and values: [page][part][head][slot][column], page = table[request][position /
    page_size], and scales [part][head][slot] at a page's end, as ``plan.State`` says."""

    def __init__(self, e: Emitter, params: Mapping[str, Any], pool: Value, table: Value):
        self.e, self.params, self.pool, self.table = e, params, pool, table
        self.dtype = params["dtype"]
        self.bytes = DTYPE_BYTES[self.dtype]
        self.widths = (params["width"], params["value_width"])
        self.slots = params["kv_heads"] * params["page_size"]
        self.row_bytes = sum(self.slots * width * self.bytes for width in self.widths)
        self.page_bytes = page_elements(params) * self.bytes

    def at(self, request: Value, position: Value) -> tuple[Value, Value]:
        """(pointer to the page, slot) of a position; the page is looked up, so it must be one that is needed."""
        e, p = self.e, self.params
        entry = e.add(e.mul(request, p["max_pages"]), e.div(position, p["page_size"]))
        page = e.cast("extsi", e.load(e.at(self.table, entry, "i32"), "i32"), "i64")
        return e.at(self.pool, e.mul(page, self.page_bytes)), e.rem(position, p["page_size"])

    def rows(self, page: Value, slot: Value, head: Value) -> tuple[Value, Value]:
        """Pointers to a key row and its value row."""
        e, (width, value_width) = self.e, self.widths
        row = e.add(e.mul(head, self.params["page_size"]), slot)
        key = e.at(page, e.mul(row, width * self.bytes))
        return key, e.at(page, e.add(e.mul(row, value_width * self.bytes), self.slots * width * self.bytes))


    def scales(self, page: Value, slot: Value, head: Value) -> tuple[Value, ...]:
        """Pointers to a key row's scale and its value row's; none where rows have no scales."""
        if not self.params["scale"]:
            return ()
        e = self.e
        key = e.at(e.at(page, self.row_bytes), e.add(e.mul(head, self.params["page_size"]), slot), "f32")
        return key, e.at(key, self.slots, "f32")


def page_elements(params: Mapping[str, Any]) -> int:
    """Elements of a page; its scales count as so many."""
    slots, scale = params["kv_heads"] * params["page_size"], DTYPE_BYTES.get(params["scale"], 0)
    return slots * (params["width"] + params["value_width"] + 2 * scale // DTYPE_BYTES[params["dtype"]])


class Block:
    """The rows of one key block of a head, as they are stored: in their page, or copied from several pages one after
    the other."""

    def __init__(self, e: Emitter, params: Mapping[str, Any], pages: Pages):
        self.e, self.params, self.pages = e, params, pages
        self.size = params["key_block"]
        self.lanes = common_lanes(e, params)
        self.one_page = params["page_size"] % self.size == 0
        self.copies = () if self.one_page else tuple(room(e, self.size * width * pages.bytes, "i8") for width in pages.widths)
        self.scale_copies = tuple(room(e, self.size) for _ in self.copies if params["scale"])
        for copy, width in zip(self.copies, pages.widths):  # rows that never are copied are read, though masked then
            with e.loop(0, self.size * width * pages.bytes, COLUMNS) as i:
                e.store(e.const(0, vec(COLUMNS, "i8")), e.at(copy, i.index))

    def find(self, request: Value, head: Value, low: Value, high: Value) -> tuple[Value, ...]:
        """Pointers to the block's first key row and value row, and to their scales if they have some. Positions [low, high) of the block are needed: only
        they are copied, and others may lie in no page."""
        e = self.e
        if self.one_page:
            page, slot = self.pages.at(request, low)
            slot = e.sub(slot, e.rem(low, self.size))
            return (*self.pages.rows(page, slot, head), *self.pages.scales(page, slot, head))
        with e.loop(low, high) as position:
            place = self.pages.at(request, position.index)
            sources = self.pages.rows(*place, head)
            row = e.rem(position.index, self.size)
            for source, target in zip(self.pages.scales(*place, head), self.scale_copies):
                e.store(e.load(source, "f32"), e.at(target, row, "f32"))
            for source, target, width in zip(sources, self.copies, self.pages.widths):
                target = e.at(target, e.mul(row, width * self.pages.bytes))
                with e.loop(0, width, COLUMNS) as c:
                    columns = [e.at(p, c.index, STORED[self.pages.dtype]) for p in (source, target)]
                    e.store(e.load(columns[0], vec(COLUMNS, STORED[self.pages.dtype])), columns[1])
        return (*self.copies, *self.scale_copies)

    def prefetch(self, request: Value, head: Value, position: Value) -> None:
        """Asks for the block of a position that is needed soon; its page is one that processors can't foresee."""
        if not self.one_page:
            return
        e = self.e
        starts = self.find(request, head, position, position)
        sizes = [width * self.pages.bytes for width in self.pages.widths] + [DTYPE_BYTES["f32"]] * 2
        for start, size in zip(starts, sizes):
            with e.loop(0, self.size * size, LINE) as line:
                e.line(f'"llvm.intr.prefetch"({e.at(start, line.index)}) <{{cache = 1 : i32, hint = 3 : i32, rw = 0 : i32}}>'
                       f" : ({PTR}) -> ()")
