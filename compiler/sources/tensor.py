"""One tensor of a model's files: lazy, memory-mapped, in the format that the file stores it in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from adaptc import blocks
from adaptc.errors import InputError, UnsupportedError
from adaptc.formats import FORMATS, WeightFormat
from adaptc.models import waivers
from adaptc.sources.waiver import Waiver


@dataclass(frozen=True)
class SourceTensor:
    """A stored tensor. ``data`` are its bytes (uint8, usually a view of a memory map), ``file`` the file's name.

    ``stored`` is the file's format; ``format`` what ``codes`` come in: the same, but f32 for vectors, which are
    biases and norms and never operands of packed kernels.
    """

    name: str
    shape: tuple[int, ...]
    stored: WeightFormat
    data: np.ndarray
    file: str

    @cached_property
    def raw(self) -> np.ndarray:
        """Its bytes, for whoever makes something of them: see ``looked_at``."""
        return self.data

    @property
    def looked_at(self) -> bool:
        """Whether anything may have been made of the tensor's values so far."""
        return "raw" in vars(self)

    @property
    def format(self) -> WeightFormat:
        return self.stored if len(self.shape) > 1 else FORMATS["f32"]

    def codes(self) -> blocks.Codes:
        """Unpacked codes in ``format`` (see ``adaptc.blocks``)."""
        codes = self.elements()
        if self.format == self.stored:
            return codes
        return {"codes": blocks.dequantize(self.stored, codes)}

    def values(self) -> np.ndarray:
        """float32 values, as the ``gguf`` package dequantises them."""
        return blocks.dequantize(self.stored, self.elements())

    def elements(self) -> blocks.Codes:
        """Unpacked codes in the format that the file stores, of vectors too."""
        return blocks.unblock(self.stored, self.raw, self.shape)

    note = ""
    """Why the tensor isn't held in its stored format ("" when it is, or is a vector)."""

    def check_finite(self) -> None:
        """InputError naming the tensor when a value is NaN or infinite."""
        check_finite(self, self.format, self.codes())


def check_finite(tensor: SourceTensor, format: WeightFormat, codes: blocks.Codes) -> None:
    """InputError naming ``tensor`` when ``codes`` of it hold a NaN or an infinity."""
    if not blocks.is_finite(format, codes):
        raise InputError(
            f"the tensor {tensor.name!r} in {tensor.file} contains NaN or infinity.", hint="The file is damaged."
        )


EXACT_TO = 1 << 24
"""Up to here float32 holds every whole number."""


def whole_numbers(name: str, shape: tuple[int, ...], dtype: str, data: np.ndarray, file: str,
                  waiver: Waiver = Waiver()) -> SourceTensor | None:
    """A tensor of integers, whose bytes are ``data``, as the float32 numbers that they are. UnsupportedError for numbers
    that float32 can't hold, unless the tensor is waived (None); InputError when there are other bytes than the shape
    says."""
    if len(data) != prod(shape) * np.dtype(dtype).itemsize:
        raise InputError(f"{file} is damaged or incomplete: the tensor {name!r} of shape {shape} has {len(data)} bytes.",
                         hint="Download the file again.")
    values = np.frombuffer(data.tobytes(), dtype)
    if values.size and max(abs(int(values.min())), abs(int(values.max()))) > EXACT_TO:
        if waivers.reason(waivers.TENSORS, name) or waiver.covers(name):
            return None
        raise UnsupportedError(f"the tensor {name!r} in {file} holds whole numbers beyond {EXACT_TO}, which adaptc, that "
                               "keeps them as float32, can't read.")
    return SourceTensor(name, shape, FORMATS["f32"], values.astype("<f4").view(np.uint8), file)


def locate(name: str, shape: tuple[int, ...], format: WeightFormat | None, dtype: str, data: np.ndarray, offset: int,
           file: str, waiver: Waiver = Waiver()) -> SourceTensor | None:
    """The tensor whose bytes start at ``offset`` of ``data``; None for one that is waived and can't be read.

    UnsupportedError for a dtype that adaptc has no format for; InputError when the bytes end before the tensor does.
    """
    if format is None:
        if waivers.reason(waivers.TENSORS, name) or waiver.covers(name):
            return None
        raise UnsupportedError(
            f"the tensor {name!r} in {file} is stored as {dtype}, which adaptc can't read; it reads "
            f"{', '.join(FORMATS)}.",
            hint="Use a file in one of these formats.",
        )
    size = blocks.stored_bytes(format, shape)
    if size > len(data) - offset:
        raise InputError(
            f"{file} is damaged or incomplete: the tensor {name!r} takes {size} bytes from byte {offset} on and "
            f"{len(data) - offset} are left.",
            hint="Download the file again.",
        )
    return SourceTensor(name, shape, format, data[offset : offset + size], file)
