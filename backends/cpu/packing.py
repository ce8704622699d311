"""The cpu backend's layout of a weight [N, K]: the bytes of the model file, rearranged, for every format.

Rows go in blocks of 8 (the last one padded with zero rows): one vector lane is one weight row, so a kernel's
accumulator holds 8 outputs, there are no horizontal sums, and one layout serves one token and many.

Float formats: ``[N/8][K][8]``. Integer formats are two streams, all codes and then all scales.

Codes: for each block and each 32 columns, vectors of 32 bytes. A *quad* j is columns 4j..4j+3 of the 32: byte
(row, i) of its vector is column 4j+i of that row.

====  =======  ====================================================================================
code  vectors
====  =======  ====================================================================================
i8    8        quad j
u4    4        vector i: quad 2i in the low four bits, quad 2i+1 in the high four
u5    4 + 1    as u4, then a vector whose bit j is bit 4 of quad j
u6    4 + 2    as u4, then two vectors: bits 2j and 2j+1 of the first (second) are bits 4, 5 of quad j (j+4)
====  =======  ====================================================================================

Scales: for each block and each superblock, 8 rows of

==============  ===================================================================================
levels
==============  ===================================================================================
f16             scale f16[8]; with minimum also minimum f16[8]
u6 × f16        scale1 f16[8], min1 f16[8], then for each pair of groups (2t, 2t+1) three times 8 bytes:
                scale(2t) | top 2 bits of scale(2t+1) << 6;  the same for the minima;
                low 4 bits of scale(2t+1) | low 4 bits of min(2t+1) << 4
i8 × f16        scale1 f16[8], then for each group scale0 i8[8]
e8m0            scale u8[8]
==============  ===================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from adaptc.errors import UnsupportedError
from adaptc.formats import WeightFormat

BLOCK = 8
"""Weight rows that lie interleaved."""

SPAN = 32
"""Columns whose codes lie together."""

_FLOAT = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2")}
_CHUNK_BYTES = 1 << 22

Codes = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class CodeLayout:
    """How quads uint8 [..., 8 (j), 32] become ``vectors`` × 32 bytes, and back."""

    vectors: int
    pack: Callable[[np.ndarray], np.ndarray]
    unpack: Callable[[np.ndarray], np.ndarray]


def _nibbles(quads: np.ndarray) -> np.ndarray:
    return (quads[..., 0::2, :] & 15) | (quads[..., 1::2, :] << 4)


def _from_nibbles(vectors: np.ndarray) -> np.ndarray:
    return np.stack([vectors & 15, vectors >> 4], axis=-2).reshape(*vectors.shape[:-2], 8, 32)


def _fields(quads: np.ndarray, bits: int) -> np.ndarray:
    """Bits 4.. of each quad, ``bits`` of them, side by side: [..., 8, 32] → [..., bits, 32]."""
    out = np.zeros((*quads.shape[:-2], bits, 32), np.uint8)
    per = 8 // bits
    for j in range(8):
        out[..., j // per, :] |= (quads[..., j, :] >> 4) << (bits * (j % per))
    return out


def _from_fields(vectors: np.ndarray, bits: int) -> np.ndarray:
    per, mask = 8 // bits, (1 << bits) - 1
    return np.stack([(vectors[..., j // per, :] >> (bits * (j % per)) & mask) << 4 for j in range(8)], axis=-2)


def _wide(bits: int) -> CodeLayout:
    """Codes of 4 + ``bits`` bits."""
    return CodeLayout(
        4 + bits,
        lambda quads: np.concatenate([_nibbles(quads), _fields(quads, bits)], axis=-2),
        lambda vectors: _from_nibbles(vectors[..., :4, :]) | _from_fields(vectors[..., 4:, :], bits),
    )


CODES: dict[str, CodeLayout] = {
    "i8": CodeLayout(8, lambda quads: quads, lambda vectors: vectors),
    "u4": CodeLayout(4, _nibbles, _from_nibbles),
    "u5": _wide(1),
    "u6": _wide(2),
}
"""Integer code → its layout."""


@dataclass(frozen=True)
class ScaleLayout:
    """How the scales of 8 rows × one superblock become ``bytes`` bytes. ``pack`` takes arrays [blocks, superblocks,
    groups, 8] by the names of the codes mapping and yields uint8 [blocks, superblocks, bytes]; ``unpack`` reverses."""

    bytes: int
    pack: Callable[[Codes], np.ndarray]
    unpack: Callable[[np.ndarray], dict[str, np.ndarray]]


def _bytes_of(part: np.ndarray) -> np.ndarray:
    """[blocks, superblocks, groups, 8] of any dtype → uint8 [blocks, superblocks, bytes]."""
    return np.ascontiguousarray(part).view(np.uint8).reshape(*part.shape[:2], -1)


def _part(data: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(data).view(dtype).reshape(*data.shape[:2], -1, 8)


def _plain(*names: tuple[str, str, int]) -> ScaleLayout:
    """Arrays one after the other: (name, dtype, groups) each."""
    ends = np.cumsum([np.dtype(dtype).itemsize * groups * 8 for _, dtype, groups in names]).tolist()
    starts = [0, *ends[:-1]]
    return ScaleLayout(
        ends[-1],
        lambda parts: np.concatenate([_bytes_of(parts[name]) for name, _, _ in names], axis=-1),
        lambda data: {
            name: _part(data[..., start:end], dtype) for (name, dtype, _), start, end in zip(names, starts, ends)
        },
    )


_SIX_OUTER = _plain(("scale1", "<f2", 1), ("min1", "<f2", 1))


def _pack_six(parts: Codes) -> np.ndarray:
    s, m = parts["scale0"], parts["min0"]
    even_s, odd_s, even_m, odd_m = s[..., 0::2, :], s[..., 1::2, :], m[..., 0::2, :], m[..., 1::2, :]
    triple = [even_s | (odd_s >> 4) << 6, even_m | (odd_m >> 4) << 6, (odd_s & 15) | (odd_m & 15) << 4]
    return np.concatenate([_SIX_OUTER.pack(parts), _bytes_of(np.stack(triple, axis=-2))], axis=-1)


def _unpack_six(data: np.ndarray) -> dict[str, np.ndarray]:
    outer, inner = data[..., : _SIX_OUTER.bytes], data[..., _SIX_OUTER.bytes :]
    s, m, low = np.moveaxis(inner.reshape(*data.shape[:2], -1, 3, 8), -2, 0)
    odd_s, odd_m = (low & 15) | (s >> 6) << 4, (low >> 4) | (m >> 6) << 4

    def pairs(even: np.ndarray, odd: np.ndarray) -> np.ndarray:
        return np.stack([even & 63, odd], axis=-2).reshape(*data.shape[:2], -1, 8)

    return {**_SIX_OUTER.unpack(outer), "scale0": pairs(s, odd_s), "min0": pairs(m, odd_m)}


SCALES: dict[tuple[tuple[str, ...], tuple[str, ...]], ScaleLayout] = {
    (("f16",), ()): _plain(("scale0", "<f2", 1)),
    (("f16",), ("f16",)): _plain(("scale0", "<f2", 1), ("min0", "<f2", 1)),
    (("u6", "f16"), ("u6", "f16")): ScaleLayout(_SIX_OUTER.bytes + 4 * 24, _pack_six, _unpack_six),
    (("i8", "f16"), ()): _plain(("scale1", "<f2", 1), ("scale0", "i1", 16)),
    (("e8m0",), ()): _plain(("scale0", "u1", 1)),
}
"""(scale levels, minimum levels) → layout of a superblock's scales."""


