"""Blocks of weights, as files store them, to and from unpacked *codes*.

Codes of a weight ``[..., K]`` in a format F (``adaptc.formats``) are a dict of numpy arrays:

- float formats: ``codes`` f32, f16, or the bits of bf16 as uint16, of the weight's shape;
- integer formats: ``codes`` int8 or uint8, one code a byte, before the zero is subtracted or the code is looked up
  in the format's values; ``scale0`` (innermost level) and with two levels ``scale1``, of shape [..., K/group] and
  [..., K/superblock]; ``min0``, ``min1`` likewise.

Nothing is lost on the way to codes, and ``dequantize`` gives the bits that the ``gguf`` package gives. Block layouts
are those of ggml-common.h and ggml-quants.c (https://github.com/ggml-org/ggml).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adaptc.errors import InputError, UnsupportedError
from adaptc.formats import FORMATS, WeightFormat

Codes = dict[str, np.ndarray]

FLOAT_DTYPES = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2")}


def _fields(scales: np.ndarray, names: tuple[str, ...]) -> Codes:
    """Stored one-level scales [B] as [B, 1] under the names of the codes mapping."""
    return {ours: scales[theirs][:, None] for theirs, ours in zip(("d", "m"), names)}


def _interleaved(packed: np.ndarray, run: int, bits: int) -> np.ndarray:
    """Codes of ``bits`` bits. Each run of ``run`` bytes holds 8/bits runs of codes, lowest bits first.

    uint8 [B, n] → uint8 [B, n * 8/bits].
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = packed.reshape(len(packed), -1, 1, run) >> shifts
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(len(packed), -1)


def _fifth_bits(high: np.ndarray) -> np.ndarray:
    """Bit i of a 32-bit word belongs to code i. uint8 [B, 4] → [B, 32] of 0 or 16."""
    return np.unpackbits(high, axis=-1, bitorder="little") << np.uint8(4)


def _q8_0(blocks: np.ndarray) -> Codes:
    return {"codes": blocks["q"], **_fields(blocks, ("scale0",))}


def _q4(names: tuple[str, ...]) -> Callable[[np.ndarray], Codes]:
    return lambda blocks: {"codes": _interleaved(blocks["q"], 16, 4), **_fields(blocks, names)}


def _q5(names: tuple[str, ...]) -> Callable[[np.ndarray], Codes]:
    def unblock(blocks: np.ndarray) -> Codes:
        codes = _interleaved(blocks["q"], 16, 4)
        codes |= _fifth_bits(blocks["h"])
        return {"codes": codes, **_fields(blocks, names)}

    return unblock


def _k_scales(blocks: np.ndarray) -> Codes:
    """Eight 6-bit scales and eight 6-bit minima from twelve bytes, and their f16 factors."""
    low, mid, high = blocks["s"].reshape(-1, 3, 4).swapaxes(0, 1)
    return {
        "scale0": np.concatenate([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], axis=-1),
        "min0": np.concatenate([mid & 0x3F, (high >> 4) | ((mid >> 2) & 0x30)], axis=-1),
        "scale1": blocks["d"][:, None],
        "min1": blocks["m"][:, None],
    }


def _q4_k(blocks: np.ndarray) -> Codes:
    return {"codes": _interleaved(blocks["q"], 32, 4), **_k_scales(blocks)}


def _q5_k(blocks: np.ndarray) -> Codes:
    # Bit g of byte i is the fifth bit of code i of group g.
    high = np.unpackbits(blocks["h"][:, :, None], axis=-1, bitorder="little").swapaxes(1, 2)
    codes = _interleaved(blocks["q"], 32, 4)
    codes |= high.reshape(codes.shape) << np.uint8(4)
    return {"codes": codes, **_k_scales(blocks)}


def _q6_k(blocks: np.ndarray) -> Codes:
    codes = _interleaved(blocks["q"], 64, 4)
    codes |= _interleaved(blocks["h"], 32, 2) << np.uint8(4)
    return {"codes": codes, "scale0": blocks["s"], "scale1": blocks["d"][:, None]}


