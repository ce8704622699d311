"""Capture of models in files, of bindings, and of modules that are called more than once."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from adaptc import blocks
from adaptc.backends.reference.interpreter import Reference
from adaptc.capture import capture, capture_module
from adaptc.capture.walk import Stored
from adaptc.errors import InputError
from adaptc.ir.build import short_name
from adaptc.sources import open_source
from adaptc.weights import parameter

torch.set_num_threads(1)

SMALL = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
             max_position_embeddings=64, num_hidden_layers=2, initializer_range=0.2)
TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4])


def llama(**changes) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL | changes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def logits(module) -> np.ndarray:
    with torch.no_grad():
        return module(torch.tensor(TOKENS)[None], use_cache=False).logits[0].numpy()


def close(got: np.ndarray, want: np.ndarray) -> None:
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_gguf_file_gives_its_own_models_logits(tmp_path, architecture):
    source = open_source(tiny_gguf.write(tmp_path / "m.gguf", architecture))
    program = capture(source)
    module = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32, attn_implementation="eager").eval()
    shapes, tied = tiny_gguf.parameters(module)
    values = {}
    for name, binding in source.bind(shapes, tied).items():
        values[name] = torch.tensor(blocks.dequantize(*source.load(binding)).reshape(shapes[name]))
    module.load_state_dict(values, strict=True)
    declared = program.weights()
    close(Reference(program, lambda name: parameter(source, declared[name])).score(TOKENS, 7), logits(module))
    query = declared["model.layers.0.self_attn.q_proj.weight"]
    assert query.tensor == "blk.0.attn_q.weight"
    assert query.rows == (("rope_halves", tiny_gguf.HEADS) if architecture == "llama" else ())
    assert query.stored == source.tensors["blk.0.attn_q.weight"].format.name
    assert "lm_head.weight" not in declared


def test_a_folder_gives_its_own_models_logits(tmp_path):
    module = llama()
    module.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    program = capture(source)
    declared = program.weights()
    close(Reference(program, lambda name: parameter(source, declared[name])).score(TOKENS), logits(module))


def test_a_key_of_the_configuration_that_no_code_reads_is_an_error(tmp_path):
    llama().save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"vocab_size"', '"clever_feature": 3, "vocab_size"'))
    with pytest.raises(InputError, match="clever_feature"):
        capture(open_source(tmp_path))


def test_what_a_file_leaves_out_of_a_parameter_is_an_explicit_add():
    module = llama()
    norm = "model.norm.weight"

    def bind(shapes, tied):
        rows = {n: ("rope_halves", 2) if "q_proj" in n else () for n in shapes}
        return {n: Stored(n, f"file.{n}", rows[n], -1.0 if n == norm else 0.0, "f16") for n in shapes}

    program = capture_module(module, module.config, bind)
    weight = program.weights()["model.layers.1.self_attn.q_proj.weight"]
    assert (weight.tensor, weight.rows, weight.stored) == (
        "file.model.layers.1.self_attn.q_proj.weight", ("rope_halves", 2), "f16")
    parameters = {n: p.detach().numpy() + (n == norm) for n, p in module.named_parameters()}
    close(Reference(program, parameters.__getitem__).score(TOKENS), logits(module))
    plain = capture_module(module, module.config)
    adds = [sum(short_name(op) == "add" for _, op in p.operators()) for p in (program, plain)]
    assert adds[0] == adds[1] + 1


def test_persistent_buffers_come_from_the_files_and_others_from_their_constructors():
    module = llama()
    inner = module.lm_head

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner
            self.register_buffer("kept", torch.full((32,), 2.0))
            self.register_buffer("made", torch.full((32,), 3.0), persistent=False)

        def forward(self, x):
            return self.inner(x * self.kept + self.made)

    module.lm_head = Scaled()
    program = capture_module(module, module.config)
    assert "lm_head.kept" in program.weights() and "lm_head.made" not in program.weights()
    values = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    close(Reference(program, values.__getitem__).score(TOKENS), logits(module))


def test_a_layer_called_twice_has_two_states_and_one_body():
    module = llama(num_hidden_layers=1)
    layer = module.model.layers[0]
    module.model.layers = torch.nn.ModuleList([layer, layer, layer])
    module.config.num_hidden_layers = 3
    program = capture_module(module, module.config)
    assert len(program.states()) == 3 and len(program.calls("body0")) == 3
    values = {name: value.detach().numpy() for name, value in module.named_parameters()}
    close(Reference(program, values.__getitem__).score(TOKENS, 3), logits(module))


def test_building_touches_no_parameter_and_computes_every_buffer(smollm2_gguf):
    from adaptc.capture.build import build

    module = build(open_source(smollm2_gguf).config)
    assert all(p.is_meta for p in module.parameters()) and not any(b.is_meta for b in module.buffers())
    assert module.lm_head.weight is module.model.embed_tokens.weight
    inverse = 1.0 / 100000.0 ** (np.arange(0, 64, 2) / 64)
    assert np.allclose(module.model.rotary_emb.inv_freq.numpy(), inverse, rtol=1e-6)


def test_tokens_are_equivariant_and_alone_is_packed():
    """What the locality gate promises: every token its own request, in any order, bit for bit."""
    module = llama()
    program = capture_module(module, module.config, folded=False)
    values = {name: value.detach().numpy() for name, value in module.named_parameters()}
    order = np.random.default_rng(0).permutation(len(TOKENS))
    every, zeros = np.arange(len(TOKENS)), np.zeros(len(TOKENS))
    straight = Reference(program, values.__getitem__).step(TOKENS, zeros, every, every)
    permuted = Reference(program, values.__getitem__).step(TOKENS[order], zeros, every[order], every)
    alone = Reference(program, values.__getitem__).step(TOKENS[4:5], [0], [4], [0])
    assert np.array_equal(permuted, straight[order])
    assert np.allclose(alone[0], straight[4], rtol=0, atol=1e-6 * np.abs(straight).max())


PRINT = """
import hashlib, sys
from adaptc.capture import capture
from adaptc.sources import open_source
print(hashlib.sha256(capture(open_source(sys.argv[1])).text().encode()).hexdigest())
"""


def test_every_process_captures_the_same_text(tmp_path):
    """Gemma's forward loops over a set of strings, whose order Python draws for each process."""
    path = tiny_gguf.write(tmp_path / "m.gguf", "gemma3", metadata={"attention.sliding_window_pattern": 2})
    hashes = {
        subprocess.run([sys.executable, "-c", PRINT, str(path)], capture_output=True, text=True, check=True,
                       env={**os.environ, "PYTHONHASHSEED": seed, "ADAPTC_CACHE": "off"}).stdout
        for seed in ("0", "1")
    }
    assert len(hashes) == 1


def test_tensors_made_while_tracing_are_constants():
    module = llama()
    module.lm_head = torch.nn.Sequential(Shifted(), module.lm_head)
    values = {name: value.detach().numpy() for name, value in module.named_parameters()}
    close(Reference(capture_module(module, module.config), values.__getitem__).score(TOKENS), logits(module))


class Shifted(torch.nn.Module):
    def forward(self, x):
        shift = torch.tensor([0.5, -0.25] * 16) + torch.arange(32) * 0.1 + torch.full((32,), 0.5)
        wide = torch.ones(1, x.shape[1], 1) * 0.5
        a, b = (x + shift).chunk(2, -1)
        return torch.where(x > 0, torch.cat([b, a], -1), x.clamp(-1, 1)) * wide + torch.nn.functional.softplus(x)
