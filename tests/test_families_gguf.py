"""GGUF files of several families, written as llama.cpp's converter does it with the gguf package.

What they must give is what transformers' own reader makes of the file (``gguf_file=``); of files that this reader can't
read, what the model gives that was converted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import families
import gguf
import numpy as np
import pytest
import tiny_gguf

from adaptc import artifact_format, driver
from adaptc.errors import InputError, UnsupportedError
from adaptc.golden import authors_model
from adaptc.ir.module import Program
from adaptc.sources import open_source
from adaptc.verify import verify

pytestmark = pytest.mark.usefixtures("kept_captures")

Tensors = Iterator[tuple[str, np.ndarray]]


def as_it_is(name: str, value: np.ndarray) -> Tensors:
    yield name, value


def plus_one(name: str, value: np.ndarray) -> Tensors:
    yield name, value + ("norm" in name)


def conv1d(name: str, value: np.ndarray) -> Tensors:
    yield name, value.T if re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name) else value


def experts(name: str, value: np.ndarray) -> Tensors:
    """Gate and up apart; the shared expert's gate as a vector."""
    stem, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        for half, part in zip(("gate", "up"), np.split(value, 2, axis=1)):
            yield f"{stem}.{half}_proj.weight", part
    elif last == "down_proj":
        yield f"{name}.weight", value
    else:
        yield name, value.squeeze()


