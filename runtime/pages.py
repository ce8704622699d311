"""Pages of the caches and slots of fixed states: one pool a cache group, one table a request and group.

A page id stands for the same page in every state of its group, so a pool holds numbers only; a slot is a page that one
value of every fixed state fills. Reservation is what
makes admission safe: a request promises the most pages it can ever hold at once, and the promises of the admitted
requests never exceed the pool, so a running request always finds its next page.

A page whose content is final may have a key (``adaptc.runtime.prefix``). When nobody holds it any more it is idle: whoever
needs what it holds finds it by its key, and whoever needs a page takes the idle one that was used longest ago.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from adaptc.plan import SLOT_ENTRIES


class PagePool:
    """Page numbers 0 … pages-1 with reference counts. ``order_seed`` hands pages out in random order, for tests."""

    def __init__(self, pages: int, order_seed: int | None = None):
        self.pages = pages
        self.reserved = 0
        self._random = None if order_seed is None else random.Random(order_seed)
        self._references = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        self._pages: dict[bytes, int] = {}  # by key; the rest follows from it and from who holds what
        self._keys: list[bytes | None] = [None] * pages
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Pages that nobody holds and whose content means nothing."""
        return tuple(self._free)

    @property
    def idle_pages(self) -> tuple[int, ...]:
        """Pages that nobody holds and that can be found by their keys."""
        return tuple(self._idle)

    def reserve(self, count: int) -> bool:
        """Promises ``count`` pages to a request, if the pool can keep the promise."""
        if self.reserved + count > self.pages:
            return False
        self.reserved += count
        return True

    def unreserve(self, count: int) -> None:
        self.reserved -= count

    def alloc(self) -> int:
        """A page nobody holds; its content is undefined. Within a reservation there always is one."""
        if not self._free and self._idle:
            self._forget(next(iter(self._idle)))
        if self._random is not None:
            i = self._random.randrange(len(self._free))
            self._free[i], self._free[-1] = self._free[-1], self._free[i]
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page in use, or of an idle one."""
        assert self._references[page] > 0 or page in self._idle, f"page {page} is free"
        self._idle.pop(page, None)
        self._references[page] += 1

    def shared(self, page: int) -> bool:
        """Whether a page has several holders: then none of them may write into it."""
        return self._references[page] > 1

    def free(self, page: int) -> None:
        """One holder less; the page is free, or idle, when it was the last."""
        assert self._references[page] > 0, f"page {page} is free already"
        self._references[page] -= 1
        if self._references[page] == 0:
            if self._keys[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def name(self, page: int, key: bytes) -> None:
        """From now on ``page`` is found by ``key``, unless another page of the same content is."""
        if self._keys[page] is None and key not in self._pages:
            self._keys[page] = key
            self._pages[key] = page

    def find(self, key: bytes) -> int | None:
        """The page of this key, if its content is still there."""
        return self._pages.get(key)

    def forget(self, key: bytes | None = None) -> None:
        """Lets go of the idle page of this key; without one, of all keys."""
        if key is not None:
            if (page := self.find(key)) in self._idle:
                self._forget(page)
            return
        self._pages.clear()
        self._keys = [None] * self.pages
        self._free += self._idle
        self._idle.clear()

    def _forget(self, page: int) -> None:
        del self._pages[self._keys[page]]
        self._keys[page] = None
        del self._idle[page]
        self._free.append(page)

    def recount(self, held: Iterable[int], reserved: int) -> None:
        """Rebuilds everything from what is held (a page once a holder): the way back from an interrupted change."""
        holders = Counter(held)
        self._references = [holders[page] for page in range(self.pages)]
        self._keys = [None] * self.pages
        for key, page in self._pages.items():
            self._keys[page] = key
        named = [*self._idle, *self._pages.values()]  # idle ones in their order, then those that an interrupt left out
        self._idle = OrderedDict.fromkeys(p for p in named if self._keys[p] is not None and not holders[p])
        self._free = [p for p in range(self.pages - 1, -1, -1) if not holders[p] and p not in self._idle]
        self.reserved = reserved


def pages_needed(tokens: int, page_size: int, window: int, step_tokens: int) -> int:
    """The most pages that a request of ``tokens`` tokens holds at once in a group.

    With a window, a step of n tokens sees window - 1 earlier rows and its own n: wherever that run of rows starts, it
    touches at most (window - 1 + n + page_size - 2) // page_size + 1 pages.
    """
    every = -(-tokens // page_size)
    return every if window == 0 else min(every, (window + step_tokens + page_size - 3) // page_size + 1)


class SlotTable:
    """One request's slots of fixed states: ``entries`` i32[2], the slot to read (-1: the initial value) and the one to
    write (-1 between steps). What is read is never written into, so holders share it and a step can be tried again."""

    def __init__(self, pool: PagePool):
        self.pool = pool
        self.entries = np.full(SLOT_ENTRIES, -1, np.int32)

    def needs(self, tokens: int) -> Iterator[tuple[int, int]]:
        """(start, end) of what positions from ``tokens`` on read of those before: the value after the last of them alone."""
        yield tokens - 1, tokens

    def adopt(self, tokens: int, slots: Sequence[int]) -> None:
        """Reads next what ``needs`` has named."""
        self.entries[0] = slots[0]
        self.pool.share(slots[0])

    @property
    def next_read(self) -> int:
        """The slot that the next step reads, also when the last one's commit hasn't come here yet."""
        read, written = self.entries
        return int(written if written >= 0 else read)

    def grow(self, tokens: int) -> None:
        """Holds a slot to write."""
        if self.entries[1] < 0:
            self.entries[1] = self.pool.alloc()

    def fork(self, source: SlotTable, tokens: int) -> None:
        """Reads next what ``source`` has written, or reads next, together with it."""
        self.entries[:] = source.next_read, -1
        self.pool.share(source.next_read)

    def own(self, position: int) -> Iterator[tuple[int, int]]:
        """Nothing to copy: what several hold is only read."""
        return iter(())

    def slide(self, length: int) -> None:
        """The step that ends at ``length`` has happened: what it wrote is read next. Once or twice is the same."""
        read, written = (int(slot) for slot in self.entries)
        if written >= 0:
            self.entries[:] = written, -1
            if read >= 0:
                self.pool.free(read)

    def release(self) -> None:
        held, self.entries[:] = [int(slot) for slot in self.entries if slot >= 0], -1
        for slot in held:
            self.pool.free(slot)

    def held(self, length: int) -> list[int]:
        """As ``BlockTable.held``: of a step that did not commit, the slot to write is forgotten."""
        self.entries[1] = -1
        if length == 0:
            self.entries[0] = -1
        return [int(slot) for slot in self.entries if slot >= 0]


class BlockTable:
    """One request's pages in one group, of ``page_size`` tokens each: ``entries`` i32[max_pages], page ids by page index,
    -1 where there is none."""

    def __init__(self, pool: PagePool, page_size: int, window: int, max_pages: int):
        self.pool, self.page_size, self.window = pool, page_size, window
        self.entries = np.full(max_pages, -1, np.int32)
        self._first = self._end = 0

    def needs(self, tokens: int) -> Iterator[tuple[int, int]]:
        """(start, end) of the pages before ``tokens``, a page's end, that positions from there on read."""
        for index in range(self._read_from(tokens), tokens // self.page_size):
            yield index * self.page_size, (index + 1) * self.page_size

    def adopt(self, tokens: int, pages: Sequence[int]) -> None:
        """Holds the pages that ``needs`` has named, which others have filled; this table has none yet."""
        count = tokens // self.page_size
        self._first, self._end = count - len(pages), count
        self.entries[self._first : count] = pages
        for page in pages:
            self.pool.share(page)

    def filled(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """(end, page) of pages that the tokens from ``start`` to ``end`` have filled."""
        for index in range(start // self.page_size, end // self.page_size):
            if (page := int(self.entries[index])) >= 0:
                yield (index + 1) * self.page_size, page

    def grow(self, tokens: int) -> None:
        """Holds pages for positions below ``tokens``."""
        while self._end * self.page_size < tokens:
            self.entries[self._end] = self.pool.alloc()
            self._end += 1

    def fork(self, source: BlockTable, tokens: int) -> None:
        """Holds the pages that ``source`` holds for positions below ``tokens``, together with it."""
        self.entries[:] = source.entries
        self._first, self._end = source._first, -(-tokens // self.page_size)
        self.entries[self._end :] = -1
        for page in self.entries[self._first : self._end]:
            self.pool.share(int(page))

    def own(self, position: int) -> Iterator[tuple[int, int]]:
        """Makes the page that row ``position`` goes into this table's alone: gives (old, new) when it is shared, and
        takes the new one when the caller has copied the old one's bytes."""
        index = position // self.page_size
        if index < self._end and self.pool.shared(old := int(self.entries[index])):
            yield old, (new := self.pool.alloc())
            self.entries[index] = new
            self.pool.free(old)

    def slide(self, length: int) -> None:
        """Frees pages that no position from ``length`` on reads: those wholly at or below length - window."""
        self._drop(self._read_from(length))

    def release(self) -> None:
        self._drop(self._end)

    def _read_from(self, length: int) -> int:
        """Index of the first page that positions from ``length`` on read."""
        return max(0, length - self.window + 1) // self.page_size if self.window else 0

    def _drop(self, first: int) -> None:
        start, self._first = self._first, max(self._first, min(first, self._end))
        pages = self.entries[start : self._first].tolist()
        self.entries[start : self._first] = -1
        for page in reversed(pages):  # a prefix is of use without what follows it, not the other way round
            self.pool.free(page)

    def held(self, length: int) -> list[int]:
        """The pages held for positions below ``length``, after forgetting (not freeing) those beyond: what a step
        that did not commit had taken. Together with ``PagePool.recount`` this undoes it."""
        self._end = -(-length // self.page_size)
        self.entries[self._end :] = -1
        used = np.flatnonzero(self.entries >= 0)
        self._first = int(used[0]) if len(used) else self._end
        return [int(page) for page in self.entries[used]]
