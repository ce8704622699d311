"""GGUF files: read, bound and accounted for as transformers does it, and every damage is one clear error."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import tiny_gguf
import torch

from adaptc import blocks
from adaptc.errors import AdaptcError, InputError, UnsupportedError
from adaptc.models.gguf import llama3_scaling, rope_frequency_factors
from adaptc.sources import Binding, open_source

torch.set_num_threads(1)


def meta_module(config):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def bound(source):
    return source.bind(*tiny_gguf.parameters(meta_module(source.config)))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("output", [False, True])
def test_every_parameter_has_the_bits_transformers_loads(tmp_path, architecture, output):
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    rng = np.random.default_rng(7)
    head = rng.normal(0, 0.05, (tiny_gguf.VOCABULARY, tiny_gguf.HIDDEN)).astype(np.float32)
    path = tiny_gguf.write(tmp_path / "m.gguf", architecture, tensors={"output.weight": head} if output else {})
    source = open_source(path)
    module = meta_module(source.config)
    parameters, tied = tiny_gguf.parameters(module)
    bindings = source.bind(parameters, tied)
    reference = load_gguf_checkpoint(path, return_tensors=True, model_to_load=module)
    assert set(bindings) == set(parameters) and set(tied) == (set() if output else {"lm_head.weight"})
    for name, binding in bindings.items():
        format, codes = source.load(binding)
        expected = reference["tensors"][tied.get(name, name)].numpy()
        np.testing.assert_array_equal(blocks.dequantize(format, codes).view(np.uint32), expected.view(np.uint32), name)
    assert {binding.tensor for binding in bindings.values()} == set(source.tensors)
    config = AutoConfig.for_model(**reference["config"])
    ours, theirs = source.config.to_dict(), config.to_dict()
    derived = {"query_pre_attn_scalar": tiny_gguf.HEAD} if architecture == "gemma3" else {}
    assert ours == {**theirs, **derived}


def test_matrices_keep_their_formats_and_vectors_are_f32(tmp_path):
    source = open_source(tiny_gguf.write(tmp_path / "m.gguf"))
    stored = {tensor.format.name for tensor in source.tensors.values() if len(tensor.shape) == 2}
    assert stored == set(tiny_gguf.CYCLE)
    assert all(tensor.format.name == "f32" for tensor in source.tensors.values() if len(tensor.shape) == 1)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    for tensor in reader.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(source.tensors[tensor.name].values(), expected)
        assert source.tensors[tensor.name].shape == expected.shape


def test_bindings_of_the_real_llama(smollm2_gguf):
    source = open_source(smollm2_gguf)
    bindings = bound(source)
    assert len(source.tensors) == 272 and len(bindings) == 273
    assert {binding.tensor for binding in bindings.values()} == set(source.tensors)
    assert bindings["lm_head.weight"] == bindings["model.embed_tokens.weight"] == Binding("token_embd.weight")
    assert bindings["model.layers.29.self_attn.q_proj.weight"] == Binding("blk.29.attn_q.weight", ("rope_halves", 9))
    assert bindings["model.layers.0.self_attn.k_proj.weight"] == Binding("blk.0.attn_k.weight", ("rope_halves", 3))
    assert source.config.head_dim == 64 and source.config.rope_parameters["rope_theta"] == 100000
    assert source.hashes == {
        smollm2_gguf.name: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    }


def test_bindings_of_the_real_gemma3(gemma3_gguf):
    source = open_source(gemma3_gguf)
    bindings = bound(source)
    assert len(source.tensors) == 236 and len(bindings) == 237
    assert {binding.tensor for binding in bindings.values()} == set(source.tensors)
    assert {binding.add for name, binding in bindings.items() if "norm" in name} == {-1.0}
    assert {binding.add for name, binding in bindings.items() if "norm" not in name} == {0.0}
    assert bindings["model.layers.3.pre_feedforward_layernorm.weight"].tensor == "blk.3.ffn_norm.weight"
    assert source.config.layer_types.count("full_attention") == 3 and source.config.sliding_window == 512
    assert source.config.query_pre_attn_scalar == 256
    formats = [tensor.format.name for tensor in source.tensors.values() if len(tensor.shape) == 2]
    assert {name: formats.count(name) for name in set(formats)} == {"q5_0": 81, "q4_k": 27, "q6_k": 9, "q8_0": 10}


def test_files_that_are_no_models(tmp_path):
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "folder").mkdir()
    for name, message in [
        ("empty.gguf", "it is empty"), ("text.gguf", "starts with b'hell'"), ("folder", "no config.json"),
        ("nowhere.gguf", "no model at"), ("nowhere/nothing/here", "no model at"),
    ]:
        with pytest.raises(InputError, match=message) as caught:
            open_source(tmp_path / name)
        assert "A model is a GGUF file, a folder with config.json" in str(caught.value), name


@pytest.mark.parametrize("model", ["", None, 3])
def test_what_names_no_model(model):
    with pytest.raises(InputError, match="names no model"):
        open_source(model)


def test_a_folder_of_gguf_files_names_them(tmp_path):
    tiny_gguf.write(tmp_path / "m.gguf")
    with pytest.raises(InputError, match=r"Name one of its files: m\.gguf"):
        open_source(tmp_path)


@pytest.mark.parametrize("version, message", [(b"\1\0\0\0", "of version 1"), (b"\0\0\0\3", "big-endian")])
def test_other_versions_are_refused(tmp_path, version, message):
    path = tiny_gguf.write(tmp_path / "m.gguf")
    data = path.read_bytes()
    path.write_bytes(data[:4] + version + data[8:])
    with pytest.raises(UnsupportedError, match=message):
        open_source(path)


def test_an_unknown_architecture_lists_the_supported_ones(tmp_path):
    with pytest.raises(UnsupportedError, match="architecture 'falcon'; adaptc reads llama, .*gemma3"):
        open_source(tiny_gguf.write(tmp_path / "m.gguf", named="falcon"))


@pytest.mark.parametrize("kind", ["Q2_K", "IQ4_NL", "TQ1_0", "F64"])
def test_unsupported_types_name_tensor_and_format(tmp_path, kind):
    path = tmp_path / "m.gguf"
    qtype = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 256 // block * size), np.uint8), raw_dtype=qtype)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    message = rf"'token_embd.weight' in m.gguf is stored as {kind}.*reads f32, .*q6_k"
    with pytest.raises(UnsupportedError, match=message):
        open_source(path)


def test_metadata_that_nothing_reads_are_an_error(tmp_path):
    source = open_source(tiny_gguf.write(tmp_path / "m.gguf", metadata={"attention.scale_everything": 3.0},
                                         raw_metadata={"general.author": "me", "other.key": 1}))
    with pytest.raises(InputError, match=r"metadata keys of m.gguf mean: llama.attention.scale_everything, other.key"):
        source.config


@pytest.mark.parametrize("changes, message", [
    ({"block_count": 3}, "llama.block_count is 3, and the tensors have 2"),
    ({"block_count": 4000000000}, "llama.block_count is 4000000000"),
    ({"embedding_length": 128}, "llama.embedding_length is 128, and the tensors have 256"),
    ({"attention.head_count": 0}, "llama.attention.head_count is 0"),
    ({"attention.head_count": None}, "wrong type or is missing .*attention.head_count"),
    ({"attention.head_count": "four"}, "wrong type or is missing"),
    ({"rope.freq_base": float("nan")}, "llama.rope.freq_base is nan"),
    ({"attention.head_count_kv": 3}, "no multiple"),
])
def test_metadata_that_contradict_the_tensors(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        open_source(tiny_gguf.write(tmp_path / "m.gguf", metadata=changes)).config


def test_values_that_must_agree(tmp_path):
    source = open_source(tiny_gguf.write(tmp_path / "m.gguf", "gemma3", metadata={"attention.value_length": 32}))
    with pytest.raises(UnsupportedError, match="attention.value_length = 32 and gemma3.attention.key_length = 64"):
        source.config


def test_a_part_of_a_split_model_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="one of 3 parts"):
        open_source(tiny_gguf.write(tmp_path / "m.gguf", raw_metadata={"split.count": 3}))


def test_missing_extra_and_misshapen_tensors(tmp_path):
    def failing(**tensors):
        return open_source(tiny_gguf.write(tmp_path / "m.gguf", tensors=tensors["tensors"]))

    with pytest.raises(InputError, match=r"no tensor for 'model.layers.1.mlp.down_proj.weight'"):
        bound(failing(tensors={"blk.1.ffn_down.weight": None}))
    with pytest.raises(InputError, match=r"no use for 'blk.0.attn_q.bias'"):
        bound(failing(tensors={"blk.0.attn_q.bias": np.zeros(256, np.float32)}))
    with pytest.raises(InputError, match=r"'model.layers.0.mlp.up_proj.weight' has .*\(512, 256\).*\(300, 256\)"):
        bound(failing(tensors={"blk.0.ffn_up.weight": np.zeros((300, 256), np.float32)}))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_name_the_tensor(tmp_path, bad):
    values = np.zeros((512, 256), np.float32)
    values[5, 5] = bad
    source = open_source(tiny_gguf.write(tmp_path / "m.gguf", tensors={"blk.0.ffn_up.weight": values}))
    with pytest.raises(InputError, match="'blk.0.ffn_up.weight' in m.gguf contains NaN or infinity"):
        source.load(bound(source)["model.layers.0.mlp.up_proj.weight"])
    with pytest.raises(InputError, match="blk.0.ffn_up.weight"):
        source.check_finite("blk.0.ffn_up.weight")
    source.check_finite("blk.0.ffn_gate.weight")


def test_rotary_factors_become_llama3_scaling(tmp_path):
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    factors = np.array(rope_frequency_factors(rope, 500000.0, 64), np.float32)
    assert factors.min() == 1 and factors.max() == 8
    path = tiny_gguf.write(tmp_path / "m.gguf", metadata={"rope.freq_base": 500000.0},
                           tensors={"rope_freqs.weight": factors})
    source = open_source(path)
    got = source.config.rope_parameters
    assert got == {**rope, "rope_type": "llama3", "rope_theta": 500000.0}
    bound(source)
    # transformers' own rule divides the frequencies by the same factors.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](source.config, "cpu")
    plain = 500000.0 ** (-torch.arange(0, 64, 2) / 64)
    np.testing.assert_allclose((plain / scaled).numpy(), factors, rtol=1e-4)


def test_rotary_factors_beside_another_scaling_are_refused(tmp_path):
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    factors = np.array(rope_frequency_factors(rope, 5000.0, 64), np.float32)
    path = tiny_gguf.write(tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors},
                           metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})
    with pytest.raises(UnsupportedError, match="twice: by rope_freqs.weight and by the rule 'linear'"):
        open_source(path).config


def test_rotary_factors_of_no_known_rule_are_refused(tmp_path):
    assert llama3_scaling([1.0] * 32, 10000.0) == {}
    path = tiny_gguf.write(tmp_path / "m.gguf", tensors={"rope_freqs.weight": np.linspace(1, 7, 32, dtype=np.float32)})
    with pytest.raises(UnsupportedError, match="rope_freqs.weight of m.gguf follow no rule"):
        open_source(path).config


def test_rope_scaling_in_metadata(tmp_path):
    path = tiny_gguf.write(tmp_path / "m.gguf", "gemma3",
                           metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    rope = open_source(path).config.rope_parameters
    assert rope["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}
    path = tiny_gguf.write(tmp_path / "n.gguf", metadata={"rope.scaling.type": "magic"})
    with pytest.raises(UnsupportedError, match="rule 'magic'; adaptc reads none, linear, yarn"):
        open_source(path).config


def opened_completely(path) -> None:
    source = open_source(path)
    bound(source)
    source.text()
    for tensor in source.tensors.values():
        tensor.values()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """A tiny model with a tokenizer."""
    tokens = ["<unk>", "<s>", "</s>", *map(chr, range(97, 123)), "ab", "cd", *(f"[{i}]" for i in range(33))]
    path = tiny_gguf.write(tmp_path_factory.mktemp("fuzz") / "m.gguf", formats=("q4_k", "q8_0"), raw_metadata={
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b", "c d"], "tokenizer.ggml.token_type": [3] * 3 + [1] * 61,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    })
    opened_completely(path)
    return path.read_bytes()


def header_size(data: bytes, path) -> int:
    path.write_bytes(data)
    return gguf.GGUFReader(path).data_offset


def test_truncated_files_are_one_clear_error(whole, tmp_path):
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(11)
    end = header_size(whole, path)
    for cut in [*rng.integers(0, end, 150), *rng.integers(end, len(whole) - 64, 50), 0, 3, 4, 8, 16, 24]:
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match=r"damaged or incomplete|is no model"):
            open_source(path)


def test_damage_in_header_and_metadata_never_escapes_as_another_error(whole, tmp_path):
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(12)
    end = header_size(whole, path)
    failed = 0
    for i in range(250):
        data = bytearray(whole)
        for at in rng.integers(0, end, 1 + i % 3):
            data[at] = rng.choice([0, 0x7F, 0xFF, data[at] ^ (1 << rng.integers(8)), rng.integers(256)])
        path.write_bytes(data)
        try:
            opened_completely(path)
        except AdaptcError as error:
            assert len(str(error)) > 20
            failed += 1
    assert failed > 100
