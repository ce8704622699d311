"""Planted faults: each is found by ``verify``, under the name of the operator or tensor that has it, and its module.

Faults are planted in what passes give, in packed weights, kernels, plans and the run time, never in what the oracle
reads (the captured program, the digests of the model's own tensors).
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import planted
import pytest
import tiny_gguf
import tiny_models

import adaptc
from adaptc.driver import stage_text
from adaptc.runtime import engine as runtime_engine
from adaptc.runtime.pages import BlockTable
from adaptc.verify import verify
from adaptc.verify.report import Report

SIZES = {"max_step_tokens": 48, "max_requests": 3, "max_context": 96, "page_size": 3}
ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def model(folder) -> Path:
    """As many key heads as query heads, so that q and k can be taken for each other; windows and full attention."""
    return tiny_models.write(folder / "gemma", "gemma3_text", num_key_value_heads=4)


@pytest.fixture(scope="module")
def artifact(folder, model) -> Path:
    adaptc.compile(model, "cpu", output=folder / "gemma.adapt", **SIZES)
    return folder / "gemma.adapt"


@pytest.fixture(scope="module")
def quantized(folder) -> Path:
    path = tiny_gguf.write(folder / "tiny.gguf", "llama")
    adaptc.compile(path, "cpu", output=folder / "gguf.adapt", activations="int8", **SIZES)
    return folder / "gguf.adapt"




def only(report: Report, where: str, module: str, more: bool = False) -> None:
    """Every finding names ``where`` (an operator, "tensor …", …) and the first one its module too;
    ``more``: the fault has consequences that are named as well."""
    findings = [f for level in report.levels for f in level.findings]
    assert findings, "the fault was not found"
    first = findings[0]
    assert where in first.where and first.module == module, findings
    assert not report.passed
    assert more or {f.where.split()[-1] for f in findings} <= {where.split()[-1], "logits"} | {
        f.where.split()[-1] for f in findings if f.where.startswith("layer")}, findings


# ---- no fault ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["artifact", "quantized"])
def test_without_a_fault_everything_passes(which, request):
    report = verify(request.getfixturevalue(which))
    assert report.passed, [f for level in report.levels for f in level.findings]
    assert [level.name for level in report.levels] == ["weights", "operator", "layer", "model", "equivalences"]
    assert any("the model level was not checked" in line for line in report.levels[3].left_out)


# ---- packed weights ----------------------------------------------------------------------------------------------


def test_a_scale_swapped(quantized, tmp_path):
    def swap(codes):
        scales = codes["scale0"]
        assert scales[3, 0] != scales[3, 1]
        scales[3, [0, 1]] = scales[3, [1, 0]]

    name = "model.layers.0.mlp.down_proj.weight"
    report = verify(planted.weight(quantized, tmp_path / "bad.adapt", name, swap), levels=())
    only(report, "tensor blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj")
    assert "linear" in report.first.what, "the operator that reads it is named too"


def test_rows_of_a_permuted_weight_swapped(quantized, tmp_path):
    """The digest is of the file's order of rows, which the parameter doesn't have."""
    def swap(codes):
        for array in codes.values():
            array[[0, 1]] = array[[1, 0]]

    name = "model.layers.1.self_attn.k_proj.weight"
    report = verify(planted.weight(quantized, tmp_path / "bad.adapt", name, swap), levels=())
    only(report, "tensor blk.1.attn_k.weight", "model.layers.1.self_attn.k_proj")


# ---- kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["operator", "layer"])
def test_a_tail_dropped(artifact, tmp_path, level):
    """A matrix kernel that leaves its last block of rows out."""
    index = planted.find(artifact, "linear", "model.layers.0.mlp.down_proj")
    bad = planted.kernel(artifact, tmp_path / "bad.adapt", index, 0, weights=(("f32", 56),))
    only(verify(bad, levels=(level,)), "linear", "model.layers.0.mlp.down_proj")


@pytest.mark.parametrize("level", ["operator", "layer"])
def test_a_mask_shifted_in_a_kernel(artifact, tmp_path, level):
    """Attention that sees one key less than its window."""
    index = planted.find(artifact, "attention", "model.layers.0.self_attn")
    bad = planted.kernel(artifact, tmp_path / "bad.adapt", index, 1, window=7)
    only(verify(bad, levels=(level,)), "attention", "model.layers.0.self_attn")


@pytest.mark.parametrize("level, eps", [("operator", 1e-5), ("layer", 1e-2)])
def test_a_kernels_epsilon_changed(artifact, tmp_path, level, eps):
    """1e-5 for 1e-6 is less than rounding at this model's values, but not at small ones, which the first level has."""
    index = planted.find(artifact, "rms_norm", "model.norm")
    bad = planted.kernel(artifact, tmp_path / "bad.adapt", index, 0, eps=eps)
    only(verify(bad, levels=(level,)), "rms_norm", "model.norm")


