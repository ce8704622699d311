"""Files whose tensors aren't the module's parameters one by one: experts in a tensor each, halves apart, older names.

Which tensors of a Hugging Face folder make which parameter is transformers' own table
(``transformers.conversion_mapping``), read here and never retyped. Its operations move elements and compute nothing;
they run on meta tensors to say a shape, and on the stored elements only when a parameter is loaded. What GGUF files
keep apart is joined by rows, which moves packed codes as they are.
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
from adaptc.models.modules import MODULES
from adaptc.sources.tensor import SourceTensor

@dataclass(frozen=True)
class ConvertedTensor:
    """A parameter made of several stored tensors, or of a part of one. As ``SourceTensor``; the elements keep their
    stored format where all parts share one that ``move`` can be done to, else they are float32."""

    name: str
    shape: tuple[int, ...]
    stored: WeightFormat
    file: str
    parts: tuple[SourceTensor, ...]
    move: Callable[[tuple[np.ndarray, ...]], np.ndarray]
    """Elements of the parts → the parameter's. In formats with groups it is done to each array of codes."""

    @property
    def format(self) -> WeightFormat:
        return self.stored if len(self.shape) > 1 else FORMATS["f32"]

    def codes(self) -> blocks.Codes:
        """Unpacked codes in ``format`` (see ``adaptc.blocks``)."""
        parts = [_elements(part, self.stored) for part in self.parts]
        moved = {name: self.move(tuple(part[name] for part in parts)) for name in parts[0]}
        return moved if self.format == self.stored else {"codes": blocks.dequantize(self.stored, moved)}

    def values(self) -> np.ndarray:
        """float32 values."""
        return blocks.dequantize(self.format, self.codes())

    @cached_property
    def raw(self) -> np.ndarray:
        """The elements' bytes."""
        parts = self.codes().values()
        return np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts])

    @property
    def note(self) -> str:
        """As ``SourceTensor.note``, of the parts together."""
        formats = {part.format.name for part in self.parts}
        if len(formats) > 1:
            return f"made of {' and '.join(sorted(formats))}; read as {self.stored.name}, which holds every value"
        return next((part.note for part in self.parts if part.note), "")

    def check_finite(self) -> None:
        for part in self.parts:
            part.check_finite()


def converted(stored: Mapping[str, SourceTensor], model: Any) -> Mapping[str, SourceTensor | ConvertedTensor]:
    """``stored`` under the names, and in the pieces, that transformers' ``model`` has them in, which may be on the meta
    device: its table is asked for each model within it. A tensor that has the name of a parameter keeps it where the
    table, meant for what another program published, would make that the name of none."""
    renamings, converters = _transforms(model)
    if not renamings and not converters:
        return stored
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    result: dict[str, SourceTensor | ConvertedTensor] = {}
    collected: dict[str, tuple[Any, list[tuple[str, SourceTensor]]]] = {}
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    own = frozenset(model.state_dict())
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters)
        if name in own and target not in own:
            target, pattern = name, None
        if pattern is not None:
            collected.setdefault(target, (of_pattern[pattern], []))[1].append((pattern, stored[name]))
        elif target in result:
            raise InputError(f"the tensors {result[target].name!r} and {name!r} are both what transformers calls {target!r}.")
        else:
            result[target] = stored[name]
    for target, (converter, parts) in collected.items():
        for tensor in _convert(target, converter, parts, model):
            if tensor.name in result:
                raise InputError(f"the files hold {tensor.name!r} itself, and tensors that it would be made of.")
            result[tensor.name] = tensor
    return result


def joined(name: str, parts: tuple[SourceTensor, ...], alternating: bool) -> ConvertedTensor:
    """``parts`` [E, N, …] as one tensor [E, parts * N, …]: in each of E, the rows of one part after those of another,
    or, ``alternating``, a row of each in turn. Groups lie along columns, so codes move as they are where the parts have
    one format. InputError for parts of different shapes."""
    first = parts[0]
    for part in parts[1:]:
        if part.shape != first.shape or len(first.shape) < 2:
            raise InputError(f"the tensors {first.name!r} and {part.name!r} in {first.file} belong together, and have "
                             f"the shapes {first.shape} and {part.shape}.", hint="The file is damaged.")
    count, rows, *rest = first.shape
    formats = {part.format.name for part in parts}
    stored = first.format if len(formats) == 1 else FORMATS["f32"]

    def move(arrays: tuple[np.ndarray, ...]) -> np.ndarray:
        if alternating:
            return np.stack(arrays, axis=2).reshape(count, len(arrays) * rows, *arrays[0].shape[2:])
        return np.concatenate(arrays, axis=1)

    return ConvertedTensor(name, (count, len(parts) * rows, *rest), stored, first.file, parts, move)