def code_layout(format: WeightFormat) -> CodeLayout:
    return CODES[format.codes]


def scale_layout(format: WeightFormat) -> ScaleLayout:
    return SCALES[format.scale, format.minimum]


def packable(format: WeightFormat, k: int) -> bool:
    """Whether rows of ``k`` columns of this format have a packed layout."""
    if format.is_float:
        return format.codes in _FLOAT
    known = format.codes in CODES and (format.scale, format.minimum) in SCALES
    return known and k % SPAN == 0 and k % format.superblock == 0


def code_block_bytes(format: WeightFormat, k: int) -> int:
    """Bytes of the codes of 8 rows of ``k`` columns."""
    if format.is_float:
        return BLOCK * k * _FLOAT[format.codes].itemsize
    return k // SPAN * code_layout(format).vectors * 32


def scale_block_bytes(format: WeightFormat, k: int) -> int:
    """Bytes of the scales of 8 rows of ``k`` columns; 0 for float formats."""
    return 0 if format.is_float else k // format.superblock * scale_layout(format).bytes


def blocks(n: int) -> int:
    """Row blocks of ``n`` rows."""
    return -(-n // BLOCK)


def packed_bytes(format: WeightFormat, shape: tuple[int, ...]) -> int:
    """Bytes of a packed weight of ``shape`` (rows N, columns K): the file's, with rows rounded up to 8. Weights
    [E, N, K] are E such matrices, one after the other."""
    if len(shape) == 3:
        return shape[0] * packed_bytes(format, shape[1:])
    n, k = _checked(format, shape)
    return blocks(n) * (code_block_bytes(format, k) + scale_block_bytes(format, k))


def pack(format: WeightFormat, shape: tuple[int, ...], codes: Codes) -> bytes:
    """A weight in packed layout from its unpacked codes (arrays of N rows as in ``adaptc.blocks``). Loses nothing."""
    if len(shape) == 3:
        return b"".join(pack(format, shape[1:], {n: a[i] for n, a in codes.items()}) for i in range(shape[0]))
    n, k = _checked(format, shape)
    out = np.empty(packed_bytes(format, shape), np.uint8)
    if format.is_float:
        _pack_floats(codes["codes"], out.view(_FLOAT[format.codes]).reshape(blocks(n), k, BLOCK))
        return out.tobytes()
    split = blocks(n) * code_block_bytes(format, k)
    code_out = out[:split].reshape(blocks(n), k // SPAN, -1, 32)
    scale_out = out[split:].reshape(blocks(n), k // format.superblock, -1)
    step = max(1, _CHUNK_BYTES // (BLOCK * max(k, 1)))
    for start in range(0, blocks(n), step):
        part = {name: _rows(array, start, start + step) for name, array in codes.items()}
        words = part.pop("codes").view(np.uint32).reshape(-1, BLOCK, k // 4)
        quads = np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.uint8).reshape(-1, k // SPAN, 8, 32)
        code_out[start : start + step] = code_layout(format).pack(quads)
        grouped = {
            name: array.reshape(-1, BLOCK, k // format.superblock, array.shape[1] * format.superblock // k)
            .transpose(0, 2, 3, 1)
            for name, array in part.items()
        }
        scale_out[start : start + step] = scale_layout(format).pack(grouped)
    return out.tobytes()


def unpack(format: WeightFormat, shape: tuple[int, ...],
           data: bytes | memoryview | np.ndarray) -> dict[str, np.ndarray]:
    """The codes mapping that ``pack`` was given, bit for bit."""
    if len(shape) == 3:
        pieces = [unpack(format, shape[1:], piece) for piece in np.frombuffer(data, np.uint8).reshape(shape[0], -1)]
        return {name: np.stack([piece[name] for piece in pieces]) for name in pieces[0]}
    n, k = _checked(format, shape)
    raw = np.frombuffer(data, np.uint8)
    if raw.size != packed_bytes(format, shape):
        raise UnsupportedError(
            f"a packed {format.name} weight of shape {n} × {k} has {packed_bytes(format, shape)} bytes, got {raw.size}."
        )
    if format.is_float:
        values = raw.view(_FLOAT[format.codes]).reshape(blocks(n), k, BLOCK)
        return {"codes": values.transpose(0, 2, 1).reshape(-1, k)[:n]}
    split = blocks(n) * code_block_bytes(format, k)
    quads = code_layout(format).unpack(raw[:split].reshape(blocks(n), k // SPAN, -1, 32))
    words = np.ascontiguousarray(quads).view(np.uint32).reshape(blocks(n), k // 4, BLOCK)
    codes = np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.int8 if format.codes == "i8" else np.uint8)
    parts = scale_layout(format).unpack(raw[split:].reshape(blocks(n), k // format.superblock, -1))
    scales = {name: part.transpose(0, 3, 1, 2).reshape(blocks(n) * BLOCK, -1)[:n] for name, part in parts.items()}
    return {"codes": codes.reshape(-1, k)[:n], **scales}


def _checked(format: WeightFormat, shape: tuple[int, int]) -> tuple[int, int]:
    n, k = shape
    if not packable(format, k):
        raise UnsupportedError(
            f"the cpu backend can't pack a weight of shape {n} × {k} in format {format.name}: its rows must be whole "
            f"superblocks of {format.superblock or 1} columns, "
            f"its codes {', '.join([*_FLOAT, *CODES])}, its scales known.",
            hint="Keep this weight in a float format.",
        )
    return n, k


def _rows(array: np.ndarray, start: int, end: int) -> np.ndarray:
    """Rows of blocks [start, end), contiguous, with zero rows up to whole blocks."""
    part = array[start * BLOCK : end * BLOCK]
    missing = -len(part) % BLOCK
    if missing:
        part = np.concatenate([part, np.zeros((missing, array.shape[1]), array.dtype)])
    return np.ascontiguousarray(part)


def _pack_floats(values: np.ndarray, out: np.ndarray) -> None:
    whole, k = len(values) // BLOCK, values.shape[1]
    out[:whole] = values[: whole * BLOCK].reshape(whole, BLOCK, k).transpose(0, 2, 1)
    if whole < len(out):
        out[whole:] = _rows(values, whole, whole + 1).reshape(1, BLOCK, k).transpose(0, 2, 1)
