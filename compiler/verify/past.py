"""Requests with a past, for a stateful operator called alone: a page pool and its block table, and the oracle's rows.

Pages are handed out in random order. They hold NaN where nothing was written, and in those that no later position may
read: what a kernel must not read shows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from adaptc.ops.mixing import RowState
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
    """``memory``: (page pool, block table) as kernels take them; ``rows``: what the oracle reads in their place."""

    def __init__(self, kind: StateSpec, requests: int, context: int, tokens: int, rng: np.random.Generator):
        """For one request of ``context`` tokens, and ``tokens`` of others."""
        page = kind.token_bytes() * kind.page_size
        pages = -(-context // kind.page_size) + -(-tokens // kind.page_size) + requests + 2
        self.kind, self.rows = kind, RowState(kind)
        self.memory = (aligned((pages, page), np.uint8, 0xFF), aligned((requests, kind.max_pages), np.int32, -1))
        self.free = list(rng.permutation(pages))

    def hold(self, request: int, tokens: int) -> None:
        """Pages for the request's first ``tokens`` tokens."""
        table = self.memory[1][request]
        first = int(np.flatnonzero(table >= 0)[-1]) + 1 if (table >= 0).any() else 0
        for page in range(first, -(-tokens // self.kind.page_size)):
            table[page] = self.free.pop()

    def forget(self, request: int, length: int) -> None:
        """Gives back the pages that no position from ``length`` on reads, and poisons them."""
        if self.kind.window:
            for page in range(max(0, length - self.kind.window + 1) // self.kind.page_size):
                self.memory[0][self.memory[1][request, page]] = 0xFF
                self.memory[1][request, page] = -1

    def append(self, operator: OpRow, attrs: Mapping, operands: list) -> None:
        """The oracle's rows of a step, as the operator itself appends them."""
        operator.meaning(attrs, *(self.rows if i == operator.state else o for i, o in enumerate(operands)))


def earlier(positions: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """i32[T, most]: for each token, positions up to its own, some or all of them, ascending, then -1."""
    rows = np.full((len(positions), most), -1, np.int32)
    for row, position in zip(rows, positions.tolist()):
        count = rng.integers(1, min(most, position + 1) + 1)
        row[:count] = np.sort(rng.choice(position + 1, count, replace=False))
    return rows


def last_step(tokens: int, requests: int, past: int) -> tuple[np.ndarray, np.ndarray, dict[int, int]]:
    """(positions, requests) i32[T] of a step in which every request has a run of tokens, the first one's after
    ``past`` others; and how many tokens each request has after it."""
    owners = np.sort(np.arange(tokens) % requests)
    counts = np.bincount(owners, minlength=requests)
    starts = np.where(np.arange(requests) == 0, past, 0)
    positions = np.concatenate([start + np.arange(n) for start, n in zip(starts, counts)])
    return positions.astype(np.int32), owners.astype(np.int32), dict(enumerate((starts + counts).tolist()))
