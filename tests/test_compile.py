"""The whole chain on tiny real models: numbers, reproducibility, every stage, every option."""

from __future__ import annotations

import filecmp
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import adaptc
import tiny_gguf
import tiny_models
from adaptc import driver
from adaptc.backends.reference.interpreter import Reference
from adaptc.errors import InputError, LegalityError, OptionError
from adaptc.ir.module import STAGES, Program
from adaptc.sources import open_source
from adaptc.weights import parameter

pytestmark = pytest.mark.usefixtures("kept_captures")

FAMILIES = ("llama", "gemma3_text")


def same(a: Path, b: Path) -> bool:
    names = lambda root: sorted(p.relative_to(root) for p in root.rglob("*") if p.is_file())  # noqa: E731
    return names(a) == names(b) and not filecmp.cmpfiles(a, b, [str(n) for n in names(a)], shallow=False)[1]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture(scope="module")
def artifact(model) -> Path:
    out = model.parent / "whole.adapt"
    adaptc.compile(model, "cpu", output=out, page_size=4, max_step_tokens=32)
    return out


def reference_logits(model: Path, tokens: list[int]) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return module(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(10, tiny_models.VOCABULARY, count).tolist()


@pytest.mark.parametrize("count", [1, 2, 7, 33, 100])
def test_logits_agree_with_the_authors_model(model, artifact, count):
    tokens = tokens_of(count)
    expected = reference_logits(model, tokens)
    with adaptc.load(artifact, threads=1) as session:
        for chunk in (None, 1, 5):
            assert np.abs(session.score(tokens, chunk=chunk) - expected).max() < 1e-4 * np.abs(expected).max()


def run_reference(model: Path, stage: str, tokens: list[int], chunk: int | None = None, **options) -> np.ndarray:
    """Logits of a stage on the reference backend, with the weights as that stage stores them."""
    program = Program.parse(driver.stage_text(model, stage, "cpu", **options))
    weights, source = program.weights(), open_source(model)
    return Reference(program, lambda name: parameter(source, weights[name])).score(tokens, chunk)


@pytest.mark.parametrize("options", [
    {"weights": "bf16"}, {"weights": "int8", "kv": "bf16"}, {"weights": "int4", "kv": "f16"}, {"activations": "int8"},
    {"kv": "int8", "page_size": 5}, {"weights": "int8", "activations": "int8"}, {"page_size": 7}, {"max_context": 50, "max_requests": 2},
])
def test_options(model, tmp_path, options):
    """Each option does what the laid-out program says, keeps the equivalences, and reports what it changed."""
    tokens = tokens_of(40)
    expected = run_reference(model, "laid_out", tokens, **options)
    report = adaptc.compile(model, "cpu", output=tmp_path / "a.adapt", **options)
    with adaptc.load(tmp_path / "a.adapt", threads=2) as session:
        logits = session.score(tokens)
        assert np.array_equal(session.score(tokens, chunk=3), logits)
        # a code of an int8 activation, or a cached value, can round the other way in the oracle's wider arithmetic
        rounds = options.get("weights") == "int8" and "activations" in options or "kv" in options
        assert np.abs(logits - expected).max() < (2e-2 if rounds else 1e-4) * np.abs(expected).max()
        assert bool(report.conversion_errors) == (options.get("weights", "auto") != "auto")
        assert session.manifest["options"]["weights"] == options.get("weights", "auto")


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_gives_the_same_artifact(model, artifact, tmp_path, stage):
    text = driver.stage_text(model, stage, "cpu", page_size=4, max_step_tokens=32)
    (tmp_path / "stage.mlir").write_text(text)
    adaptc.compile(model, "cpu", output=tmp_path / "again.adapt", from_ir=tmp_path / "stage.mlir", page_size=4,
                   max_step_tokens=32)
    assert same(artifact, tmp_path / "again.adapt")


@pytest.mark.parametrize("options,name", [
    ({"page_size": 8}, "page_size, 4"), ({"max_step_tokens": 64}, "max_step_tokens, 32"),
    ({"kv": "f16"}, "kv, f32"), ({"max_context": 64}, "max_context, 32 pages"),
])
def test_options_that_contradict_a_late_stage_are_refused(model, artifact, tmp_path, options, name):
    own = {"page_size": 4, "max_step_tokens": 32}
    (tmp_path / "stage.mlir").write_text(driver.stage_text(artifact, "lowered"))
    with pytest.raises(OptionError, match=f"was made with another {name}"):
        adaptc.compile(model, "cpu", output=tmp_path / "no.adapt", from_ir=tmp_path / "stage.mlir", **own | options)
    assert not (tmp_path / "no.adapt").exists()


@pytest.mark.parametrize("options,name", [({"weights": "int8"}, "weights, auto"),
                                          ({"activations": "int8", "kv": "f32"}, "activations, f32")])
@pytest.mark.parametrize("stage", ["laid_out", "lowered"])
def test_formats_that_contradict_a_late_stage_are_refused(model, tmp_path, stage, options, name):
    (tmp_path / "stage.mlir").write_text(driver.stage_text(model, stage))
    with pytest.raises(OptionError, match=f"was made with another {name}"):
        adaptc.compile(model, "cpu", output=tmp_path / "no.adapt", from_ir=tmp_path / "stage.mlir", **options)


@pytest.mark.parametrize("stage", ["captured", "fused", "laid_out"])
def test_a_stage_of_another_model_is_refused(model, tmp_path, stage):
    """Also when the model has every tensor that the graph reads."""
    other = tiny_models.write(tmp_path / "other", "llama" if model.parent.name.startswith("gemma") else "gemma3_text")
    (tmp_path / "stage.mlir").write_text(driver.stage_text(other, stage))
    with pytest.raises(InputError, match="the model's tensor|reads the tensor"):
        adaptc.compile(model, "cpu", output=tmp_path / "no.adapt", from_ir=tmp_path / "stage.mlir")
    assert not (tmp_path / "no.adapt").exists()


@pytest.mark.parametrize("old,new", [
    ('tensor = "model.norm.weight"', 'tensor = "nowhere"'), ("adaptc.context = 128", "adaptc.context = 4096"),
])
def test_a_stage_that_contradicts_the_model_is_refused(model, tmp_path, old, new):
    text = driver.stage_text(model, "captured")
    assert old in text
    (tmp_path / "stage.mlir").write_text(text.replace(old, new))
    with pytest.raises(InputError):
        adaptc.compile(model, "cpu", output=tmp_path / "no.adapt", from_ir=tmp_path / "stage.mlir")


@pytest.mark.parametrize("pattern,new", [
    (r"adaptc.arena_bytes = \d+", "adaptc.arena_bytes = 64"), (r'"frame\+\d{3,}"', '"frame+0"'),
    (r'args = \["operand:0", "operand:1"', 'args = ["operand:1", "operand:0"'),
    (r'family = "\w+"', 'family = "x"'),
    (r'params = "\{', 'params = "'), (r"adaptc.arena_bytes = \d+ : i64, ", ""),
])
def test_kernels_and_places_can_not_be_edited(model, tmp_path, pattern, new):
    """They would be believed: a wrong one reads other values, or memory that isn't the program's."""
    text = driver.stage_text(model, "lowered")
    edited = re.sub(pattern, lambda _: new, text, count=1)
    assert edited != text
    (tmp_path / "stage.mlir").write_text(edited)
    with pytest.raises(LegalityError):
        adaptc.compile(model, "cpu", output=tmp_path / "no.adapt", from_ir=tmp_path / "stage.mlir")


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_runs_on_the_reference_backend(model, stage):
    tokens = tokens_of(20)
    expected = reference_logits(model, tokens)
    for chunk in (None, 6):
        assert np.abs(run_reference(model, stage, tokens, chunk) - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("model", ["gemma3_text"], indirect=True)
def test_same_bytes_in_other_processes(model, artifact, tmp_path):
    """Of the family with more kernels: other hash seeds, worker counts and working directories; an empty cache of kernels and one that has them all."""
    code = ("import adaptc, sys; adaptc.compile(sys.argv[1], 'cpu', output=sys.argv[2], page_size=4, "
            "max_step_tokens=32, workers=int(sys.argv[3]))")
    for seed, workers in (("1", "1"), ("2", "2")):
        out = tmp_path / f"{seed}.adapt"
        where = tmp_path / f"cwd{seed}"
        where.mkdir()
        env = os.environ | {"PYTHONHASHSEED": seed, "ADAPTC_CACHE": str(tmp_path / "cache")}
        subprocess.run([sys.executable, "-c", code, model, out, workers], check=True, cwd=where, env=env)
        assert same(artifact, out)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_gguf_in_every_format(tmp_path, architecture):
    """A GGUF whose tensors cycle through all formats, against transformers on the same file."""
    import torch
    from transformers import AutoModelForCausalLM

    path = tiny_gguf.write(tmp_path / "tiny.gguf", architecture)
    report = adaptc.compile(path, "cpu", output=tmp_path / "g.adapt")
    assert not report.conversion_errors
    tokens = np.random.default_rng(1).integers(3, tiny_gguf.VOCABULARY, 30).tolist()
    module = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    for layer in module.model.layers:  # the file's head width decides; that reader leaves the 270m model's 256
        layer.self_attn.scaling = tiny_gguf.HEAD**-0.5
    with torch.inference_mode():
        expected = module(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    with adaptc.load(tmp_path / "g.adapt", threads=1) as session:
        assert np.abs(session.score(tokens) - expected).max() < 1e-4 * np.abs(expected).max()


def test_report_says_what_was_done(model, tmp_path):
    from adaptc.report import compile_text

    report = adaptc.compile(model, "cpu", output=tmp_path / "r.adapt", weights="int8")
    assert {r.tokens for r in report.profile} >= {1} and all(r.bound in ("compute", "bandwidth") for r in report.profile)
    assert {r.status for r in report.coverage} == {"mapped"}
    assert sum(report.bodies.values()) >= 3
    assert all(0 < e < 0.02 for e in report.conversion_errors.values())
    text = compile_text(report)
    assert "attention" in text and "bandwidth" in text and "Time" in text


def test_goldens_travel_in_the_artifact(model, tmp_path):
    from adaptc import golden

    golden.record(str(model), tmp_path / "g.safetensors", prompts=("Hello", "abc"), steps=4)
    adaptc.compile(model, "cpu", output=tmp_path / "a.adapt", goldens=tmp_path / "g.safetensors")
    recorded = load_file(tmp_path / "g.safetensors")
    for i, length in enumerate(recorded["prompt_lengths"]):
        tokens = recorded["tokens"][i][recorded["tokens"][i] >= 0].tolist()
        expected = reference_logits(model, tokens)[length - 1 : -1]
        assert np.abs(recorded["probe_logits"][i] - expected[:, recorded["probe_ids"]]).max() < 1e-4
        top = np.take_along_axis(expected, recorded["top_ids"][i].astype(np.int64), 1)
        assert np.abs(recorded["top_logits"][i] - top).max() < 1e-4
        assert expected.argmax(1).tolist() == tokens[length:]
    stored = tmp_path / "a.adapt" / "goldens.safetensors"
    assert stored.read_bytes() == (tmp_path / "g.safetensors").read_bytes()
    with pytest.raises(adaptc.errors.InputError, match="golden"):
        (tmp_path / "bad.safetensors").write_bytes(b"not goldens")
        adaptc.compile(model, "cpu", output=tmp_path / "b.adapt", goldens=tmp_path / "bad.safetensors")
    other = tiny_models.write(tmp_path / "other", seed=5)
    with pytest.raises(adaptc.errors.InputError, match="other files"):
        adaptc.compile(other, "cpu", output=tmp_path / "b.adapt", goldens=tmp_path / "g.safetensors")
    assert not (tmp_path / "b.adapt").exists()