@dataclass(frozen=True)
class _Block:
    """One stored block: its fields in file order, and how blocks [B] become codes [B, superblock]."""

    fields: np.dtype
    unblock: Callable[[np.ndarray], Codes]


def _block(unblock: Callable[[np.ndarray], Codes], *fields: tuple) -> _Block:
    return _Block(np.dtype(list(fields)), unblock)


_D, _M = ("d", "<f2"), ("m", "<f2")
_BLOCKS: dict[str, _Block] = {
    "q8_0": _block(_q8_0, _D, ("q", "i1", 32)),
    "q4_0": _block(_q4(("scale0",)), _D, ("q", "u1", 16)),
    "q4_1": _block(_q4(("scale0", "min0")), _D, _M, ("q", "u1", 16)),
    "q5_0": _block(_q5(("scale0",)), _D, ("h", "u1", 4), ("q", "u1", 16)),
    "q5_1": _block(_q5(("scale0", "min0")), _D, _M, ("h", "u1", 4), ("q", "u1", 16)),
    "q4_k": _block(_q4_k, _D, _M, ("s", "u1", 12), ("q", "u1", 128)),
    "q5_k": _block(_q5_k, _D, _M, ("s", "u1", 12), ("h", "u1", 32), ("q", "u1", 128)),
    "q6_k": _block(_q6_k, ("q", "u1", 128), ("h", "u1", 64), ("s", "i1", 16), _D),
    "mxfp4": _block(_q4(("scale0",)), ("d", "u1"), ("q", "u1", 16)),
}


def stored_bytes(format: WeightFormat, shape: Sequence[int]) -> int:
    """Bytes of a tensor of ``shape`` as a file stores it. UnsupportedError when a row isn't whole blocks."""
    count = 1
    for size in shape:
        count *= int(size)
    if format.is_float:
        return count * FLOAT_DTYPES[format.codes].itemsize
    if not shape or shape[-1] % format.superblock:
        raise UnsupportedError(
            f"rows of {tuple(shape)} can't be stored as {format.name}: it needs columns in multiples of "
            f"{format.superblock}, got {shape[-1] if shape else 'a scalar'}."
        )
    return count // format.superblock * _BLOCKS[format.name].fields.itemsize


def unblock(format: WeightFormat, raw: np.ndarray, shape: Sequence[int]) -> Codes:
    """Codes of a tensor of ``shape`` from its stored bytes (uint8, any rank). Float codes may be views of ``raw``.

    InputError when the number of bytes isn't what ``shape`` needs.
    """
    shape = tuple(int(size) for size in shape)
    raw = np.ascontiguousarray(raw).reshape(-1)
    expected = stored_bytes(format, shape)
    if raw.nbytes != expected:
        raise InputError(f"a {format.name} tensor of shape {shape} takes {expected} bytes, got {raw.nbytes}.")
    if format.is_float:
        return {"codes": raw.view(FLOAT_DTYPES[format.codes]).reshape(shape)}
    block = _BLOCKS[format.name]
    parts = block.unblock(raw.view(block.fields))
    return {name: np.ascontiguousarray(part.reshape(*shape[:-1], -1)) for name, part in parts.items()}


def dequantize(format: WeightFormat, codes: Mapping[str, np.ndarray]) -> np.ndarray:
    """The float32 values of codes, bit for bit those of ``gguf.quants.dequantize``; a new array of the same shape."""
    stored = codes["codes"]
    if format.is_float:
        if format.codes == "bf16":
            return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return stored.astype(np.float32)
    values = np.array(format.values, np.float32)[stored] if format.values else stored.astype(np.float32)
    if format.zero:
        values -= np.float32(format.zero)
    grouped = values.reshape(*stored.shape[:-1], -1, format.group)
    with np.errstate(invalid="ignore", over="ignore"):  # damaged scales are for is_finite to report
        grouped *= level(format, codes, "scale")[..., None]
        if format.minimum:
            minimum = level(format, codes, "min")[..., None]
            (np.add if format.min_sign > 0 else np.subtract)(grouped, minimum, out=grouped)
    return values


