"""What this machine can do at most, measured with a backend's own probe kernels: the roofs of a roofline
(S. Williams et al., https://doi.org/10.1145/1498765.1498785)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from adaptc.protocol import Probe

ROUNDS = 7
"""The best of these many counts: other load only ever takes away."""


@dataclass(frozen=True)
class Peaks:
    """Bytes a second read from memory, and multiplications and additions a second by the dtype that is multiplied, of
    ``threads`` threads together."""

    threads: int
    bandwidth: float
    operations: Mapping[str, float]

    def seconds(self, flops: float, moved: float, dtype: str) -> float:
        """The least time that this work can take."""
        return max(flops / self.operations[dtype], moved / self.bandwidth)

    def bound(self, flops: float, moved: float, dtype: str) -> str:
        return "compute" if flops / self.operations[dtype] > moved / self.bandwidth else "bandwidth"


def measure(library, probes: Mapping[str, Probe], symbols: Mapping[str, str], threads: int) -> Peaks:
    """Runs every probe on ``threads`` threads at once. ``library`` holds the kernels, ``symbols`` their names."""
    with ThreadPoolExecutor(threads) as pool:
        rates = {what: _rate(library, probe, symbols[what], threads, pool) for what, probe in probes.items()}
    return Peaks(threads, rates.pop("read"), rates)


def _rate(library, probe: Probe, symbol: str, threads: int, pool: ThreadPoolExecutor) -> float:
    """Work a second."""
    source = np.ones(probe.source_bytes, np.uint8)
    out = np.zeros(probe.out_bytes * threads, np.uint8)

    def call(tid: int) -> None:
        library.call(symbol, [source, out], [], tid, threads)

    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        list(pool.map(call, range(threads)))
        best = min(best, time.perf_counter() - start)
    return probe.work * (1 if probe.shared else threads) / best
