"""Which class, of transformers or of ``models``, a configuration is for."""

from __future__ import annotations

from typing import Any

from adaptc.errors import UnsupportedError
from adaptc.models.modules import MODULES


def causal_model(config: Any, trust_remote_code: bool = False) -> Any:
    """The causal LM that we or transformers have for ``config``, in float32, with whatever parameters and buffers its
    constructors make where they are called; with ``trust_remote_code`` the one that comes with the model, if the
    configuration names one. UnsupportedError when there is none.

    A class that transformers maps a multimodal wrapper's configuration to may be built of its text model's, which
    checkpoints of it have: it is that which ``architectures`` names.
    """
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import (MODEL_FOR_CAUSAL_LM_MAPPING,
                                                        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

    own = MODULES[config.model_type].load() if config.model_type in MODULES else None
    if own and type(config) is own.CONFIG:
        return own.MODEL._from_config(config, dtype=torch.float32)
    remote = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if remote or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=remote)
    for name in getattr(config, "architectures", None) or ():
        if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and getattr(transformers, name).config_class is type(config):
            return getattr(transformers, name)._from_config(config, dtype=torch.float32)
    raise UnsupportedError(f"transformers has no causal language model for model_type {config.model_type!r}.")
