"""A weight on its way from the file to memory: unpacked codes in the parameter's row order, or its float values."""

from __future__ import annotations

from typing import Any

import numpy as np

from adaptc import blocks
from adaptc.errors import InputError
from adaptc.formats import FORMATS
from adaptc.ir.module import Weight


def codes_of(source, weight: Weight) -> dict[str, Any]:
    """Unpacked codes of ``weight`` in the format its type states, rows in the parameter's order.

    The file's own codes and scales when the formats agree; otherwise its values, converted. ``source`` is a
    ``sources.Source``.
    """
    tensor = source.tensors[weight.tensor]
    wanted = weight.spec.format or FORMATS["f32"]
    if tensor.format == wanted and len(weight.spec.shape) > 1:
        codes = tensor.codes()
        _check_scales_finite(weight, codes)
    else:
        values = finite(weight, tensor.values())
        codes = blocks.quantize(wanted, values.reshape(1, -1) if values.ndim == 1 else values)
    order = source.row_order(weight.rows, weight.spec.shape[0]) if weight.rows else None
    return codes if order is None else {name: array[order] for name, array in codes.items()}


def parameter(source, weight: Weight) -> np.ndarray:
    """Float32 values of ``weight`` as its type stores them, in its shape: what the reference backend computes with."""
    fmt = weight.spec.format or FORMATS["f32"]
    return blocks.dequantize(fmt, codes_of(source, weight)).reshape(weight.spec.shape)


def finite(weight: Weight, values: np.ndarray) -> np.ndarray:
    """``values``, or InputError naming the tensor when a value is NaN or infinite."""
    bad = ~np.isfinite(values)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise InputError(
            f"tensor {weight.tensor!r} has {int(bad.sum())} values that are NaN or infinite, the first at {where}.",
            hint="The file is damaged or was exported wrongly; get it again.",
        )
    return values


def _check_scales_finite(weight: Weight, codes: dict[str, Any]) -> None:
    """Integer codes are always finite, so only float codes and scales can spoil a weight."""
    for name, array in codes.items():
        floats = array.view(np.uint16).astype(np.uint32) << 16 if _is_bf16(weight, name, array) else array
        floats = floats.view(np.float32) if floats.dtype == np.uint32 else floats
        if floats.dtype.kind == "f":
            finite(weight, floats)


def _is_bf16(weight: Weight, name: str, array: np.ndarray) -> bool:
    return name == "codes" and array.dtype == np.uint16
