"""Requests with a past, for a stateful operator called alone: a pool and its block table, and the oracle's state.

Pages and slots are handed out in random order. They hold NaN where nothing was written, and in those that nobody may
read any more: what a kernel must not read shows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from adaptc.ops.mixing import oracle_state
from adaptc.ops.table import OpRow
from adaptc.protocol import StateSpec


def aligned(shape, dtype, fill) -> np.ndarray:
    """An array of ``fill`` that starts on a cache line, as buffers of a plan do."""
    size = int(np.prod(np.atleast_1d(shape))) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + size].view(dtype).reshape(shape)
    array[...] = fill
    return array


class Cache:
    """``memory``: (pool, block table) as kernels take them; ``state``: what the oracle reads in their place."""

    def __init__(self, kind: StateSpec, pages: int, requests: int, rng: np.random.Generator):
        self.kind, self.state = kind, oracle_state(kind)
        self.memory = (aligned((pages, kind.page_bytes()), np.uint8, 0xFF),
                       aligned((requests, kind.max_pages), np.int32, -1))
        self.free = list(rng.permutation(pages))

    @staticmethod
    def of(kind: StateSpec, requests: int, context: int, tokens: int, rng: np.random.Generator) -> Cache:
        """For one request of ``context`` tokens, and ``tokens`` of others."""
        return {"rows": _Pages, "fixed": _Slots}[kind.kind](kind, requests, context, tokens, rng)

    def hold(self, request: int, tokens: int) -> None:
        """What the request's next step needs, after which it has ``tokens`` tokens."""

    def forget(self, request: int, length: int) -> None:
        """Gives back, and poisons, what no position from ``length`` on reads."""

    def kept(self) -> np.ndarray:
        """A copy of all that a step must leave as it is."""

    def append(self, operator: OpRow, attrs: Mapping, operands: list) -> None:
        """What a step leaves in the oracle's state, by the operator itself."""
        operator.meaning(attrs, *(self.state if i == operator.state else o for i, o in enumerate(operands)))


class _Pages(Cache):
    """Rows, in pages."""

    def __init__(self, kind: StateSpec, requests: int, context: int, tokens: int, rng: np.random.Generator):
        size = self.tokens = kind.page_size * kind.rate
        pages = -(-context // size) + -(-tokens // size) + requests + 2
        super().__init__(kind, pages, requests, rng)

    def hold(self, request: int, tokens: int) -> None:
        table = self.memory[1][request]
        first = int(np.flatnonzero(table >= 0)[-1]) + 1 if (table >= 0).any() else 0
        for page in range(first, -(-tokens // self.tokens)):
            table[page] = self.free.pop()

    def forget(self, request: int, length: int) -> None:
        if self.kind.window:
            for page in range(max(0, length - self.kind.window + 1) // self.tokens):
                self.memory[0][self.memory[1][request, page]] = 0xFF
                self.memory[1][request, page] = -1

    def kept(self) -> np.ndarray:
        return self.memory[0][list(self.free)].copy()


class _Slots(Cache):
    """Values of fixed size: a step reads one slot and writes another, which the next step reads."""

    def __init__(self, kind: StateSpec, requests: int, context: int, tokens: int, rng: np.random.Generator):
        super().__init__(kind, 2 * requests + 2, requests, rng)

    def hold(self, request: int, tokens: int) -> None:
        pool, table = self.memory
        old, new = table[request]
        if old >= 0:
            pool[old] = 0xFF
            self.free.insert(0, old)
        table[request] = new, self.free.pop()

    def forget(self, request: int, length: int) -> None:
        """Holding the next slot does."""

    def kept(self) -> np.ndarray:
        pool, table = self.memory
        return pool[np.setdiff1d(np.arange(len(pool)), table[:, 1])].copy()


def earlier(positions: np.ndarray, most: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    """i32[T, most]: for each token, rows that it sees of a state of that rate, some or all of them, ascending, then -1."""
    rows = np.full((len(positions), most), -1, np.int32)
    for row, position in zip(rows, positions.tolist()):
        seen = (position + 1) // rate
        count = rng.integers(1, min(most, seen) + 1) if seen else 0
        row[:count] = np.sort(rng.choice(seen, count, replace=False))
    return rows


def last_step(tokens: int, requests: int, past: int) -> tuple[np.ndarray, np.ndarray, dict[int, int]]:
    """(positions, requests) i32[T] of a step in which every request has a run of tokens, the first one's after
    ``past`` others; and how many tokens each request has after it."""
    owners = np.sort(np.arange(tokens) % requests)
    counts = np.bincount(owners, minlength=requests)
    starts = np.where(np.arange(requests) == 0, past, 0)
    positions = np.concatenate([start + np.arange(n) for start, n in zip(starts, counts)])
    return positions.astype(np.int32), owners.astype(np.int32), dict(enumerate((starts + counts).tolist()))
