"""Captured programs against the authors' own modules: no cache, no position_ids, float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from adaptc.backends.reference.interpreter import Reference
from adaptc.capture import capture_module
from adaptc.ir import legality
from adaptc.ir.module import Program, callee

torch.set_num_threads(1)

SMALL = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
             max_position_embeddings=64, initializer_range=0.2, num_hidden_layers=3)
MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA = SMALL | dict(num_hidden_layers=5, head_dim=16, num_key_value_heads=1, layer_types=MIXED, sliding_window=8,
                     query_pre_attn_scalar=24)

CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "llama_tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama_biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama_rope_scaled": LlamaConfig(**SMALL, rope_parameters={
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}),
    "gemma3": Gemma3TextConfig(**GEMMA),
    "gemma3_softcap": Gemma3TextConfig(**GEMMA, final_logit_softcapping=5.0),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "mistral": MistralConfig(**SMALL, sliding_window=5),
}
BODIES = {"gemma3": 2, "gemma3_softcap": 2}
"""Distinct bodies where they aren't one."""


def build(config) -> torch.nn.Module:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def weights(module):
    parameters = dict(module.named_parameters())
    return lambda name: parameters[name].detach().numpy()


def logits(module, tokens) -> np.ndarray:
    with torch.no_grad():
        return module(torch.tensor(np.asarray(tokens))[None], use_cache=False).logits[0].numpy()


def tokens_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SMALL["vocab_size"], count)


def close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


@pytest.fixture(scope="module", params=CONFIGS)
def captured(request):
    module = build(CONFIGS[request.param])
    return request.param, module, capture_module(module, module.config)


def test_one_shot_is_the_authors_forward_for_every_length(captured):
    _, module, program = captured
    for count in (1, 2, 7, 8, 9, 13, 20):
        tokens = tokens_of(count, count)
        close(Reference(program, weights(module)).score(tokens), logits(module, tokens))


@pytest.mark.parametrize("chunk", [1, 5])
def test_chunked_is_the_authors_forward(captured, chunk):
    _, module, program = captured
    close(Reference(program, weights(module)).score(tokens_of(20), chunk), logits(module, tokens_of(20)))


def test_several_requests_in_one_step(captured):
    _, module, program = captured
    one, two = tokens_of(11, 1), tokens_of(6, 2)
    reference = Reference(program, weights(module))
    reference.step(one[:7], np.arange(7), np.zeros(7), [6])
    mixed = np.concatenate([two, one[7:]])
    positions = np.concatenate([np.arange(6), np.arange(7, 11)])
    requests = np.array([1] * 6 + [0] * 4)
    got = reference.step(mixed, positions, requests, [9, 5, 0])
    close(got, np.stack([logits(module, one)[10], logits(module, two)[5], logits(module, two)[0]]))


def test_folded_has_a_body_a_kind_and_a_call_a_layer(captured):
    name, module, program = captured
    bodies = [f for f in program.functions() if f != "step"]
    assert len(bodies) == BODIES.get(name, 1)
    calls = program.calls()
    assert [c.operation.attributes["source"].value for c in calls] == [
        f"model.layers.{i}" for i in range(module.config.num_hidden_layers)
    ]
    if name == "gemma3":
        assert [callee(c) for c in calls] == ["body0", "body0", "body1", "body0", "body1"]
    for body in bodies:
        for op in program.functions()[body].entry_block.operations:
            if "source" in op.operation.attributes:
                assert not op.operation.attributes["source"].value.startswith("model.")


def test_unfolded_gives_the_same_bits(captured):
    _, module, program = captured
    flat = capture_module(module, module.config, folded=False)
    assert not flat.calls()
    tokens = tokens_of(9)
    unfolded, folded = (Reference(p, weights(module)).score(tokens) for p in (flat, program))
    assert np.array_equal(unfolded, folded)


def test_text_parses_back_and_capture_is_deterministic(captured):
    _, module, program = captured
    again = Program.parse(program.text())
    assert again.text() == program.text()
    legality.check(again)
    assert capture_module(module, module.config).text() == program.text()


def test_declarations_and_facts(captured):
    name, module, program = captured
    assert (program.stage, program.fact("vocabulary"), program.fact("context")) == ("captured", 50, 64)
    assert set(program.weights()) == {n for n, _ in module.named_parameters()}
    assert all(w.spec.format is None and w.tensor == n for n, w in program.weights().items())
    assert list(program.states()) == [f"model.layers.{i}.self_attn.kv" for i in range(module.config.num_hidden_layers)]
    windows = [s.spec.window for s in program.states().values()]
    if name == "gemma3":
        assert windows == [8, 8, 0, 8, 0]
        assert program.states()["model.layers.2.self_attn.kv"].spec.parts == (("k", 1, 16), ("v", 1, 16))
    if name == "mistral":
        assert windows == [5, 5, 5]


def test_the_module_is_left_as_it_was(captured):
    _, module, _ = captured
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama import modeling_llama

    assert module.config._attn_implementation == "eager"
    assert "adaptc" not in ALL_ATTENTION_FUNCTIONS
    assert modeling_llama.create_causal_mask is masking_utils.create_causal_mask
    assert masking_utils.create_causal_mask.__module__ == "transformers.masking_utils"
    assert not any(buffer.is_meta for buffer in module.buffers())
