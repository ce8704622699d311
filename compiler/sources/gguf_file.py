"""The GGUF container: header, metadata and tensor table, read with every length checked against the file.

The ``gguf`` package's reader trusts lengths and builds an array object for each of 262,144 tokens; this one reads the
same format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and turns any damage into one InputError.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaptc.errors import DamagedFileError, UnsupportedError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DTYPES = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}


@dataclass(frozen=True)
class StoredTensor:
    """A row of the tensor table. ``shape`` is row-major (the file's order reversed), ``type`` GGML's type number,
    ``offset`` counts bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class GgufFile:
    """A file's metadata (scalars as Python values, arrays of strings as lists, of numbers as numpy arrays), its tensor
    table, its bytes, memory-mapped, and those of them before the tensors' own."""

    metadata: Mapping[str, Any]
    tensors: tuple[StoredTensor, ...]
    data: np.ndarray
    header: memoryview


class _Cursor:
    """Reads little-endian values one after the other, and never past the end."""

    def __init__(self, data: memoryview, name: str):
        self.data, self.name, self.at = data, name, 0

    def damaged(self, what: str) -> DamagedFileError:
        return DamagedFileError(f"{self.name} is damaged or incomplete: {what} (at byte {self.at} of {len(self.data)}).",
                          hint="Download the file again.")

    def take(self, size: int, what: str) -> int:
        """Start of the next ``size`` bytes, which are then passed."""
        if size > len(self.data) - self.at:
            raise self.damaged(f"{what} takes {size} bytes and {len(self.data) - self.at} are left")
        start, self.at = self.at, self.at + size
        return start

    def number(self, code: str, what: str):
        return struct.unpack_from(f"<{code}", self.data, self.take(struct.calcsize(f"<{code}"), what))[0]

    def string(self, what: str) -> str:
        size = self.number("Q", what)
        start = self.take(size, what)
        try:
            return str(self.data[start : start + size], "utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"{what} isn't UTF-8") from None

    def count(self, least: int, what: str) -> int:
        """A number of things of at least ``least`` bytes each, so that it can't exceed what is left."""
        count = self.number("Q", f"the number of {what}")
        if count * least > len(self.data) - self.at:
            raise self.damaged(f"{count} {what} don't fit into the rest of the file")
        return count

    def value(self, kind: int, key: str):
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.damaged(f"{key!r} has the unknown type {kind}")
        return self.number(_SCALARS[kind], f"the value of {key!r}")

    def array(self, key: str):
        kind = self.number("I", f"the type of {key!r}")
        if kind == _STRING:
            what = f"an element of {key!r}"
            return [self.string(what) for _ in range(self.count(8, f"elements of {key!r}"))]
        if kind not in _DTYPES:
            raise self.damaged(f"{key!r} is an array of the unknown type {kind}")
        dtype = np.dtype(_DTYPES[kind])
        count = self.count(dtype.itemsize, f"elements of {key!r}")
        return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize, key))


def map_bytes(path: Path) -> np.ndarray:
    """A file's bytes, memory-mapped read-only; InputError when it can't be read or is empty."""
    try:
        if path.stat().st_size == 0:
            raise DamagedFileError(f"{path} is empty.", hint="Download the file again.")
        return np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise DamagedFileError(f"{path} can't be read: {error.strerror or error}.") from error


def read_gguf(path: Path) -> GgufFile:
    """Header, metadata and tensor table of ``path``. InputError for damage, UnsupportedError for other versions."""
    data = map_bytes(path)
    cursor = _Cursor(memoryview(data), path.name)
    magic = bytes(data[:4])
    cursor.take(4, "the magic number")
    if magic != MAGIC:
        raise DamagedFileError(f"{path.name} is not a GGUF file: it starts with {magic!r}, expected {MAGIC!r}.")
    _check_version(cursor)
    tensor_count = cursor.count(24, "tensors")
    metadata = _metadata(cursor)
    tensors = _tensor_table(cursor, tensor_count)
    placed = _placed(cursor, tensors, metadata.get("general.alignment", 32))
    return GgufFile(metadata, placed, data, cursor.data[: cursor.at])


def _check_version(cursor: _Cursor) -> None:
    version = cursor.number("I", "the version")
    if version in VERSIONS:
        return
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    what = "big-endian" if swapped in VERSIONS else f"of version {version}"
    raise UnsupportedError(
        f"{cursor.name} is a GGUF file {what}; adaptc reads little-endian files of versions "
        f"{' and '.join(map(str, VERSIONS))}.",
        hint="Convert it again with a current llama.cpp.",
    )


def _metadata(cursor: _Cursor) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(cursor.count(13, "metadata keys")):
        key = cursor.string(f"metadata key {i}")
        if key in metadata:
            raise cursor.damaged(f"the metadata key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.number("I", f"the type of {key!r}"), key)
    return metadata


def _tensor_table(cursor: _Cursor, count: int) -> list[StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for i in range(count):
        name = cursor.string(f"the name of tensor {i}")
        if name in tensors:
            raise cursor.damaged(f"the tensor {name!r} occurs twice")
        dimensions = cursor.number("I", f"the number of dimensions of {name!r}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise cursor.damaged(f"the tensor {name!r} has {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(cursor.number("Q", f"a dimension of {name!r}") for _ in range(dimensions))[::-1]
        if math.prod(shape) == 0:
            raise cursor.damaged(f"the tensor {name!r} has the shape {shape}, which holds no elements")
        kind = cursor.number("I", f"the type of {name!r}")
        tensors[name] = StoredTensor(name, shape, kind, cursor.number("Q", f"the offset of {name!r}"))
    return list(tensors.values())


def _placed(cursor: _Cursor, tensors: list[StoredTensor], alignment: Any) -> tuple[StoredTensor, ...]:
    """The tensors with offsets from the file's start, checked to follow each other without holes, as llama.cpp does."""
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {alignment!r}, expected a power of two")
    start = -(-cursor.at // alignment) * alignment
    placed, expected = [], start
    for tensor in tensors:
        offset = start + tensor.offset
        if tensor.offset % alignment or offset >= len(cursor.data) or expected not in (offset, None):
            where = f"a multiple of {alignment} from {start} on" if expected is None else f"byte {expected}"
            raise cursor.damaged(f"the tensor {tensor.name!r} starts at byte {offset}, expected {where}, within the file")
        placed.append(StoredTensor(tensor.name, tensor.shape, tensor.type, offset))
        size = size_of(tensor)
        if size is not None and size > len(cursor.data) - offset:
            raise cursor.damaged(f"the tensor {tensor.name!r} takes {size} bytes from byte {offset} on and "
                                 f"{len(cursor.data) - offset} are left")
        expected = None if size is None else offset - (-size // alignment) * alignment
    return tuple(placed)


def size_of(tensor: StoredTensor) -> int | None:
    """Bytes of a tensor by the ``gguf`` package's table; None for a type that it doesn't know."""
    import gguf

    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type)]
    except (KeyError, ValueError):
        return None
    return math.prod(tensor.shape) // block * size
