"""The cpu backend's run-time side: kernels mapped from objects, called in this process."""

from __future__ import annotations

import ctypes
from typing import Mapping, Sequence

import numpy as np

from adaptc.backends.cpu.elf import Image
from adaptc.errors import ArtifactError

_Kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class Library:
    """Objects loaded into this process, for calling one kernel by itself.

    ``objects`` maps file names to contents. Raises ArtifactError for malformed objects.
    """

    def __init__(self, objects: Mapping[str, bytes | memoryview]):
        self.image = Image(objects)

    def address(self, symbol: str) -> int:
        """Address of a kernel; ArtifactError when no object defines it."""
        return self.image.address(symbol)

    def call(self, symbol: str, arrays: Sequence[np.ndarray], symbols: Sequence[int], tid: int = 0, n: int = 1) -> None:
        """Runs thread ``tid``'s share of ``n`` of a kernel over C-contiguous ``arrays``, in place.

        Kernels may assume that buffers start at multiples of 64 bytes: see ``aligned``.
        """
        for index, array in enumerate(arrays):
            if not array.flags.c_contiguous:
                raise ArtifactError(f"buffer {index} of kernel {symbol} is not contiguous.")
        buffers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        values = (ctypes.c_int64 * len(symbols))(*symbols)
        _Kernel(self.address(symbol))(ctypes.addressof(buffers), ctypes.addressof(values), tid, n)


def aligned(shape, dtype, fill=None, alignment: int = 64) -> np.ndarray:
    """An array that starts at a multiple of ``alignment`` bytes: a copy of ``fill``, or zeros."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    array = raw[start : start + size].view(dtype).reshape(shape)
    if fill is not None:
        array[...] = fill
    return array
