"""Hugging Face folders and hub ids: weights bound bit for bit, hostile and incomplete folders refused by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import families
import numpy as np
import pytest
import tiny_gguf
import torch
from safetensors.torch import load_file, save_file

from adaptc import blocks
from adaptc.errors import AdaptcError, InputError, UnsupportedError
from adaptc.report import compile_text
from adaptc.sources import Binding, open_source

torch.set_num_threads(1)

COMMON = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              vocab_size=80, max_position_embeddings=64, head_dim=16)
INDEX = "model.safetensors.index.json"


def tiny_module(kind: str, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**COMMON, **changes}))


@pytest.fixture
def folder(tmp_path):
    """A tiny llama, untied, one file in float32."""
    tiny_module("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(path, **changes):
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [False, True])
def test_every_parameter_has_the_stored_bits(tmp_path, kind, dtype, shards):
    module = tiny_module(kind).to(dtype)
    module.save_pretrained(tmp_path, max_shard_size="20KB" if shards else "1GB")
    assert (tmp_path / INDEX).exists() is shards
    source = open_source(tmp_path)
    parameters, tied = tiny_gguf.parameters(module)
    bindings = source.bind(parameters, tied)
    assert set(bindings) == set(parameters)
    assert {binding.tensor for binding in bindings.values()} == set(source.tensors)
    for name, value in module.named_parameters(remove_duplicate=False):
        format, codes = source.load(bindings[name])
        np.testing.assert_array_equal(blocks.dequantize(format, codes), value.detach().float().numpy(), name)
    stored = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    assert source.tensors["model.layers.0.mlp.up_proj.weight"].format.name == stored
    assert source.tensors["model.norm.weight"].format.name == "f32"
    assert source.kind == "huggingface" and source.name == tmp_path.name
    assert list(source.hashes) == sorted(source.hashes) and "config.json" in source.hashes
    assert source.hashes == open_source(tmp_path).hashes


def test_a_stored_head_that_equals_its_tied_table_is_accounted_for(tmp_path):
    module = tiny_module("llama", tie_word_embeddings=True)
    module.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    bindings = open_source(tmp_path).bind(*tiny_gguf.parameters(module))
    assert bindings["lm_head.weight"] == Binding("model.embed_tokens.weight")

    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    bindings = open_source(tmp_path).bind(*tiny_gguf.parameters(module))
    assert bindings["model.embed_tokens.weight"] == Binding("lm_head.weight")

    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="ties 'lm_head.weight' to 'model.embed_tokens.weight'.* differ"):
        open_source(tmp_path).bind(*tiny_gguf.parameters(module))


def test_missing_extra_misshapen_and_waived_tensors(folder):
    parameters, tied = tiny_gguf.parameters(tiny_module("llama"))
    path = folder / "model.safetensors"
    tensors = load_file(path)

    def bind(**changes):
        changed = {name: value for name, value in {**tensors, **changes}.items() if value is not None}
        save_file(changed, path, {"format": "pt"})
        return open_source(folder).bind(parameters, tied)

    with pytest.raises(InputError, match="no tensor for 'model.norm.weight'"):
        bind(**{"model.norm.weight": None})
    with pytest.raises(InputError, match="no use for 'model.layers.0.self_attn.q_proj.bias'"):
        bind(**{"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(InputError, match=r"'model.norm.weight' has the shape \(64,\), but .* has \(65,\)"):
        bind(**{"model.norm.weight": torch.zeros(65)})
    with pytest.raises(InputError, match=r"\(1\) .*no tensor for 'model.layers.0.input_layernorm.weight'.*\(2\) .*has the "
                                         r"shape .*; .* has the shape .*\(3\) .*no use for 'y', which"):
        bind(**{"model.layers.0.input_layernorm.weight": None, "model.norm.weight": torch.zeros(65),
                "model.embed_tokens.weight": torch.zeros(3, 3), "y": torch.zeros(2)})
    with pytest.raises(UnsupportedError, match="'x' in model.safetensors is stored as I16"):
        bind(x=torch.zeros(3, dtype=torch.int16))
    with pytest.raises(UnsupportedError, match="'x' in model.safetensors holds whole numbers beyond 16777216"):
        bind(x=torch.tensor([1, -(2**24) - 1]))
    assert set(bind(**{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})) == set(parameters)
    assert set(bind(**{"model.rotary_emb.inv_freq": torch.zeros(8, dtype=torch.float64)})) == set(parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_is_reported_by_tensor_name(folder, dtype):
    tensors = {name: value.to(dtype) for name, value in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    source = open_source(folder)
    with pytest.raises(InputError, match="'model.layers.1.mlp.up_proj.weight' in model.safetensors contains NaN"):
        source.load(Binding("model.layers.1.mlp.up_proj.weight"))


def test_truncated_and_flipped_safetensors_are_one_clear_error(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little") + 8
    rng = np.random.default_rng(3)
    for cut in [*rng.integers(0, len(whole), 100), 0, 1, 7, 8, 9, len(whole) - 1]:
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match="model.safetensors.*(damaged or incomplete|is empty)"):
            open_source(folder)
    for _ in range(200):
        data = bytearray(whole)
        data[rng.integers(0, header)] = rng.integers(256)
        path.write_bytes(data)
        try:
            open_source(folder)
        except AdaptcError as error:
            assert len(str(error)) > 20


def test_incomplete_and_hostile_indices(tmp_path):
    module = tiny_module("llama")
    module.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / INDEX).read_text())
    name, shard = min(index["weight_map"].items())
    (tmp_path / shard).rename(tmp_path / "away")
    with pytest.raises(InputError, match=f"lacks the file {shard}, which holds '{name}'"):
        open_source(tmp_path)
    (tmp_path / "away").rename(tmp_path / shard)

    for hostile in ("../model.safetensors", "/etc/passwd", "sub/x.safetensors", "config.json", 3):
        edit(tmp_path / INDEX, weight_map={**index["weight_map"], name: hostile})
        with pytest.raises(InputError, match=f"places the tensor '{name}' in .*expected the name of a .safetensors"):
            open_source(tmp_path)
    edit(tmp_path / INDEX, weight_map={**index["weight_map"], "new.weight": shard})
    with pytest.raises(InputError, match=f"{shard} of .* lacks the tensor 'new.weight'"):
        open_source(tmp_path)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(InputError, match=f"{INDEX} is not valid JSON"):
        open_source(tmp_path)


@pytest.mark.parametrize("changes, error, message", [
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, UnsupportedError, "method 'gptq' .*GGUF"),
    ({"model_type": "llamb"}, UnsupportedError, "model_type 'llamb', which the installed transformers doesn't have"),
    ({"model_type": None}, InputError, "doesn't say its model_type"),
    ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedError, "method 'fp8'"),
    ({"hidden_size": "wide"}, InputError, "no valid configuration"),
])
def test_configurations_that_are_refused(folder, changes, error, message):
    edit(folder / "config.json", **changes)
    with pytest.raises(error, match=message):
        open_source(folder).config


def test_folders_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="neither model.safetensors nor model.safetensors.index.json"):
        open_source(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedError, match="weights in pytorch_model.bin.*reads safetensors"):
        open_source(folder)


OPEN = """
import sys
from adaptc.errors import InputError
from adaptc.sources import open_source
try:
    source = open_source(sys.argv[1])
    print(source.name, len(source.tensors), *source.hashes)
