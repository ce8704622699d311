"""Checkpoints whose tensors aren't the module's parameters one by one: experts in a tensor each, older names.

Which stored tensors make which parameter is transformers' own table (``transformers.conversion_mapping``), read here
and never retyped. Its operations move elements and compute nothing; they run on meta tensors to say a shape, and on
the stored elements only when a parameter is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from adaptc import blocks
from adaptc.errors import InputError, UnsupportedError
from adaptc.formats import FORMATS, WeightFormat
from adaptc.sources.tensor import SourceTensor

_MOVED = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
"""Float format → the numpy dtype that its elements move as."""


@dataclass(frozen=True)
class ConvertedTensor:
    """A parameter made of several stored tensors, or of a part of one. As ``SourceTensor``; the elements keep their
    stored format where all parts share one, else they are float32."""

    name: str
    shape: tuple[int, ...]
    stored: WeightFormat
    file: str
    parts: tuple[SourceTensor, ...]
    move: Callable[[tuple], Any]
    """Torch tensors of the parts → the parameter's."""

    @property
    def format(self) -> WeightFormat:
        return self.stored if len(self.shape) > 1 else FORMATS["f32"]

    def codes(self) -> blocks.Codes:
        """Unpacked codes in ``format`` (see ``adaptc.blocks``)."""
        kept = _moved(self.parts, self.stored, self.move)
        return {"codes": kept} if self.format == self.stored else {"codes": blocks.dequantize(self.stored, {"codes": kept})}

    def values(self) -> np.ndarray:
        """float32 values."""
        return blocks.dequantize(self.format, self.codes())

    @cached_property
    def raw(self) -> np.ndarray:
        """The elements' bytes."""
        return np.ascontiguousarray(self.codes()["codes"]).view(np.uint8).reshape(-1)

    def check_finite(self) -> None:
        for part in self.parts:
            part.check_finite()


def converted(stored: Mapping[str, SourceTensor], kinds: tuple[str, ...]) -> Mapping[str, SourceTensor | ConvertedTensor]:
    """``stored`` under the names, and in the pieces, that transformers' classes have them in.

    ``kinds`` are names that the table may know: the class and the model_type, most specific first.
    """
    renamings, converters = _transforms(kinds)
    if not renamings and not converters:
        return stored
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    result: dict[str, SourceTensor | ConvertedTensor] = {}
    collected: dict[str, tuple[Any, list[tuple[str, SourceTensor]]]] = {}
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters)
        if pattern is not None:
            collected.setdefault(target, (of_pattern[pattern], []))[1].append((pattern, stored[name]))
        elif target in result:
            raise InputError(f"the tensors {result[target].name!r} and {name!r} are both what transformers calls {target!r}.")
        else:
            result[target] = stored[name]
    for target, (converter, parts) in collected.items():
        for tensor in _convert(target, converter, parts):
            if tensor.name in result:
                raise InputError(f"the files hold {tensor.name!r} itself, and tensors that it would be made of.")
            result[tensor.name] = tensor
    return result


def _transforms(kinds: tuple[str, ...]) -> tuple[list, list]:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    found = next((table for kind in kinds if (table := get_checkpoint_conversion_mapping(kind))), [])
    table = [*found, *(get_checkpoint_conversion_mapping("legacy") or [])]
    return ([t for t in table if isinstance(t, WeightRenaming)], [t for t in table if isinstance(t, WeightConverter)])


def _convert(target: str, converter: Any, parts: list[tuple[str, SourceTensor]]) -> list[ConvertedTensor]:
    import torch

    tensors = tuple(tensor for _, tensor in parts)
    formats = {tensor.stored.name for tensor in tensors}
    stored = tensors[0].stored if len(formats) == 1 and tensors[0].stored.is_float else FORMATS["f32"]

    def run(values: tuple) -> dict[str, Any]:
        one = deepcopy(converter)
        for (pattern, tensor), value in zip(parts, values):
            one.add_tensor(target, tensor.name, pattern, value)
        return {name: v[0] if isinstance(v, list) else v for name, v in one.convert(target).items()}

    try:
        shapes = run(tuple(torch.empty(tensor.shape, device="meta") for tensor in tensors))
    except Exception as error:  # transformers' operations share no class of errors
        raise UnsupportedError(
            f"transformers' table makes {target!r} of {len(tensors)} tensors such as {tensors[0].name!r}, which doesn't "
            f"work for these: {error}.", hint="Is a tensor missing, or of another shape than its neighbours?") from error
    return [
        ConvertedTensor(name, tuple(value.shape), stored, tensors[0].file, tensors, lambda v, n=name: run(v)[n])
        for name, value in shapes.items()
    ]


def _moved(parts: tuple[SourceTensor, ...], stored: WeightFormat, move: Callable[[tuple], Any]) -> np.ndarray:
    import torch

    def elements(tensor: SourceTensor) -> np.ndarray:
        same = tensor.stored == stored
        array = blocks.unblock(tensor.stored, tensor.raw, tensor.shape)["codes"] if same else tensor.values()
        # torch's own conversions of 16-bit floats have no part in this: elements move as they are
        return np.array(array, _MOVED[stored.codes])

    with torch.no_grad():
        return move(tuple(torch.from_numpy(elements(part)) for part in parts)).contiguous().numpy()
