"""Model types that transformers lacks and a module here has: one row each. Standard library only."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType


@dataclass(frozen=True)
class Own:
    """A model type of config.json, of a wrapper around the text model where there is one.

    module      where its ``CONFIG`` (a configuration class) and ``MODEL`` (the causal language model) are
    prefix      what the names of its tensors begin with in published files
    conversion  the model type whose row of transformers' table says how stored tensors become parameters
    narrowed    regular expression of parameters → dotted configuration key of how many elements they have: files hold
                zeros after them
    plain       regular expression of modules whose matrices files hold as they are, whatever ``quantization_config``
                says
    """

    module: str
    prefix: str = ""
    conversion: str = ""
    narrowed: Mapping[str, str] = field(default_factory=dict)
    plain: str = ""

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


MODULES: Mapping[str, Own] = {
    "kimi_k3": Own("adaptc.models.kimi_k3", prefix="language_model.", conversion="kimi_linear",
                   narrowed={r"\.A_log$": "linear_attn_config.num_heads"},
                   plain=r"routed_expert_(down|up)_proj$|_res_proj$"),
}
