"""Anonymous memory for activations and page pools. Standard library and numpy only."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from adaptc.errors import OptionError

_HUGE = 2 << 20


class Region:
    """Zero-filled memory that takes physical pages when it is first touched; freed with the last array over it."""

    def __init__(self, size: int):
        try:
            memory = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise OptionError(f"{size} bytes of memory can't be had: {error}.", hint="Load with fewer pages, or compile "
                              "with a smaller --max-step-tokens, --max-requests or --page-size.") from error
        if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a system without huge pages: the same memory, somewhat slower
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._array = np.frombuffer(memory, np.uint8, count=size)

    def array(self) -> np.ndarray:
        """uint8 [size], writable."""
        return self._array

    @property
    def address(self) -> int:
        return self._array.ctypes.data
