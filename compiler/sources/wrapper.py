"""The text model that a configuration states, where it stands within the one of a multimodal wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptc.models.modules import MODULES
from adaptc.sources.quantization import FIELD

TEXT = "text_config"
"""Where a wrapper states its text model."""

SHARED = ("dtype", "torch_dtype", "tie_word_embeddings", FIELD)
"""Keys that a wrapper may state for its text model."""


def text_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the text model of a config.json; all of them where there is no wrapper. A module of ours is known by
    the wrapper's model_type, as that of the text model may be one that transformers has another class for."""
    text = given.get(TEXT)
    if not isinstance(text, dict):
        return dict(given)
    own = {"model_type": given["model_type"]} if given.get("model_type") in MODULES else {}
    return {key: given[key] for key in SHARED if key in given} | text | own