def interleaved(name: str, value: np.ndarray) -> Tensors:
    """Rows of each query and key head alternate between the rotary halves."""
    if match := re.search(r"\.([qk])_proj\.weight$", name):
        heads = {"q": 4, "k": 2}[match[1]]
        value = value.reshape(heads, 2, -1, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
    yield from experts(name, value)


def gpt_oss(name: str, value: np.ndarray) -> Tensors:
    """Experts as [E, N, K], and their gates and ups, which alternate, apart."""
    stem, _, last = name.rpartition(".")
    if last == "sinks":
        yield f"{name}.weight", value
    elif match := re.fullmatch(r"(gate_up|down)_proj(_bias)?", last):
        suffix = "bias" if match[2] else "weight"
        turned = value if match[2] else value.swapaxes(1, 2)
        parts = {"gate": turned[:, ::2], "up": turned[:, 1::2]} if match[1] == "gate_up" else {"down": turned}
        for part, own in parts.items():
            yield f"{stem}.{part}_proj.{suffix}", own
    else:
        yield name, value


@dataclass(frozen=True)
class Row:
    """A GGUF architecture: transformers' model_type and configuration ``keys`` of the model that is converted,
    ``metadata`` beyond the common ones, and what the converter makes of each parameter. ``names`` is the member of
    gguf.MODEL_ARCH."""

    architecture: str
    model_type: str
    keys: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    convert: Callable[[str, np.ndarray], Tensors] = as_it_is
    names: str = ""


RMS, NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
SMALL = families.BASE | dict(rms_norm_eps=1e-6)
WIDE = SMALL | dict(hidden_size=256, num_attention_heads=2, num_key_value_heads=1)
"""Heads of 128: the reader leaves that default of some classes, whatever the file says."""

FOUR_EXPERTS = {"expert_count": 4, "expert_used_count": 2}

ROWS = {
    "mistral": Row("llama", "mistral", SMALL | dict(sliding_window=None), {"rope.dimension_count": 16}, interleaved),
    "qwen2": Row("qwen2", "qwen2", WIDE),
    "qwen3": Row("qwen3", "qwen3", WIDE | dict(head_dim=128), {"attention.key_length": 128}),
    "phi3": Row("phi3", "phi3", WIDE, {"attention.sliding_window": 64}),
    "starcoder2": Row("starcoder2", "starcoder2", families.BASE | dict(vocab_size=49152), {NORM: 1e-5}),
    "gemma2": Row("gemma2", "gemma2", WIDE | dict(head_dim=128, sliding_window=8, query_pre_attn_scalar=128),
                  {"attention.key_length": 128, "attention.sliding_window": 8, "attn_logit_softcapping": 50.0,
                   "final_logit_softcapping": 30.0}, plus_one),
    "gpt2": Row("gpt2", "gpt2", dict(vocab_size=50257, n_embd=64, n_head=4, n_layer=2, n_positions=1024),
                {"context_length": 1024, "feed_forward_length": 256, NORM: 1e-5}, conv1d),
    "qwen2moe": Row("qwen2moe", "qwen2_moe", SMALL | dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
        FOUR_EXPERTS | {"expert_feed_forward_length": 1408, "expert_shared_feed_forward_length": 5632}, experts),
    "qwen3moe": Row("qwen3moe", "qwen3_moe", SMALL | dict(
        head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=768, norm_topk_prob=True),
        FOUR_EXPERTS | {"attention.key_length": 16, "expert_feed_forward_length": 768}, experts),
}
"""Architectures that transformers reads. Sizes that its reader doesn't take from a file are its classes' own."""

UNREAD = {
    "mixtral": Row("llama", "mixtral", SMALL | dict(num_local_experts=4, num_experts_per_tok=2),
                   FOUR_EXPERTS | {"rope.dimension_count": 16}, interleaved),
    "gpt-oss": Row("gpt-oss", "gpt_oss", families.FAMILIES["gpt_oss"].keys | dict(rms_norm_eps=1e-6),
                   FOUR_EXPERTS | {"attention.key_length": 16, "attention.sliding_window": 8, "rope.freq_base": 10000.0,
                                   "expert_feed_forward_length": 96, "rope.scaling.type": "yarn",
                                   "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
                   gpt_oss, "GPT_OSS"),
    "phi3, a part turned": Row("phi3", "phi3", WIDE | families.rope("default", partial_rotary_factor=0.5), {
        "attention.sliding_window": 0, "rope.dimension_count": 64, "rope.scaling.original_context_length": 64}),
}
"""Architectures that it doesn't read, fails to, or makes another model of."""


def write(path: Path, row: Row, model, formats: Mapping[str, str] = {}, metadata: Mapping[str, Any] = {}) -> Path:
    """Converts ``model``. ``formats`` are regular expressions of the file's tensor names → format, else f32; None in
    ``metadata`` takes a key away. What is rounded on the way is rounded in ``model`` too, but for rows that move."""
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[row.names or row.architecture.upper()], 2)
    writer = gguf.GGUFWriter(path, row.architecture)
    sizes = {"context_length": 64, "block_count": 2, "embedding_length": config.hidden_size, "feed_forward_length": 96,
             "attention.head_count": config.num_attention_heads}
    if hasattr(config, "num_key_value_heads"):
        sizes["attention.head_count_kv"] = config.num_key_value_heads
    if config.vocab_size == families.VOCABULARY:  # else the reader leaves the class's own size
        sizes["vocab_size"] = families.VOCABULARY
    epsilon = {} if NORM in row.metadata else {RMS: 1e-6}
    for key, value in {**sizes, **epsilon, **row.metadata, **metadata}.items():
        if value is not None:
            full = key if key.startswith("general.") else f"{row.architecture}.{key}"
            tiny_gguf.add(writer, full, value)
    writer.add_uint32("tokenizer.ggml.padding_token_id", 0)
    for parameter, value in model.state_dict().items():
        if config.tie_word_embeddings and parameter == "lm_head.weight":
            continue
        for known, part in row.convert(parameter, value.numpy()):
            stem, _, suffix = known.rpartition(".")
            name = f"{names.get_name(stem)}.{suffix}"
            format = next((f for pattern, f in formats.items() if re.search(pattern, name)), "f32")
            kind = gguf.GGMLQuantizationType[format.upper()]
            if format != "f32":
                raw = tiny_gguf.stored(format, part.shape, np.random.default_rng(0)) if format.endswith("_k") else \
                    gguf.quants.quantize(np.ascontiguousarray(part), kind)
                part[...] = gguf.quants.dequantize(raw, kind)
                part = raw
            writer.add_tensor(name, np.ascontiguousarray(part), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path):
    """The model that transformers makes of the file."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def check(path: Path, model, seed: int, **options: Any):
    """Compiles the file and compares it with ``model``. Returns the report."""
    report = families.compile_family(path, path.with_suffix(".adapt"), **options)
    assert not report.conversion_errors and not [row.op for row in report.coverage if row.status == "missing"]
    tokens = families.tokens_of(families.PROMPT + families.STEPS, seed)
    expected = families.forward(model, tokens)
    result = families.compare(path.with_suffix(".adapt"), tokens, *expected, threads=1 + seed % 2)
    assert result.same, "the same sequence, cut otherwise, gives other bits"
    assert result.worst <= families.TOLERANCE
    assert result.near <= 0.05, "too many tokens with a near-tie in a router"
    return report


@pytest.mark.parametrize("name", ROWS)
def test_as_transformers_reads_the_file(name, tmp_path):
    seed = list(ROWS).index(name) % 3
    path = write(tmp_path / "m.gguf", ROWS[name], families.build(ROWS[name].model_type, ROWS[name].keys, seed))
    model = read(path)
    for layer in model.model.layers if name == "gemma2" else ():
        layer.self_attn.scaling = 128**-0.5  # the reader leaves the 9B model's
    assert not check(path, model, seed).format_notes


def test_verified_against_transformers(tmp_path):
    """Experts of packed halves; neither file nor folder brings a tokenizer."""
    row = ROWS["qwen3moe"]
    model = families.build(row.model_type, row.keys, 1)
    path = write(tmp_path / "m.gguf", row, model, {r"ffn_(gate|up)_exps": "q4_0", r"attn_q\.": "q8_0"})
    model.save_pretrained(tmp_path / "m")
    for number, source in enumerate((path, tmp_path / "m")):
        families.compile_family(source, tmp_path / f"{number}.adapt", weights=("auto", "int4")[number])
        report = verify(tmp_path / f"{number}.adapt", levels=(), against=str(source), seed=1)
        assert report.passed and len(report.depths) == 3, report.levels
    other = families.build(row.model_type, row.keys, 2)
    other.save_pretrained(tmp_path / "m", state_dict={k: v for k, v in other.state_dict().items() if "norm" not in k})
    with pytest.raises(UnsupportedError, match="by itself: it finds nothing for 'model.layers.0.input_layernorm.weight'"):
        verify(tmp_path / "1.adapt", levels=(), against=str(tmp_path / "m"))


@pytest.mark.parametrize("name", UNREAD)
def test_as_the_model_that_was_converted(name, tmp_path):
    model = families.build(UNREAD[name].model_type, UNREAD[name].keys, 1)
    assert not check(write(tmp_path / "m.gguf", UNREAD[name], model), model, 1).format_notes


def test_what_the_reader_fails_at(tmp_path):
    """Where this fails, transformers has learnt to read it: move the row to ROWS."""
    rows = UNREAD | {"mistral": ROWS["mistral"]}
    models = {name: families.build(row.model_type, row.keys, 0) for name, row in rows.items()}
    named = {"mistral": {"general.name": "mistral"}}
    paths = {name: write(tmp_path / f"{name}.gguf", row, models[name], metadata=named.get(name, {}))
             for name, row in rows.items()}
    with pytest.raises(TypeError, match="only 0-dimensional arrays"):
        read(paths["gpt-oss"])
    assert type(read(paths["mixtral"])).__name__ == "LlamaForCausalLM"
    with pytest.raises(NotImplementedError, match="Unknown gguf model_type: mistral"):
        read(paths["mistral"])
    check(paths["mistral"], models["mistral"], 0)
    for path in paths.values():  # so it is no reference either
        with pytest.raises(UnsupportedError, match="transformers can't read .*by itself"):
            authors_model(open_source(path))


K_WIDE = dict(hidden_size=256, moe_intermediate_size=768)
"""Rows of whole superblocks."""

PACKED = {
    "one level": ("qwen3moe", {}, {r"ffn_(gate|up)_exps": "q4_0", r"ffn_down_exps": "q8_0", r"attn_q\.": "q4_1"},
                  {"gate_up": "q4_0", "down": "q8_0", "q_proj": "q4_1"}),
    "two levels": ("qwen3moe", K_WIDE, {r"ffn_(gate|up)_exps": "q4_k", r"ffn_down_exps": "q6_k"},
                   {"gate_up": "q4_k", "down": "q6_k"}),
    "halves differ": ("qwen3moe", {}, {r"ffn_gate_exps": "q8_0", r"ffn_up_exps": "q4_0", r"ffn_down_exps": "q5_1"},
                      {"gate_up": "f32", "down": "q5_1"}),
    "transposed": ("gpt2", {}, {r"attn_qkv.weight": "q8_0", r"ffn_up.weight": "q5_0", r"ffn_down.weight": "q4_1"},
                   {"attn.c_attn": "q8_0", "mlp.c_fc": "q5_0", "mlp.c_proj": "q4_1"}),
    "alternating": ("gpt-oss", {}, {r"ffn_(gate|up)_exps.weight": "q8_0", r"ffn_down_exps.weight": "q5_0"},
                    {"experts.gate_up_proj": "q8_0", "experts.down_proj": "q5_0"}),
    "powers of two": ("gpt-oss", {}, {r"ffn_(gate|up|down)_exps.weight": "mxfp4"},
                      {"experts.gate_up_proj": "mxfp4", "experts.down_proj": "mxfp4"}),
}
NOTES = {
    "halves differ": ("'blk.0.ffn_gate_up_exps.weight', 'blk.1.ffn_gate_up_exps.weight': made of q4_0 and q8_0; read "
                      "as f32, which holds every value.",),
}


@pytest.mark.parametrize("name", PACKED)
def test_what_is_packed_stays_packed(name, tmp_path):
    """Matrices cut in two, alternating and transposed: codes and scales move, no value is rounded again."""
    known, keys, formats, expected = PACKED[name]
    row = ROWS.get(known) or UNREAD[known]
    model = families.build(row.model_type, row.keys | keys, 2)
    path = write(tmp_path / "m.gguf", row, model, formats)
    report = check(path, read(path) if known in ROWS else model, 2)
    assert report.format_notes == NOTES.get(name, ())
    program = Program.parse((path.with_suffix(".adapt") / artifact_format.LAID_OUT).read_text())
    for weight in program.weights().values():
        held = [format for part, format in expected.items() if part in weight.name and weight.spec.format]
        assert not held or weight.spec.format.name == held[0], weight.name
    used = {op.operation.name for _, op in program.operators()}
    assert "adaptc.transpose" not in used
    assert verify(path.with_suffix(".adapt"), levels=()).passed


@pytest.mark.parametrize("name, metadata, message", [
    ("gpt-oss", {"rope.scaling.type": None, "rope.scaling.factor": None, "rope.scaling.original_context_length": None},
     "doesn't say how rotary positions are scaled"),
    ("gpt-oss", {"expert_feed_forward_length": 32}, "can only read models where both agree"),
    ("qwen2", {"rope.dimension_count": 64}, "heads of 128 columns; .* whose rope turns all of them"),
    ("qwen3", {"rope.dimension_count": 64}, "heads of 128 columns; .* whose rope turns all of them"),
    ("phi3", {"rope.dimension_count": 63}, "heads of 128 columns; .* whose rope turns an even part of them"),
    ("qwen3moe", {"expert_count": 8}, "expert_count is 8, and the tensors have 4"),
    ("qwen3moe", {"expert_count": None}, "has the wrong type or is missing"),
    ("qwen3moe", {"expert_used_count": 5}, "expert_used_count is more than expert_count"),
    ("qwen3moe", {"expert_used_count": 0}, "expert_used_count is 0"),
    ("qwen3moe", {"expert_feed_forward_length": 32}, "has the shape"),
    ("mixtral", {"expert_count": 0}, "doesn't know what these metadata keys .* llama.expert_count"),
])
def test_metadata_that_contradict(name, metadata, message, tmp_path):
    row = ROWS.get(name) or UNREAD[name]
    path = write(tmp_path / "m.gguf", row, families.build(row.model_type, row.keys, 0), metadata=metadata)
    with pytest.raises((InputError, UnsupportedError), match=message):
        driver.stage_text(path, "captured")


def test_halves_that_do_not_match(tmp_path):
    def cut(rows: int) -> Callable[[str, np.ndarray], Tensors]:
        def convert(name: str, value: np.ndarray) -> Tensors:
            for known, part in experts(name, value):
                last = part[:, :rows] if re.search(r"layers\.1\..*\bup_proj", known) else part
                if last.size:
                    yield known, last

        return convert

    row = ROWS["qwen3moe"]
    model = families.build(row.model_type, row.keys, 0)
    for rows, message in ((64, r"ffn_gate_exps.weight' and 'blk.1.ffn_up_exps.weight' in .* belong together"),
                          (0, r"no tensor for 'model.layers.1.mlp.experts.gate_up_proj'")):
        path = write(tmp_path / f"{rows}.gguf", replace(row, convert=cut(rows)), model)
        with pytest.raises(InputError, match=message):
            driver.stage_text(path, "captured")
