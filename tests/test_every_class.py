"""What ``every_class`` measures is measured where it counts, and a fixed sample of classes gives their own forward.

``python tests/every_class.py --seeds 3 --page docs/coverage.md`` does it for all of them, and writes the page.
"""

from __future__ import annotations

import every_class
import pytest
from tiny_configs import LENGTH, tiny

pytestmark = pytest.mark.usefixtures("kept_captures")

REACHED = ("sliding_window", "sliding_window_size", "attention_chunk_size", "attention_window_size", "window_size",
           "local_attention", "local_attention_window_len", "keep_window_size", "index_topk", "indexer_budget",
           "indexer_compress_ratio", "index_block_size", "chunk_size", "mamba_chunk_size", "compress_rates")
"""Keys of windows, chunks, blocks and choices of tokens."""

CHOSEN = {"num_experts_per_tok": ("num_experts", "num_local_experts", "n_routed_experts"),
          "num_experts_per_token": ("num_experts",), "moe_topk": ("moe_num_experts", "n_routed_experts", "num_experts"),
          "moe_k": ("moe_num_experts",), "top_k_experts": ("num_experts",), "topk_group": ("n_group", "num_expert_group")}
"""Keys of how many are chosen → the keys, one of which says of how many."""

GROUPS = ("n_group", "num_expert_group")

OFF = {"doge": ("sliding_window",), "minimax": ("sliding_window",), "nemotron_h": ("sliding_window",),
       "zaya": ("sliding_window",), "axk2": ("topk_group", "n_group"), "gemma4_unified_text": ("num_experts", "top_k_experts")}
"""What families have a key for and no code of their own, or another feature that says the same."""


def configurations():
    """The configuration of every class, as ``every_class`` builds it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    kinds = (CONFIG_MAPPING[model_type] for model_type, name in names.items() if str(name).endswith("ForCausalLM"))
    texts = {getattr(kind, "sub_configs", {}).get("text_config", kind) for kind in kinds}
    for kind in sorted((kind for kind in texts if hasattr(kind, "model_type")), key=lambda kind: kind.model_type):
        yield kind.model_type, kind(**tiny(kind)).to_dict()


def test_windows_chunks_and_choices_are_within_the_tested_length():
    """Each limit that a class has is reached by the tested tokens, each choice leaves something out, and where a router
    has groups there are several."""
    found, seen = [], set()
    for model_type, keys in configurations():
        keys = {key: value for key, value in keys.items() if key not in OFF.get(model_type, ())}
        for key in REACHED:
            values = keys[key].values() if isinstance(keys.get(key), dict) else [keys[key]] if key in keys else []
            seen |= {key} if values else set()
            found += [f"{model_type}: {key} is {value}" for value in values if not (value and 0 < value < LENGTH)]
        for key, names in CHOSEN.items():
            number, of = keys.get(key), next((keys[name] for name in names if keys.get(name)), None)
            if of is not None and key in keys:
                seen.add(key)
                found += [f"{model_type}: {key} is {number} of {of}"] if not (number and number < of) else []
        found += [f"{model_type}: {key} is {keys[key]}" for key in GROUPS if key in keys and not (keys[key] or 0) >= 2]
    assert not found, "\n".join(found)
    assert not {*REACHED, *CHOSEN} - seen, "keys that no class has any more"


SAMPLE = ("BloomForCausalLM", "Gemma3nForCausalLM", "Mamba2ForCausalLM", "RobertaForCausalLM")
"""One class of each kind of state, or of position, that the families of ``families`` don't have."""


@pytest.mark.parametrize("name", SAMPLE)
def test_a_class_gives_its_own_forward(name):
    found = every_class.check(name, seeds=1)
    assert (found.status, found.said) == ("matched", "")
    assert found.counted > 0.9
