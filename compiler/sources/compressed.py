"""Matrices as compressed-tensors packs them: MXFP4 in two tensors of bytes each.

``….weight_packed`` [N, K/2]: two E2M1 codes a byte, the even column in the low four bits. ``….weight_scale`` [N, K/32]:
the exponent of each group, E8M0. Which matrices are packed the tensors say by being there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from adaptc import blocks
from adaptc.errors import InputError
from adaptc.formats import FORMATS, WeightFormat
from adaptc.sources.tensor import SourceTensor, check_finite

BYTES = WeightFormat("u8", "u8")
"""Of tensors that mean something only together."""

FORMAT = FORMATS["mxfp4"]
CODES, SCALES = ".weight_packed", ".weight_scale"


@dataclass(frozen=True)
class PackedTensor:
    """As ``SourceTensor``, of two stored tensors."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[SourceTensor, SourceTensor]
    stored: WeightFormat = FORMAT
    format: WeightFormat = FORMAT
    note: str = ""

    @property
    def file(self) -> str:
        return self.parts[0].file

    @property
    def raw(self) -> np.ndarray:
        return np.concatenate([part.raw for part in self.parts])

    def codes(self) -> blocks.Codes:
        """Unpacked codes (see ``adaptc.blocks``)."""
        packed, scales = (part.raw.reshape(part.shape) for part in self.parts)
        return {"codes": np.stack([packed & 15, packed >> 4], axis=-1).reshape(self.shape), "scale0": scales}

    elements = codes

    def values(self) -> np.ndarray:
        """float32 values."""
        return blocks.dequantize(self.format, self.codes())

    def check_finite(self) -> None:
        check_finite(self, self.format, self.codes())


def is_part(name: str) -> bool:
    """Whether a tensor of that name holds codes or scales."""
    return name.endswith((CODES, SCALES))


def paired(stored: Mapping[str, SourceTensor]) -> dict[str, SourceTensor | PackedTensor]:
    """``stored`` with one matrix ``….weight`` in place of each pair. InputError for a half of one, and for shapes that
    don't fit each other."""
    whole: dict[str, SourceTensor | PackedTensor] = {name: t for name, t in stored.items() if not is_part(name)}
    for name in filter(is_part, stored):
        stem = name.removesuffix(CODES).removesuffix(SCALES)
        if not all(stem + part in stored for part in (CODES, SCALES)):
            other = SCALES if name.endswith(CODES) else CODES
            raise InputError(f"the tensor {name!r} in {stored[name].file} has no {stem + other!r} beside it.",
                             hint="Is a file missing?")
        codes, scales = stored[stem + CODES], stored[stem + SCALES]
        groups = scales.shape[-1] if len(scales.shape) == 2 else 0
        if codes.shape != (scales.shape[0], groups * FORMAT.group // 2) or not groups:
            raise InputError(f"the tensors {codes.name!r} and {scales.name!r} have the shapes {codes.shape} and "
                             f"{scales.shape}; expected [N, K/2] and [N, K/{FORMAT.group}].")
        if f"{stem}.weight" in stored:
            raise InputError(f"the files hold {f'{stem}.weight'!r} both packed and as it is.")
        whole[f"{stem}.weight"] = PackedTensor(f"{stem}.weight", (codes.shape[0], 2 * codes.shape[1]), (codes, scales))
    return whole