except InputError as error:
    print("InputError:", error)
"""


def open_in_process(model: str, **environment) -> str:
    """What opening ``model`` prints in a process of its own: the hub's client reads its environment when imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-c", OPEN, model]
    run = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_hub_ids_come_from_the_local_cache(folder, tmp_path):
    repository = tmp_path / "home/hub/models--org--tiny"
    shutil.copytree(folder, repository / "snapshots/0123456789012345678901234567890123456789")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123456789012345678901234567890123456789")
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    printed = open_in_process("org/tiny", **environment)
    assert printed == "org/tiny 21 config.json generation_config.json model.safetensors"
    printed = open_in_process("org/other", **environment)
    assert printed.startswith("InputError: org/other is not in the local cache") and "HF_HUB_OFFLINE" in printed


def test_a_hub_that_cannot_be_reached(tmp_path):
    environment = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    printed = open_in_process("org/tiny", **environment)
    assert "the hub can't be reached" in printed and "pass the folder" in printed


def test_tensors_that_the_class_leaves_out_are_named_with_its_reason(tmp_path):
    """DeepSeek-V3's checkpoints hold a layer that guesses further tokens, in a place that its class lists."""
    folder = families.write(tmp_path / "model", "deepseek_v3")
    tensors = load_file(folder / "model.safetensors")
    extra = {name.replace(".layers.2.", ".layers.61."): value.clone() for name, value in tensors.items()
             if ".layers.2." in name}
    save_file(tensors | extra, folder / "model.safetensors")
    report = families.compile_family(folder, tmp_path / "a.adapt")
    (note,) = report.left_out
    assert re.fullmatch(r"'model\.layers\.61\..*' and \d+ more: the model's class leaves out what matches "
                        r"'model\\\\\.layers\\\\\.61\.\*'\.", note), note
    assert f"Tensors left out\n  {note}" in compile_text(report)
    save_file(tensors | {"model.layers.62.enorm.weight": torch.zeros(64)}, folder / "model.safetensors")
    with pytest.raises(InputError, match="no use for 'model.layers.62.enorm.weight'"):
        families.compile_family(folder, tmp_path / "b.adapt")
