"""A weight on its way from the file to memory: unpacked codes in the parameter's row order, or its float values."""

from __future__ import annotations

import numpy as np

from adaptc import blocks
from adaptc.formats import FORMATS
from adaptc.ir.module import Weight
from adaptc.sources.binding import Binding
from adaptc.sources.tensor import check_finite

DENSE = FORMATS["f32"]
"""What a weight without a packed type is held in."""


def codes_of(source, weight: Weight) -> blocks.Codes:
    """Unpacked codes of ``weight`` in the format its type states, rows in the parameter's order.

    The file's own codes and scales when the formats agree; otherwise its values, converted. ``source`` is a
    ``sources.Source``. InputError names a tensor with NaN or infinite values.
    """
    tensor = source.tensors[weight.tensor]
    wanted = weight.spec.format or DENSE
    codes = tensor.codes()
    check_finite(tensor, tensor.format, codes)
    if tensor.format != wanted:
        codes = blocks.quantize(wanted, blocks.dequantize(tensor.format, codes))
    order = Binding(weight.tensor, weight.rows or None).rows(tensor.shape[0])
    return codes if order is None else blocks.take_rows(codes, order)


def parameter(source, weight: Weight) -> np.ndarray:
    """Float32 values of ``weight`` as its type stores them, in its shape: what the reference backend computes with."""
    return blocks.dequantize(weight.spec.format or DENSE, codes_of(source, weight)).reshape(weight.spec.shape)


def conversion_error(source, weight: Weight) -> float:
    """Relative RMS error that storing ``weight`` in another format than its file's introduces; 0.0 for the same."""
    tensor = source.tensors[weight.tensor]
    wanted = weight.spec.format or DENSE
    if wanted == tensor.format or wanted == DENSE:
        return 0.0
    exact = tensor.values().astype(np.float64)
    kept = blocks.dequantize(wanted, blocks.quantize(wanted, exact.astype(np.float32)))
    scale = np.sqrt(np.mean(exact**2))
    return float(np.sqrt(np.mean((kept - exact) ** 2)) / scale) if scale else 0.0

