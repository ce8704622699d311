"""Unpacked weights against the gguf package, bit for bit, and what quantize promises."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize

from adaptc import blocks
from adaptc.errors import InputError, UnsupportedError
from adaptc.formats import FORMATS

INTEGER = [name for name, format in FORMATS.items() if not format.is_float]
F16_FIELDS = {  # byte offsets of the f16 levels within a block (ggml-common.h)
    "q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "mxfp4": (),
}


def qtype(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name.upper()]


def random_raw(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random bytes [rows, row bytes]; the f16 levels are finite; some blocks are all zeros or all ones."""
    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[qtype(name)]
    raw = rng.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    raw[0], raw[1] = 0, 255
    for offset in F16_FIELDS[name]:
        levels = rng.normal(0, 0.05, len(raw)).astype(np.float16)
        levels[2::7], levels[3::11] = np.float16(6e-8), np.float16(-65504)
        raw[:, offset : offset + 2] = levels[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", INTEGER)
def test_integer_formats_match_gguf_bit_for_bit(name):
    raw = random_raw(name, 24, 1024)
    codes = blocks.unblock(FORMATS[name], raw, (24, 1024))
    with np.errstate(over="ignore"):
        expected = gguf_dequantize(raw, qtype(name))
    got = blocks.dequantize(FORMATS[name], codes)
    assert got.dtype == np.float32 and got.shape == (24, 1024)
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_every_power_of_mxfp4():
    """Every byte at every place of a block, so every exponent, as GGML reads it; and which of them are damage."""
    raw = (np.arange(256)[:, None] + np.arange(17)).astype(np.uint8)
    codes = blocks.unblock(FORMATS["mxfp4"], raw, (256, 32))
    with np.errstate(over="ignore"):
        expected = gguf_dequantize(raw, qtype("mxfp4"))
    got = blocks.dequantize(FORMATS["mxfp4"], codes)
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
    for row, values in enumerate(expected):
        part = {name: array[row : row + 1] for name, array in codes.items()}
        assert blocks.is_finite(FORMATS["mxfp4"], part) == (np.isfinite(values).all() and row < 255), row
    six = {"codes": np.full((2, 32), 7, np.uint8), "scale0": np.array([[128], [129]], np.uint8)}
    assert blocks.dequantize(FORMATS["mxfp4"], six)[:, 0].tolist() == [12.0, 24.0]  # 6 · 2^(128 - 127)


@pytest.mark.parametrize("name", INTEGER)
def test_codes_have_the_shapes_and_dtypes_of_the_format(name):
    format = FORMATS[name]
    codes = blocks.unblock(format, random_raw(name, 4, 512), (4, 512))
    names = {"codes", *(f"scale{i}" for i in range(len(format.scale)))}
    names |= {f"min{i}" for i in range(len(format.minimum))}
    assert set(codes) == names
    assert codes["codes"].shape == (4, 512)
    assert codes["codes"].dtype == (np.int8 if format.codes == "i8" else np.uint8)
    assert format.codes == "i8" or int(codes["codes"].max()) == 2**format.bits - 1
    dtypes = {"f16": np.float16, "u6": np.uint8, "i8": np.int8, "e8m0": np.uint8}
    for kind, levels in (("scale", format.scale), ("min", format.minimum)):
        for i, dtype in enumerate(levels):
            width = format.group if i == 0 else format.superblock
            assert codes[f"{kind}{i}"].shape == (4, 512 // width), (kind, i)
            assert codes[f"{kind}{i}"].dtype == dtypes[dtype]


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_float_formats_match_gguf_bit_for_bit(name):
    values = np.random.default_rng(1).normal(0, 3, (6, 96)).astype(np.float32)
    values[0, :4] = 0.0, -0.0, 1e-39, -1e-7
    raw = gguf_quantize(values, qtype(name)).view(np.uint8)
    codes = blocks.unblock(FORMATS[name], raw, (6, 96))
    expected = gguf_dequantize(raw if name == "bf16" else raw.view(codes["codes"].dtype), qtype(name))
    np.testing.assert_array_equal(blocks.dequantize(FORMATS[name], codes).view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(blocks.quantize(FORMATS[name], values)["codes"], codes["codes"])


def test_rows_can_be_taken_in_any_order():
    format = FORMATS["q4_k"]
    codes = blocks.unblock(format, random_raw("q4_k", 8, 512), (8, 512))
    index = np.random.default_rng(2).permutation(8)
    np.testing.assert_array_equal(
        blocks.dequantize(format, blocks.take_rows(codes, index)), blocks.dequantize(format, codes)[index]
    )


def test_the_wrong_number_of_bytes_is_an_error():
    with pytest.raises(InputError, match=r"q4_1 tensor of shape \(2, 64\) takes 80 bytes, got 79"):
        blocks.unblock(FORMATS["q4_1"], np.zeros(79, np.uint8), (2, 64))
    with pytest.raises(UnsupportedError, match="multiples of 256, got 64"):
        blocks.unblock(FORMATS["q4_k"], np.zeros(79, np.uint8), (2, 64))


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q5_0"])
def test_quantize_is_round_to_nearest_of_the_stored_scale(name):
    format = FORMATS[name]
    values = np.random.default_rng(3).normal(0, 0.02, (16, 256)).astype(np.float32)
    codes = blocks.quantize(format, values)
    error = np.abs(blocks.dequantize(format, codes) - values).reshape(16, -1, 32)
    step = np.abs(codes["scale0"].astype(np.float32))[..., None]
    # Half a step, but for the extreme itself: it may be clipped where the format has one code fewer on its side.
    assert np.quantile(error / step, 0.95) <= 0.5
    assert (error / step).max() <= 1.01
    theirs = gguf_dequantize(gguf_quantize(values, qtype(name)), qtype(name))
    assert np.square(error).sum() <= np.square(theirs - values).sum() * 1.001


def test_q8_0_reaches_both_ends():
    values = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    codes = blocks.quantize(FORMATS["q8_0"], values)["codes"]
    assert codes.min() == -127 and codes.max() == 127 and codes.dtype == np.int8


@pytest.mark.parametrize("name", ["q4_1", "q5_1"])
def test_asymmetric_search_beats_min_max_rounding(name):
    format = FORMATS[name]
    rng = np.random.default_rng(4)
    values = (rng.normal(0, 0.02, (64, 512)) + rng.normal(0, 0.01, (64, 1))).astype(np.float32)
    ours = np.square(blocks.dequantize(format, blocks.quantize(format, values)) - values)
    theirs = np.square(gguf_dequantize(gguf_quantize(values, qtype(name)), qtype(name)) - values)
    assert ours.sum() < 0.95 * theirs.sum()


def exhaustive_q4_1(group: np.ndarray) -> float:
    """The least squared error over a fine grid of scales and minima: what near-optimal is measured against."""
    spread = group.max() - group.min()
    scale = (np.linspace(0.7, 1.1, 161) * spread / 15).astype(np.float16).astype(np.float32)[:, None, None]
    low = (group.min() + np.linspace(-0.1, 0.3, 161) * spread).astype(np.float16).astype(np.float32)[:, None]
    codes = np.clip(np.rint((group - low) / scale), 0, 15)
    return float(np.square(codes * scale + low - group).sum(-1).min())


def test_q4_1_is_near_the_exhaustive_optimum():
    groups = np.random.default_rng(5).normal(0, 0.05, (12, 32)).astype(np.float32)
    codes = blocks.quantize(FORMATS["q4_1"], groups)
    ours = np.square(blocks.dequantize(FORMATS["q4_1"], codes) - groups).sum(-1)
    assert ours.sum() <= 1.1 * sum(map(exhaustive_q4_1, groups))


@pytest.mark.parametrize("name", ["q8_0", "q4_1", "q4_0"])
def test_constant_and_zero_groups_are_kept(name):
    values = np.zeros((2, 64), np.float32)
    values[1] = 0.5
    got = blocks.dequantize(FORMATS[name], blocks.quantize(FORMATS[name], values))
    np.testing.assert_allclose(got, values, atol=3e-4)
    assert np.all(got[0] == 0)


@pytest.mark.parametrize("name", [*INTEGER, "f32", "f16", "bf16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(name, bad):
    values = np.zeros((1, 256), np.float32)
    values[0, 17] = bad
    with pytest.raises(InputError, match=f"{name} contain NaN or infinity"):
        blocks.quantize(FORMATS[name], values)


@pytest.mark.parametrize("name", ["f16", "bf16", "q8_0", "q4_1"])
def test_values_too_large_for_a_format_are_refused(name):
    values = np.zeros((1, 32), np.float32)
    values[0, 3] = np.finfo(np.float32).max
    with pytest.raises(InputError, match="fit"):
        blocks.quantize(FORMATS[name], values)


def test_formats_without_conversion_are_refused_with_the_valid_ones():
    with pytest.raises(UnsupportedError, match="can't convert weights to q4_k; it converts to .*q8_0.*q4_1"):
        blocks.quantize(FORMATS["q4_k"], np.zeros((1, 256), np.float32))
    with pytest.raises(UnsupportedError, match="multiples of 32, got 33"):
        blocks.quantize(FORMATS["q8_0"], np.zeros((1, 33), np.float32))


@pytest.mark.parametrize("name", [*INTEGER, "f32", "f16", "bf16"])
def test_non_finite_codes_are_noticed(name):
    format = FORMATS[name]
    if format.is_float:
        codes = {"codes": np.zeros((2, 32), blocks.FLOAT_DTYPES[format.codes])}
    else:
        codes = blocks.unblock(format, random_raw(name, 2, 512), (2, 512))
        for part in codes.values():
            part[...] = 1
    assert blocks.is_finite(format, codes)
    target = codes[f"scale{len(format.scale) - 1}"] if format.scale else codes["codes"]
    target[0, 0] = {"u2": 0x7FC0, "u1": 255}.get(target.dtype.str[1:], np.nan)
    assert not blocks.is_finite(format, codes)
