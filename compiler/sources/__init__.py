"""Models in: whatever authors publish, as one ``Source``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from adaptc.errors import InputError, NotFoundError
from adaptc.sources.binding import Binding
from adaptc.sources.source import Source
from adaptc.sources.tensor import SourceTensor
from adaptc.sources.text import TextBundle

__all__ = ["Binding", "Source", "SourceTensor", "TextBundle", "open_source"]

_MODELS = (
    "A model is a GGUF file, a folder with config.json and safetensors, or a hub id such as "
    "HuggingFaceTB/SmolLM2-135M-Instruct."
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def open_source(model: Any, *, trust_remote_code: bool = False) -> Source:
    """Opens a GGUF file, a Hugging Face folder, a hub id ("org/name", from the local cache or the hub), or a
    transformers module in memory. ``trust_remote_code`` runs modelling code that lies in the folder.

    InputError for anything else and for damaged files; UnsupportedError for models in a form adaptc can't read.
    """
    if hasattr(model, "named_parameters"):
        from adaptc.sources.module import ModuleSource

        return ModuleSource(model)
    path = Path(model)
    if path.is_dir():
        return _open_folder(path, trust=trust_remote_code)
    if path.is_file():
        return _open_file(path)
    if isinstance(model, str) and _HUB_ID.fullmatch(model) and not model.endswith((".gguf", ".safetensors")):
        from adaptc.sources.hub import local_snapshot

        return _open_folder(local_snapshot(model), name=model, trust=trust_remote_code)
    raise NotFoundError(f"there is no model at {str(model)!r}.", hint=_MODELS)


def _open_folder(folder: Path, name: str | None = None, trust: bool = False) -> Source:
    from adaptc.sources.huggingface import HuggingFaceSource

    if (folder / "config.json").is_file():
        return HuggingFaceSource(folder, name, trust_remote_code=trust)
    files = sorted(path for path in folder.iterdir() if path.suffix == ".gguf")
    hint = f"Name one of its files: {', '.join(path.name for path in files)}." if files else _MODELS
    raise InputError(f"the folder {name or folder} has no config.json, so it is no model.", hint=hint)


def _open_file(path: Path) -> Source:
    from adaptc.sources.gguf import GgufSource
    from adaptc.sources.gguf_file import MAGIC

    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}.") from error
    if start != MAGIC:
        what = f"starts with {start!r}" if start else "is empty"
        raise InputError(f"{path} is no model: it {what}, and a GGUF file starts with {MAGIC!r}.", hint=_MODELS)
    return GgufSource(path)