def level(format: WeightFormat, codes: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Each group's effective ``name`` ("scale" or "min"), its levels multiplied in float32: [..., K/group]."""
    stored = codes[f"{name}0"]
    inner = _half_powers(stored) if format.scale[0] == "e8m0" else stored.astype(np.float32)
    if f"{name}1" not in codes:
        return inner
    outer = codes[f"{name}1"].astype(np.float32)
    return inner * np.repeat(outer, format.superblock // format.group, axis=-1)


def _half_powers(exponents: np.ndarray) -> np.ndarray:
    """2^(e - 128), float32, of E8M0 exponents uint8: GGML's reading, which gives 255 no meaning of its own."""
    small = np.uint32(1 << 21) << exponents.astype(np.uint32)  # 2^-128 and 2^-127 are denormal
    normal = (exponents.astype(np.uint32) - np.uint32(1)) << np.uint32(23)
    return np.where(exponents < 2, small, normal).view(np.float32)


def is_finite(format: WeightFormat, codes: Mapping[str, np.ndarray]) -> bool:
    """Whether no value is NaN or infinite. Integer codes always are finite; their f16 levels may not be, and of E8M0
    levels 255 stands for no number and a few below it for numbers that float32 holds no multiples of."""
    if format.codes == "bf16":
        return bool(np.all((codes["codes"] & 0x7F80) != 0x7F80))
    if format.scale == ("e8m0",):
        scales, groups = codes["scale0"], codes["codes"].reshape(*codes["scale0"].shape, format.group)
        large = scales > _LARGEST_POWER
        part = {"codes": groups[large], "scale0": scales[large][:, None]}
        return not large.any() or bool((scales < 255).all() and np.isfinite(dequantize(format, part)).all())
    return all(bool(np.isfinite(part).all()) for part in codes.values() if part.dtype.kind == "f")


_LARGEST_POWER = 248
"""E8M0 scales that any 4-bit value, doubled, can be multiplied by in float32: 2^120 times at most 2^7."""


def take_rows(codes: Mapping[str, np.ndarray], index: np.ndarray) -> Codes:
    """The codes of rows ``index``, in that order: groups lie along columns, so rows move freely in every format."""
    return {name: part[index] for name, part in codes.items()}


def quantize(format: WeightFormat, values: np.ndarray) -> Codes:
    """Codes of float32 ``values`` [..., K], each rounded to the nearest value that its group can express.

    Float formats round to nearest, ties to even. Integer formats with one level of scales: without a minimum the
    group's largest magnitude sets the scale; with one, scale and minimum are searched for the least squared error.
    InputError for values that are not finite or don't fit; UnsupportedError for formats with two levels and for
    rows that aren't whole groups.
    """
    values = np.asarray(values, np.float32)
    if not np.isfinite(values).all():
        raise InputError(f"values to be stored as {format.name} contain NaN or infinity.")
    if format.is_float:
        return {"codes": _to_float(format, values)}
    if len(format.scale) != 1 or format.values:
        valid = [f.name for f in FORMATS.values() if len(f.scale) < 2 and not f.values]
        raise UnsupportedError(f"adaptc can't convert weights to {format.name}; it converts to {', '.join(valid)}.")
    stored_bytes(format, values.shape)
    groups = values.reshape(-1, format.group)
    chunks = [_to_groups(format, groups[i : i + _CHUNK]) for i in range(0, max(len(groups), 1), _CHUNK)]
    parts = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    columns = {"codes": values.shape[-1]}
    return {
        name: part.reshape(*values.shape[:-1], columns.get(name, values.shape[-1] // format.group))
        for name, part in parts.items()
    }


_CHUNK = 1 << 15
"""Groups converted at once: 4 MB of float32 at 32 columns, so that the search's temporaries stay in cache."""


def _to_float(format: WeightFormat, values: np.ndarray) -> np.ndarray:
    if format.codes == "f32":
        return values.copy()
    if format.codes == "f16":
        with np.errstate(over="ignore"):
            rounded = values.astype(np.float16)
        overflow = np.isinf(rounded)
    else:
        bits = np.ascontiguousarray(values).view(np.uint32)
        half_to_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        rounded = ((bits + half_to_even) >> np.uint32(16)).astype(np.uint16)
        overflow = (rounded & 0x7F80) == 0x7F80
    if overflow.any():
        raise InputError(f"values up to {np.abs(values).max():g} don't fit {format.name}.")
    return rounded


def _half(format: WeightFormat, values: np.ndarray) -> np.ndarray:
    """Values rounded to f16, the stored dtype of scales. float32 → float16, InputError on overflow."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    if not np.isfinite(rounded).all():
        raise InputError(f"a scale or minimum of {np.abs(values).max():g} doesn't fit the f16 levels of {format.name}.")
    return rounded


def _to_groups(format: WeightFormat, groups: np.ndarray) -> Codes:
    """Codes of groups [G, group] in a format with one level of scales."""
    return (_asymmetric if format.minimum else _symmetric)(format, groups)


def _divided(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """values / scale, and 0 where the scale is 0."""
    return np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)


def _symmetric(format: WeightFormat, groups: np.ndarray) -> Codes:
    signed = format.codes.startswith("i")
    top = (1 << (format.bits - 1)) - 1
    if signed:
        scale = np.abs(groups).max(-1, keepdims=True) / np.float32(top)
    else:
        # The code below zero reaches one step further than the one above: give it to the larger side.
        extreme = np.take_along_axis(groups, np.abs(groups).argmax(-1)[:, None], -1)
        scale = extreme / np.float32(-format.zero)
    scale = _half(format, scale)
    codes = np.rint(_divided(groups, scale.astype(np.float32)))
    codes = np.clip(codes, -top if signed else -format.zero, top) + np.float32(format.zero)
    return {"codes": codes.astype(np.int8 if signed else np.uint8), "scale0": scale}


_STRETCH = (0.0, -0.6, -0.3, 0.3, 0.6)
"""Steps by which the search's first guess misses the full range: outliers may be clipped (> 0) or spared. The range
itself comes first, so the result is never worse than min/max rounding."""


def _asymmetric(format: WeightFormat, groups: np.ndarray) -> Codes:
    top = np.float32((1 << format.bits) - 1)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    guesses = [(_half(format, (high - low) / top), _half(format, low))]
    mean = groups.mean(-1, keepdims=True)
    for stretch in _STRETCH:
        steps = _divided(np.float32(top + stretch) * (groups - low), high - low)
        steps = np.clip(np.rint(steps), 0, top)
        # Least squares of groups ≈ scale * steps + minimum.
        centred = steps - steps.mean(-1, keepdims=True)
        scale = _divided((centred * (groups - mean)).sum(-1, keepdims=True), (centred * centred).sum(-1, keepdims=True))
        guesses.append((_half(format, scale), _half(format, mean - scale * steps.mean(-1, keepdims=True))))
    best: Codes = {}
    best_error = np.full((len(groups), 1), np.inf, np.float32)
    for scale, minimum in guesses:
        wide, offset = scale.astype(np.float32), minimum.astype(np.float32)
        codes = np.clip(np.rint(_divided(groups - offset, wide)), 0, top)
        error = np.square(wide * codes + offset - groups).sum(-1, keepdims=True)
        trial = {"codes": codes.astype(np.uint8), "scale0": scale, "min0": minimum}
        better = error < best_error
        best = {name: np.where(better, part, best[name]) for name, part in trial.items()} if best else trial
        best_error = np.where(better, error, best_error)
    return best
