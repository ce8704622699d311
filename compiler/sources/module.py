"""A model that is in memory already: a transformers causal LM with its weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from adaptc.errors import InputError, UnsupportedError
from adaptc.formats import FORMATS
from adaptc.sources.binding import Binding
from adaptc.sources.source import Source
from adaptc.sources.tensor import SourceTensor
from adaptc.sources.text import TextBundle
from adaptc.sources.waiver import Waiver

PLACE = "the module"
"""What errors call the place of a tensor."""


class ModuleSource(Source):
    """A ``torch.nn.Module`` that takes token ids and gives ``.logits``, with a transformers ``config``. It is read,
    never changed. It has no files, and so no tokenizer."""

    kind = "module"

    def __init__(self, module: Any, waiver: Waiver = Waiver()):
        if not hasattr(module, "set_attn_implementation") or not hasattr(module, "config"):
            raise UnsupportedError(
                f"{type(module).__name__} isn't a transformers model: it has no config, or can't choose how its attention "
                "is computed.",
                hint="Derive it from transformers.PreTrainedModel and call attention through ALL_ATTENTION_FUNCTIONS.",
            )
        self._module, self.waiver = module, waiver
        self.name = type(module).__name__

    @cached_property
    def config(self) -> Any:
        return self._module.config

    def given_config(self) -> Mapping[str, Any]:
        """Nothing: what the code doesn't read has not come from a file that would have to be accounted for."""
        return {}

    @cached_property
    def tensors(self) -> Mapping[str, SourceTensor]:
        kept = self._module.state_dict(keep_vars=True)
        everything = [*self._module.named_parameters(), *self._module.named_buffers()]
        return {name: _stored(name, tensor) for name, tensor in everything if name in kept}

    def files(self) -> tuple[Path, ...]:
        return ()

    def supplier(self, parameter: str) -> Binding:
        return Binding(parameter)

    def description(self) -> None:
        return None

    def read_text(self) -> TextBundle:
        return TextBundle()

    def module(self) -> Any:
        """A float32 copy without the weights, whose parameters are on the meta device."""
        import torch

        empty: dict[int, Any] = {}
        for parameter in self._module.parameters():
            shape = torch.empty(parameter.shape, device="meta", dtype=torch.float32)
            empty[id(parameter)] = torch.nn.Parameter(shape, requires_grad=False)
        kept = copy.deepcopy(self._module, empty).eval()
        kept.config.dtype = torch.float32
        return kept


def _stored(name: str, tensor: Any) -> SourceTensor:
    import torch

    formats = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
    if tensor.is_meta:
        raise InputError(f"{name!r} of {PLACE} is on the meta device, without values.")
    if tensor.dtype not in formats:
        raise UnsupportedError(f"{name!r} of {PLACE} has dtype {tensor.dtype}; adaptc reads {', '.join(formats.values())}.")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return SourceTensor(name, tuple(tensor.shape), FORMATS[formats[tensor.dtype]], raw, PLACE)
