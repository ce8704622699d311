"""A model of which there is only the configuration: no weights are read or made, so it has sizes and no values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from adaptc.errors import InputError, UnsupportedError
from adaptc.formats import FORMATS, WeightFormat
from adaptc.models import waivers
from adaptc.models.modules import MODULES
from adaptc.sources.accounting import leaves
from adaptc.sources.binding import Binding, listed
from adaptc.sources.huggingface import PLAUSIBLE_LAYERS, read_json
from adaptc.sources.quantization import FIELD, Quantization, quantization
from adaptc.sources.source import Source
from adaptc.sources.text import TextBundle
from adaptc.sources.waiver import Waiver
from adaptc.sources.wrapper import TEXT, text_model

CONFIG = "config.json"
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class StatedTensor:
    """A parameter as the files would hold it."""

    name: str
    shape: tuple[int, ...]
    format: WeightFormat
    file: str = CONFIG
    note: str = ""
    looked_at: bool = False


class DescribedSource(Source):
    """A ``config.json``. Parameters are stored in its dtype, or as its ``quantization_config`` says; of a multimodal
    wrapper it is the text model. Nothing that the file names is fetched or run.

    When the module has been built, ``formats``, ``shapes`` and ``elements`` are those of its parameters, by name, and
    ``architecture`` is its class's name.
    """

    kind = "described"

    def __init__(self, path: Path, waiver: Waiver = Waiver()):
        self.path = path / CONFIG if path.is_dir() else path
        self.name = (self.path.parent.resolve().name if self.path.name == CONFIG else self.path.stem)
        self.waiver = waiver
        given = self._whole = read_json(self.path)
        self.wrapper = given.get("model_type") if isinstance(given.get(TEXT), dict) else None
        given = text_model(given)
        self.quantization: Quantization | None = quantization(given.pop(FIELD, None), self.name)
        self._given = given
        self._tensors: dict[str, StatedTensor] = {}
        if not isinstance(given.get("model_type"), str):
            raise InputError(f"{self.path.name} of {self.name} doesn't say its model_type.")

    @property
    def tensors(self) -> Mapping[str, StatedTensor]:
        """Those that have been bound."""
        return self._tensors

    @cached_property
    def dtype(self) -> WeightFormat:
        """The format of what isn't quantised. UnsupportedError for another dtype."""
        stated = self._given.get("dtype") or self._given.get("torch_dtype") or "bfloat16"
        if stated not in _DTYPES:
            raise UnsupportedError(f"dtype of {self.name} is {stated!r}; expected one of {', '.join(_DTYPES)}.")
        return FORMATS[_DTYPES[stated]]

    @cached_property
    def config(self) -> Any:
        from transformers import CONFIG_MAPPING

        kind = self._model_type()
        made = MODULES[kind].load().CONFIG if kind in MODULES else CONFIG_MAPPING[kind]
        names = {"num_hidden_layers", made.attribute_map.get("num_hidden_layers")}
        for key, value in leaves(self._given):
            if key in names and (not isinstance(value, int) or not 0 < value <= PLAUSIBLE_LAYERS):
                raise InputError(f"{self.path.name} of {self.name} says {key} = {value}; expected a number of layers from 1 "
                                 f"to {PLAUSIBLE_LAYERS}.")
        try:
            return made.from_dict({**self._given, "model_type": kind})
        except Exception as error:  # validation errors of transformers share no narrower class
            raise InputError(f"{self.path.name} of {self.name} is no valid configuration: {error}") from error

    def _model_type(self) -> str:
        """The model_type whose causal language model transformers has, or we: the stated one, or that of the stated
        class."""
        import transformers
        from transformers import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as classes

        stated = self._given["model_type"]
        if stated in MODULES or stated in CONFIG_MAPPING and stated in classes:
            return stated
        named = self._given.get("architectures")
        for name in named if isinstance(named, list) else ():
            if name in classes.values():  # several model types may share the class: its own is meant
                return getattr(transformers, name).config_class.model_type
        keys = [key for key, _ in leaves(self._given) if waivers.reason(waivers.CONFIG, key) is None]
        raise UnsupportedError(
            f"transformers has no causal language model for the model_type {stated!r} of {self.name}"
            f"{f' ({TEXT} of a {self.wrapper} model)' if self.wrapper else ''}, so nothing reads {listed(keys, len(keys))}.",
            hint="A newer transformers may have it. Code that comes with a model isn't run to inspect it.")

    def given_config(self) -> Mapping[str, Any]:
        return self._given

    def place(self) -> str:
        return f"{self.name} ({self.path.name})"

    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def supplier(self, parameter: str) -> Binding:
        return Binding(parameter)

    def bind(self, parameters: Mapping[str, tuple[int, ...]], tied: Mapping[str, str],
             ignored: Sequence[str] = ()) -> dict[str, Binding]:
        """Each parameter is a tensor of its own name."""
        self._tensors = {name: StatedTensor(name, shape, self.dtype) for name, shape in parameters.items()}
        return {name: Binding(name) for name in parameters}

    def built(self, module: Any) -> None:
        """Notes the elements and the format of each parameter."""
        self.elements = {name: parameter.numel() for name, parameter in module.named_parameters()}
        self.formats = dict.fromkeys(self.elements, self.dtype)
        own = MODULES.get(self._given["model_type"])
        for name in _matrices(module, self.quantization) if self.quantization else ():
            plain = own and own.plain and re.search(own.plain, name.removesuffix(".weight"))
            if name in self.formats and not plain:
                self.formats[name] = self.quantization.format
        self.shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        self.architecture = type(module).__name__

    def notes(self) -> tuple[str, ...]:
        """What of the file isn't this model."""
        if self.wrapper is None:
            return ()
        return (f"the text model ({TEXT}) of a {self.wrapper} model; its other parts are left out",)

    def other_parts(self) -> int:
        """Parameters of a wrapper's parts beside its text model, such as a tower for images; 0 where transformers has no
        class for the wrapper, or can't make it."""
        import transformers
        from torch import device
        from transformers import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as classes

        if self.wrapper not in classes or self.wrapper not in CONFIG_MAPPING:
            return 0
        try:
            with device("meta"):
                whole = getattr(transformers, classes[self.wrapper])(CONFIG_MAPPING[self.wrapper].from_dict(self._whole))
        except Exception:  # constructors share no narrower class; the text model is what was asked for
            return 0
        return sum(parameter.numel() for parameter in whole.parameters()) - sum(self.elements.values())

    def description(self) -> None:
        return None

    def read_text(self) -> TextBundle:
        return TextBundle()


def _matrices(module: Any, stated: Quantization) -> Iterable[str]:
    """Parameters that the files hold quantised: of linear maps but the head, and of stacks of experts, what ``stated``
    covers."""
    from torch import nn
    from torch.nn.modules.conv import _ConvNd

    head = module.get_output_embeddings()
    for path, part in module.named_modules():
        if not stated.covers(path):
            continue
        if isinstance(part, nn.Linear) and part is not head and not stated.experts_only:
            yield f"{path}.weight"
        if not isinstance(part, _ConvNd):
            yield from (f"{path}.{name}" for name, p in part.named_parameters(recurse=False) if p.ndim == 3)


def is_described(path: Path) -> bool:
    """Whether ``path`` is a configuration without weights: a JSON file, or a folder with config.json and no others."""
    if path.is_dir():
        return (path / CONFIG).is_file() and not any(_holds_weights(one) for one in path.iterdir())
    return path.suffix == ".json" and path.is_file()


def _holds_weights(path: Path) -> bool:
    from adaptc.sources.huggingface import ADAPTER, PICKLES

    return path.suffix in (".safetensors", ".gguf", *PICKLES) or path.name in (ADAPTER, "model.safetensors.index.json")
