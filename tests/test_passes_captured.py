"""The passes on what capture makes of the authors' modules."""

from __future__ import annotations

import numpy as np
import pytest
from arena import Arena
from captured import VOCABULARY, logits
from fake_codegen import FakeCodegen
from test_passes_pipeline import layer
from tiny_models import GEMMA3, LLAMA

from adaptc.options import CompileOptions
from adaptc.passes.pipeline import lower_to

OPTIONS = CompileOptions(max_step_tokens=16, max_requests=4, max_context=2048)

FAMILIES = {
    "llama": (LLAMA, {"rms_norm": 1, "add_rms_norm": 1}, 10),
    "gemma3_text": (GEMMA3, {"rms_norm": 5, "add_rms_norm": 1}, 14),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_models_lower_to_few_operators_and_mean_the_same(family):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from adaptc.capture.pipeline import capture_module

    torch.set_num_threads(1)
    config, norms, operators = FAMILIES[family]
    config = AutoConfig.for_model(family, **(config | {"vocab_size": VOCABULARY}))
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config).float().eval()
    program = capture_module(module, config)
    tensors = dict(module.named_parameters())
    weights = {n: tensors[w.tensor].detach().numpy() for n, w in program.weights().items()}
    stages = lower_to(program, "lowered", OPTIONS, FakeCodegen()).programs
    wanted = logits(program, weights)
    np.testing.assert_allclose(logits(stages["fused"], weights), wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits(stages["lowered"], weights, machine=Arena), wanted, rtol=0, atol=1e-5)
    found = layer(stages["fused"])
    assert {name: found[name] for name in norms} == norms and sum(found.values()) == operators, found