def narrowed(name: str, tensor: SourceTensor, count: int) -> SourceTensor | ConvertedTensor:
    """The first ``count`` elements of a vector that files hold zeros after: InputError when it is loaded and something
    else stands there. A tensor that isn't longer is left as it is."""
    if len(tensor.shape) != 1 or tensor.shape[0] <= count:
        return tensor

    def move(arrays: tuple[np.ndarray, ...]) -> np.ndarray:
        if arrays[0][count:].any():
            raise InputError(f"the tensor {tensor.name!r} in {tensor.file} has {tensor.shape[0]} elements, of which {count} "
                             "are the parameter's, and zeros should follow.", hint="The file is damaged.")
        return arrays[0][:count]

    return ConvertedTensor(name, (count,), tensor.stored, tensor.file, (tensor,), move)


def _transforms(model: Any) -> tuple[list, list]:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    own = MODULES.get(model.config.model_type)
    ours = own is not None and isinstance(model, own.load().MODEL)
    table = [*(get_checkpoint_conversion_mapping(own.conversion) if ours else ()), *get_model_conversion_mapping(model)]
    return ([t for t in table if isinstance(t, WeightRenaming)], [t for t in table if isinstance(t, WeightConverter)])


def _convert(target: str, converter: Any, parts: list[tuple[str, SourceTensor]], model: Any) -> list[ConvertedTensor]:
    import torch

    tensors = tuple(tensor for _, tensor in parts)
    formats = {tensor.stored.name for tensor in tensors}

    def run(values: tuple) -> dict[str, Any]:
        one = deepcopy(converter)
        for (pattern, tensor), value in zip(parts, values):
            one.add_tensor(target, tensor.name, pattern, value)
        return {name: v[0] if isinstance(v, list) else v for name, v in
                one.convert(target, model=model, config=model.config).items()}

    try:
        shapes = run(tuple(torch.empty(tensor.shape, device="meta") for tensor in tensors))
    except Exception as error:  # transformers' operations share no class of errors
        raise UnsupportedError(
            f"transformers' table makes {target!r} of {len(tensors)} tensors such as {tensors[0].name!r}, which doesn't "
            f"work for these: {error}.", hint="Is a tensor missing, or of another shape than its neighbours?") from error
    kept = tensors[0].stored.is_float or all(_moves_rows(one, converter) for one in shapes.values())
    stored = tensors[0].stored if len(formats) == 1 and kept else FORMATS["f32"]
    return [
        ConvertedTensor(name, tuple(value.shape), stored, tensors[0].file, tensors, _by_torch(run, name))
        for name, value in shapes.items()
    ]


def _moves_rows(made: Any, converter: Any) -> bool:
    """Whether all that is done to get the tensor ``made`` is putting whole rows together, so that groups of columns stay
    what they are."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    return all(isinstance(one, (Concatenate, MergeModulelist)) and 0 <= one.dim < made.ndim - 1
               for one in converter.operations)


def _by_torch(run: Callable[[tuple], dict[str, Any]], name: str) -> Callable[[tuple[np.ndarray, ...]], np.ndarray]:
    """``run``'s result of that name, on numpy arrays."""

    def move(arrays: tuple[np.ndarray, ...]) -> np.ndarray:
        import torch

        with torch.no_grad():  # from_numpy needs arrays that may be written to
            return run(tuple(torch.from_numpy(np.array(array)) for array in arrays))[name].contiguous().numpy()

    return move


def _elements(tensor: SourceTensor, stored: WeightFormat) -> blocks.Codes:
    """Codes of ``tensor`` in ``stored``: its own ones, or float32 values."""
    if tensor.stored == stored:
        # torch's own conversions of 16-bit floats have no part in this: elements move as they are
        return tensor.elements()
    return tensor.codes() if tensor.format == stored else {"codes": tensor.values()}
