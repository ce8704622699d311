"""The cpu backend's packed weights: nothing lost, no bytes added, and every place where the layout says it is."""

from __future__ import annotations

import numpy as np
import pytest

from adaptc.backends.cpu.packing import pack, packed_bytes, unpack
from adaptc.blocks import stored_bytes
from adaptc.errors import UnsupportedError
from adaptc.formats import FORMATS, WeightFormat


def random_codes(format: WeightFormat, n: int, k: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Codes with every bit pattern of every level, NaN and infinite scales included."""
    rng = np.random.default_rng(seed)
    kinds = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16, "i8": np.int8}
    views = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i8": np.int8}

    def values(kind: str, shape: tuple[int, int]) -> np.ndarray:
        if kind in kinds:
            info = np.iinfo(kinds[kind])
            return rng.integers(info.min, info.max, shape, kinds[kind], endpoint=True).view(views[kind])
        return rng.integers(0, 1 << {"e8m0": 8}.get(kind, int(kind[1])), shape, np.uint8)

    codes = {"codes": values(format.codes, (n, k))}
    for name, levels in (("scale", format.scale), ("min", format.minimum)):
        widths = (format.group, format.superblock)
        codes.update({f"{name}{i}": values(kind, (n, k // widths[i])) for i, kind in enumerate(levels)})
    return codes


SHAPES = [(1, 256), (8, 512), (19, 768)]


@pytest.mark.parametrize("name", FORMATS)
def test_unpack_returns_what_was_packed(name):
    format = FORMATS[name]
    for shape in [*SHAPES, *([(5, 96), (24, 576)] if format.superblock <= 32 else [])]:
        codes = random_codes(format, *shape)
        data = pack(format, shape, codes)
        assert len(data) == packed_bytes(format, shape)
        back = unpack(format, shape, data)
        assert back.keys() == codes.keys()
        for part in codes:
            assert back[part].dtype == codes[part].dtype and back[part].shape == codes[part].shape
            assert back[part].tobytes() == codes[part].tobytes(), part


@pytest.mark.parametrize("name", FORMATS)
def test_packed_is_no_larger_than_the_file(name):
    format = FORMATS[name]
    for n, k in ((8, 256), (64, 1536), (49152, 768)):
        assert packed_bytes(format, (n, k)) == stored_bytes(format, (n, k))
    assert packed_bytes(format, (9, 256)) == stored_bytes(format, (16, 256))


def test_chunks_join_seamlessly(monkeypatch):
    format, shape = FORMATS["q4_k"], (101, 512)
    codes = random_codes(format, *shape)
    whole = pack(format, shape, codes)
    monkeypatch.setattr("adaptc.backends.cpu.packing._CHUNK_BYTES", 1)
    assert pack(format, shape, codes) == whole


def test_layout_is_the_documented_one():
    format, shape = FORMATS["q4_1"], (16, 64)
    codes = random_codes(format, *shape)
    data = np.frombuffer(pack(format, shape, codes), np.uint8)
    vectors = data[: 16 * 64 // 2].reshape(2, 2, 4, 8, 4)
    for row, column in ((0, 0), (3, 5), (9, 31), (15, 62)):
        quad, i = column % 32 // 4, column % 4
        byte = vectors[row // 8, column // 32, quad // 2, row % 8, i]
        assert (byte >> 4 * (quad % 2)) & 15 == codes["codes"][row, column]
    scales = data[16 * 64 // 2 :].view(np.uint16).reshape(2, 2, 2, 8)
    assert scales[1, 0, 0, 3] == codes["scale0"].view(np.uint16)[11, 0]
    assert scales[0, 1, 1, 7] == codes["min0"].view(np.uint16)[7, 1]
    floats = np.arange(10 * 3, dtype=np.float32).reshape(10, 3)
    packed = np.frombuffer(pack(FORMATS["f32"], (10, 3), {"codes": floats}), np.float32).reshape(2, 3, 8)
    assert packed[1, 2, 1] == floats[9, 2] and not packed[1, :, 2:].any()


def test_partial_superblocks_are_refused():
    with pytest.raises(UnsupportedError, match="8 × 576 in format q4_k.*256"):
        packed_bytes(FORMATS["q4_k"], (8, 576))
    with pytest.raises(UnsupportedError, match="q8_0"):
        pack(FORMATS["q8_0"], (8, 40), {})
    with pytest.raises(UnsupportedError, match="has 320 bytes, got 3"):
        unpack(FORMATS["q4_1"], (8, 64), b"abc")
