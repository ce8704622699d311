"""Models in: whatever authors publish, as one ``Source``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptc.errors import AdapterError, DamagedFileError, InputError, NotFoundError
from adaptc.sources.binding import Binding
from adaptc.sources.source import Source
from adaptc.sources.tensor import SourceTensor
from adaptc.sources.text import TextBundle
from adaptc.sources.waiver import Waiver

if TYPE_CHECKING:
    from adaptc.sources.described import DescribedSource

__all__ = ["Binding", "Source", "SourceTensor", "TextBundle", "is_described", "open_described", "open_source"]

_MODELS = (
    "A model is a GGUF file, a folder with config.json and safetensors, or a hub id such as "
    "HuggingFaceTB/SmolLM2-135M-Instruct."
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def open_source(model: Any, *, trust_remote_code: bool = False, waive: Iterable[str] = ()) -> Source:
    """Opens a GGUF file, a Hugging Face folder, a hub id ("org/name", from the local cache or the hub), or a
    transformers module in memory. ``trust_remote_code`` runs modelling code that lies in the folder; ``waive`` names
    what may go unused (``waiver.Waiver``).

    InputError for anything else and for damaged files; UnsupportedError for models in a form adaptc can't read.
    """
    waiver = Waiver(waive)
    if hasattr(model, "named_parameters"):
        from adaptc.sources.module import ModuleSource

        return ModuleSource(model, waiver)
    if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
        raise NotFoundError(f"{model!r} names no model.", hint=_MODELS)
    try:
        return _open(model, trust_remote_code, waiver)
    except OSError as error:
        raise DamagedFileError(f"{error.filename or model} can't be read: {error.strerror or error}.") from error


def open_described(path: str | os.PathLike, waive: Iterable[str] = ()) -> "DescribedSource":
    """The model that a configuration without weights describes: it has sizes and no values. InputError where ``path``
    isn't one (``is_described``)."""
    from adaptc.sources.described import DescribedSource

    if not is_described(path):
        raise InputError(f"{path} is no configuration without weights.",
                         hint="Expected a JSON file, or a folder with config.json and no weights.")
    return DescribedSource(Path(path), Waiver(waive))


def is_described(path: str | os.PathLike) -> bool:
    """Whether ``path`` is a configuration without weights: a JSON file, or a folder with config.json and no weights."""
    from adaptc.sources.described import is_described

    return is_described(Path(path))


def _open(model: Any, trust: bool, waiver: Waiver) -> Source:
    path = Path(model)
    if path.is_dir():
        return _open_folder(path, None, trust, waiver)
    if path.is_file():
        return _open_file(path, waiver)
    if isinstance(model, str) and _HUB_ID.fullmatch(model) and not model.endswith((".gguf", ".safetensors")):
        from adaptc.sources.hub import local_snapshot

        return _open_folder(local_snapshot(model), model, trust, waiver)
    raise NotFoundError(f"there is no model at {str(model)!r}.", hint=_MODELS)


def _open_folder(folder: Path, name: str | None, trust: bool, waiver: Waiver) -> Source:
    from adaptc.sources.huggingface import ADAPTER, HuggingFaceSource, check_pickles, read_json

    if (folder / ADAPTER).is_file():
        base = read_json(folder / ADAPTER).get("base_model_name_or_path")
        raise AdapterError(f"{name or folder} holds an adapter ({ADAPTER}) for {base or 'another model'}, no model.",
                           hint="Merge it (peft's merge_and_unload) and save the result, or take the adapter's files "
                           "out of the folder.")
    if (folder / "config.json").is_file():
        return HuggingFaceSource(folder, name, trust_remote_code=trust, waiver=waiver)
    files = sorted(path for path in folder.iterdir() if path.suffix == ".gguf")
    if not files:
        check_pickles(folder, name or str(folder))
    hint = f"Name one of its files: {', '.join(path.name for path in files)}." if files else _MODELS
    raise InputError(f"the folder {name or folder} has no config.json, so it is no model.", hint=hint)


def _open_file(path: Path, waiver: Waiver) -> Source:
    from adaptc.sources.gguf import GgufSource
    from adaptc.sources.gguf_file import MAGIC
    from adaptc.sources.huggingface import is_pickled, pickled

    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start != MAGIC:
        if is_pickled(path.name, start):
            raise pickled(f"{path} holds pickled weights")
        what = f"starts with {start!r}" if start else "is empty"
        raise InputError(f"{path} is no model: it {what}, and a GGUF file starts with {MAGIC!r}.", hint=_MODELS)
    return GgufSource(path, waiver)
