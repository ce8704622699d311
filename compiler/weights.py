"""A weight on its way from the file to memory: unpacked codes in the parameter's row order, or its float values."""

from __future__ import annotations

import numpy as np

from adaptc import blocks
from adaptc.formats import FORMATS
from adaptc.ir.module import Weight
from adaptc.sources.binding import Binding

DENSE = FORMATS["f32"]
"""What a weight without a packed type is held in."""


def stored_codes(source, weight: Weight) -> tuple[blocks.Codes, float]:
    """Unpacked codes of ``weight`` in the format its type states, rows in the parameter's order, and the relative RMS
    error that this format adds to the file's values.

    The file's own codes and scales when the formats agree (error 0.0); otherwise its values, converted. ``source`` is
    a ``sources.Source``. InputError names a tensor with NaN or infinite values.
    """
    wanted = weight.spec.format or DENSE
    stored, codes = source.load(binding_of(weight))
    if stored == wanted:
        return codes, 0.0
    values = blocks.dequantize(stored, codes)
    codes = blocks.quantize(wanted, values)
    return codes, 0.0 if wanted == DENSE else _relative_rms(values, blocks.dequantize(wanted, codes))


def binding_of(weight: Weight) -> Binding:
    """How the tensor becomes the weight. Experts may lie one below the other in it."""
    *lead, rows, columns = (1, 1, *weight.spec.shape)
    shape = (*lead[2:], columns, rows) if weight.transposed else weight.spec.shape
    return Binding(weight.tensor, weight.rows or None, shape=shape if len(weight.spec.shape) > 2 else ())


def parameter(source, weight: Weight) -> np.ndarray:
    """Float32 values of ``weight`` as its type stores them, in its shape: what the reference backend computes with."""
    codes, _ = stored_codes(source, weight)
    return blocks.dequantize(weight.spec.format or DENSE, codes).reshape(weight.spec.shape)


def _relative_rms(exact: np.ndarray, kept: np.ndarray) -> float:
    size = float(np.mean(exact.astype(np.float64) ** 2))
    return float(np.sqrt(np.mean((kept.astype(np.float64) - exact) ** 2) / size)) if size else 0.0