@pytest.mark.parametrize("level", ["operator", "layer"])
def test_a_kernels_wrong_activation(quantized, tmp_path, level):
    index = planted.find(quantized, "gated_linear", "model.layers.0.mlp")
    bad = planted.kernel(quantized, tmp_path / "bad.adapt", index, 0, act="gelu_tanh")
    only(verify(bad, levels=(level,)), "gated_linear", "model.layers.0.mlp")


# ---- what passes give --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def laid_out(model) -> str:
    return stage_text(model, "laid_out", **SIZES)


def recompiled(model: Path, tmp_path: Path, text: str) -> Path:
    """The model compiled from an edited laid-out program: the captured one in the artifact is the true one."""
    (tmp_path / "edited.mlir").write_text(text)
    adaptc.compile(model, "cpu", output=tmp_path / "bad.adapt", from_ir=tmp_path / "edited.mlir", **SIZES)
    return tmp_path / "bad.adapt"


def edited(text: str, pattern: str, replacement: str) -> str:
    """``text`` with the first match replaced."""
    changed, count = re.subn(pattern, replacement, text, count=1)
    assert count == 1, pattern
    return changed


PASS_FAULTS = {
    "a norm's epsilon changed": (
        r'(rms_norm"\(%\w+, %\w+\) \{eps = )9\.99\S+( : f64, source = "post_attention_layernorm")', r"\g<1>1.0e-5\2",
        "rms_norm", "model.layers.0.post_attention_layernorm"),
    "q and k swapped in attention": (
        r'adaptc.attention"\((%\w+), (%\w+),', r'adaptc.attention"(\2, \1,', "attention", "model.layers.0.self_attn"),
    "q and k swapped in the projection": (
        r'adaptc.linears"\((%\w+), (%\w+), (%\w+),', r'adaptc.linears"(\1, \3, \2,', "linears",
        "model.layers.0.self_attn.q_proj"),
    "a wrong activation": (r'act = "gelu_tanh"', 'act = "silu"', "gated_linear", "model.layers.0.mlp"),
    "a scaling forgotten": (r"scaling = 2.5\S+", "scaling = 1.0", "attention", "model.layers.0.self_attn"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PASS_FAULTS)
def test_a_pass_changes_the_meaning(model, laid_out, tmp_path, fault):
    pattern, replacement, op, module = PASS_FAULTS[fault]
    report = verify(recompiled(model, tmp_path, edited(laid_out, pattern, replacement)), levels=("layer",))
    only(report, op, module, more="projection" in fault)


def test_a_pass_shifts_the_mask(model, laid_out, tmp_path):
    """A window of 7 instead of 8, said consistently by operators, states and kernels."""
    report = verify(recompiled(model, tmp_path, laid_out.replace("window = 8", "window = 7")), levels=("layer",))
    findings = report.levels[1].findings
    assert findings[0].where == "state model.layers.0.self_attn.kv" and findings[0].module == "model.layers.0.self_attn"
    assert any(f.where.endswith("attention") and f.module == "model.layers.0.self_attn" for f in findings)


# ---- the plan ----------------------------------------------------------------------------------------------------


def test_the_plan_swaps_two_weights(artifact, tmp_path):
    index = planted.find(artifact, "gated_linear", MLP)

    def swap(op):
        (call,) = op.calls
        x, gate, up, out = call.buffers
        return dataclasses.replace(op, calls=(dataclasses.replace(call, buffers=(x, up, gate, out)),))

    bad = planted.plan(artifact, tmp_path / "bad.adapt", lambda plan: planted.operator(plan, index, swap))
    only(verify(bad, levels=("layer",)), f"{index} gated_linear", MLP)


def test_the_plan_shifts_the_mask(artifact, tmp_path):
    """Attention is given another array in place of the positions: the rows in the batch."""
    index = planted.find(artifact, "attention", ATTENTION)

    def shift(op):
        append, attend = op.calls
        buffers = tuple("input:requests" if b == "input:positions" else b for b in attend.buffers)
        return dataclasses.replace(op, calls=(append, dataclasses.replace(attend, buffers=buffers)))

    bad = planted.plan(artifact, tmp_path / "bad.adapt", lambda plan: planted.operator(plan, index, shift))
    only(verify(bad, levels=("layer",)), f"{index} attention", ATTENTION)


# ---- the run time ------------------------------------------------------------------------------------------------


def first_attention(report: Report) -> None:
    """Wrong rows of a cache show in the first operator that reads it, and in every later one that does."""
    findings = [f for level in report.levels for f in level.findings]
    assert findings and findings[0].where.endswith(" attention"), findings
    assert re.fullmatch(r"model\.layers\.\d\.self_attn", findings[0].module)


def test_a_page_read_one_off(artifact, monkeypatch):
    """From the second step on, the block table says that a request's pages 1 and 2 lie where 2 and 1 do."""
    grow = BlockTable.grow

    def off(self, tokens):
        grow(self, tokens)
        if tokens > 9 and not hasattr(self, "off"):
            self.off = True
            self.entries[[1, 2]] = self.entries[[2, 1]]

    monkeypatch.setattr(BlockTable, "grow", off)
    first_attention(verify(artifact, levels=("layer",)))
    report = verify(artifact, levels=("equivalences",))
    first_attention(report)
    assert "position" in report.first.what


def test_a_state_not_reset(artifact, monkeypatch):
    """A request starts with the pages of the one before, which the pool has meanwhile given back."""
    release = BlockTable.release
    kept = {}

    def remember(self):
        kept[self.window] = (self.entries.copy(), self._end)
        release(self)

    init = BlockTable.__init__

    def stale(self, pool, page_size, window, max_pages):
        init(self, pool, page_size, window, max_pages)
        if window in kept:
            self.entries, self._end = kept[window][0].copy(), kept[window][1]
            self._first = int(np.argmax(self.entries >= 0))

    monkeypatch.setattr(BlockTable, "__init__", stale)
    monkeypatch.setattr(BlockTable, "release", remember)
    monkeypatch.setattr(BlockTable, "_drop", lambda self, first: None)
    first_attention(verify(artifact, levels=("layer",)))


def test_a_window_given_back_too_early(artifact, monkeypatch):
    """Pages are dropped while positions within the window still read them, and reused."""
    def early(self, length):
        if self.window:
            gone = max(0, length - self.window + 1) // self.page_size
            if gone + 1 < self._end and length > self.window:
                self.entries[gone] = self.entries[gone + 1]

    monkeypatch.setattr(BlockTable, "slide", early)
    first_attention(verify(artifact, levels=("layer",)))


def test_positions_not_reset(artifact, monkeypatch):
    """Every chunk is fed with positions that start one too late."""
    fill = runtime_engine.Engine._fill

    def late(self, chunks):
        symbols = fill(self, chunks)
        self._positions[: symbols["T"]] += 1
        return symbols

    monkeypatch.setattr(runtime_engine.Engine, "_fill", late)
    report = verify(artifact, levels=("layer",))
    assert any(f.where == "run time: the step's positions" for f in report.levels[1].findings)


def test_results_that_depend_on_the_batch(artifact, monkeypatch):
    """A run time that leaves the last token of a batch's first chunk to the second request's table."""
    fill = runtime_engine.Engine._fill

    def mixed(self, chunks):
        symbols = fill(self, chunks)
        if symbols["R"] > 1:
            self._request_rows[chunks[0].count - 1] = 1
        return symbols

    monkeypatch.setattr(runtime_engine.Engine, "_fill", mixed)
    report = verify(artifact, levels=("equivalences",))
    assert any("batched with other requests" in f.what or f.where.startswith("run time")
               for f in report.levels[1].findings)
