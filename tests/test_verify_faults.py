"""Planted faults: each is found by ``verify``, under the name of the operator or tensor that has it, and its module.

Faults are planted in what passes give, in packed weights, kernels, plans and the run time, never in what the oracle
reads (the captured program, the digests of the model's own tensors). FAULTS is the table; every kind stands in it at
several sites.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import families
import numpy as np
import planted
import pytest
import tiny_gguf
import tiny_models
from planted import Plant

import adaptc
from adaptc.driver import stage_text
from adaptc.runtime import engine as runtime_engine
from adaptc.runtime.pages import BlockTable, SlotTable
from adaptc.verify import verify
from adaptc.verify.report import Finding, Report

pytestmark = pytest.mark.usefixtures("kept_captures")

OPTIONS = {
    "gemma": planted.SIZES,
    "gguf": planted.SIZES | {"activations": "int8"},
    "experts": planted.SIZES | {"page_size": 4, "max_context": 64},
    "recurrent": planted.SIZES,
}
RECURRENT = {"vocab_size": families.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16,
             "state_size": 8, "n_groups": 1, "chunk_size": 8}


def findings(report: Report) -> list[Finding]:
    return [finding for level in report.levels for finding in level.findings]


# ---- how they are planted: each a function from Plant (an artifact, its model, a place) to the artifact with the fault


def weight(name: str, change: Callable[[dict], None]):
    return lambda p: planted.weight(p.artifact, p.out, name, change)


def kernel(op: str, module: str, use: int = 0, **params):
    return lambda p: planted.kernel(p.artifact, p.out, planted.find(p.artifact, op, module), use, **params)


def edited(op: str, module: str, edit: Callable[[str], str]):
    return lambda p: planted.kernel(p.artifact, p.out, planted.find(p.artifact, op, module), 0, edit=edit)


def buffers(op: str, module: str, use: int, old: str, new: str):
    """In the plan, one call of an operator is given another buffer; ``old`` is a pattern."""
    def plant(p: Plant) -> Path:
        index, found = planted.find(p.artifact, op, module), []

        def change(operator):
            calls = list(operator.calls)
            found.extend(b for b in calls[use].buffers if re.fullmatch(old, b))
            calls[use] = dataclasses.replace(
                calls[use], buffers=tuple(re.sub(f"^{old}$", new, b) for b in calls[use].buffers))
            return dataclasses.replace(operator, calls=tuple(calls))

        made = planted.plan(p.artifact, p.out, lambda plan: planted.operator(plan, index, change))
        assert found, old
        return made

    return plant


def laid_out(pattern: str, replacement: str, count: int = 1):
    """The model compiled from an edited laid-out program: the captured one in the artifact is the true one."""
    def plant(p: Plant) -> Path:
        changed, made = re.subn(pattern, replacement, p.program, count=count)
        assert made, pattern
        (p.folder / "edited.mlir").write_text(changed)
        adaptc.compile(p.model, "cpu", output=p.out, from_ir=p.folder / "edited.mlir", **p.options)
        return p.out

    return plant


def patched(target, name: str, make: Callable):
    """The run time with one function replaced by ``make(the true one)``."""
    def plant(p: Plant) -> Path:
        p.monkeypatch.setattr(target, name, make(getattr(target, name)))
        return p.artifact

    return plant


def swap_scales(codes):
    scales = codes["scale0"]
    assert scales[3, 0] != scales[3, 1]
    scales[3, [0, 1]] = scales[3, [1, 0]]


def swap_rows(codes):
    for array in codes.values():
        array[[0, 1]] = array[[1, 0]]


def swap_activation(p: Plant) -> Path:
    """gate and up in the plan's call exchanged."""
    index = planted.find(p.artifact, "gated_linear", "model.layers.1.mlp")

    def swap(op):
        (call,) = op.calls
        x, gate, up, out = call.buffers
        return dataclasses.replace(op, calls=(dataclasses.replace(call, buffers=(x, up, gate, out)),))

    return planted.plan(p.artifact, p.out, lambda plan: planted.operator(plan, index, swap))


def swapped_pages(grow):
    """From the second step on, the block table says that a request's pages 1 and 2 lie where 2 and 1 do."""
    def off(self, tokens):
        grow(self, tokens)
        if tokens > 9 and not hasattr(self, "off"):
            self.off = True
            self.entries[[1, 2]] = self.entries[[2, 1]]

    return off


def reused_too_early(slide):
    """Pages are dropped while positions within the window still read them, and reused."""
    def early(self, length):
        if self.window:
            gone = max(0, length - self.window + 1) // self.page_size
            if gone + 1 < self._end and length > self.window:
                self.entries[gone] = self.entries[gone + 1]

    return early


def stale_pages(p: Plant) -> Path:
    """A request starts with the pages of the one before, which the pool has meanwhile given back."""
    release, init, kept = BlockTable.release, BlockTable.__init__, {}

    def remember(self):
        kept[self.window] = (self.entries.copy(), self._end)
        release(self)

    def stale(self, pool, page_size, window, max_pages):
        init(self, pool, page_size, window, max_pages)
        if window in kept:
            self.entries, self._end = kept[window][0].copy(), kept[window][1]
            self._first = int(np.argmax(self.entries >= 0))

    p.monkeypatch.setattr(BlockTable, "__init__", stale)
    p.monkeypatch.setattr(BlockTable, "release", remember)
    p.monkeypatch.setattr(BlockTable, "_drop", lambda self, first: None)
    return p.artifact


def left_slots(slide):
    """What a step has written is never read: the next one starts from where it did."""
    def left(self, length):
        read, written = (int(slot) for slot in self.entries)
        if written >= 0 and read >= 0:
            self.entries[1] = -1
            self.pool.free(written)
        else:
            slide(self, length)

    return left


def stale_slots(init):
    """A request starts from a slot that nobody has written for it."""
    def stale(self, pool):
        init(self, pool)
        self.entries[0] = pool.alloc()

    return stale


def reversed_prefix(adopt):
    """The pages that a request finds again stand in its table the wrong way round."""
    return lambda self, count, pages: adopt(self, count, pages[::-1])


def late_positions(fill):
    """Every chunk is fed with positions that start one too late."""
    def late(self, chunks):
        symbols = fill(self, chunks)
        self._positions[: symbols["T"]] += 1
        return symbols

    return late


def mixed_requests(token: int, steps: int):
    """In the first ``steps`` steps of a batch, one token of the first chunk goes to the second request's table."""
    def make(fill):
        def mixed(self, chunks):
            symbols = fill(self, chunks)
            if symbols["R"] > 1 and chunks[0].start < steps * chunks[0].count:
                self._request_rows[range(chunks[0].count)[token]] = 1
            return symbols

        return mixed

    return make


SLOTS_SWAPPED = (
    r'(%\w+) = "adaptc.reshape"\((%\w+)\) (\{shape = \["T", 2, 1\], source = "router"\}) : '
    r'\(tensor<\?x1x2xf32, (.*?)>\) ->',
    r'%second = "adaptc.slice"(\2) {limits = [-1, 1, 2], source = "router", starts = [0, 0, 1], strides = [1, 1, 1]} : '
    r'(tensor<?x1x2xf32, \4>) -> tensor<?x1x1xf32, \4>\n'
    r'%first = "adaptc.slice"(\2) {limits = [-1, 1, 1], source = "router", starts = [0, 0, 0], strides = [1, 1, 1]} : '
    r'(tensor<?x1x2xf32, \4>) -> tensor<?x1x1xf32, \4>\n'
    r'%swapped = "adaptc.concat"(%second, %first) {axis = 2 : i64, source = "router"} : '
    r'(tensor<?x1x1xf32, \4>, tensor<?x1x1xf32, \4>) -> tensor<?x1x2xf32, \4>\n'
    r'\1 = "adaptc.reshape"(%swapped) \3 : (tensor<?x1x2xf32, \4>) ->',
)
"""What the router says of the first slot's expert weighs the second's output, and the other way round."""

ATTENTION, MLP, EXPERTS = "model.layers.1.self_attn", "model.layers.1.mlp", "model.layers.0.mlp.experts"
MIXER = "backbone.layers.0.mixer"


@dataclasses.dataclass(frozen=True)
class Fault:
    """``kind``, planted at ``site`` of ``artifact`` by ``plant``; ``level`` must find it at ``where`` in ``module``
    (patterns). ``alone``: nothing else is blamed; else what reads wrong values later may be too."""

    kind: str
    site: str
    artifact: str
    level: str
    plant: Callable[[Plant], Path]
    where: str
    module: str
    alone: bool = True


FAULTS = [
    Fault("a scale swapped", "weights", "gguf", "", weight("model.layers.0.mlp.down_proj.weight", swap_scales),
          "tensor blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj"),
    Fault("a scale swapped", "weights, table", "gguf", "", weight("model.embed_tokens.weight", swap_scales),
          "tensor token_embd.weight", "model.embed_tokens"),
    Fault("a scale swapped", "pass", "gemma", "layer", laid_out(r"scaling = 2.5\S+", "scaling = 1.0"), "attention",
          "model.layers.0.self_attn"),
    Fault("a scale swapped", "kernel", "experts", "operator", kernel("attention", ATTENTION, 1, scaling=1.0),
          "attention", ATTENTION),

    Fault("a tail dropped", "kernel", "gemma", "operator",
          kernel("linear", "model.layers.0.mlp.down_proj", weights=(("f32", 56),)), "linear",
          "model.layers.0.mlp.down_proj"),
    Fault("a tail dropped", "kernel, whole steps", "gemma", "layer",
          kernel("linear", "model.layers.0.mlp.down_proj", weights=(("f32", 56),)), "linear",
          "model.layers.0.mlp.down_proj"),
    Fault("a tail dropped", "kernel, table", "experts", "operator", kernel("embedding", "model.embed_tokens", k=56),
          "embedding", "model.embed_tokens"),
    Fault("a tail dropped", "kernel, experts", "experts", "operator", kernel("expert_linear", EXPERTS, k=56),
          "expert_linear", EXPERTS),
    Fault("a tail dropped", "pass", "experts", "layer",
          laid_out(r'(limits = \[-1, 2, )192(\], source = "experts", starts = \[0, 0, )1\]', r"\g<1>191\g<2>0]"),
          "slice|group", EXPERTS, alone=False),  # the group is the first to give a value that the captured program has

    Fault("a page read one off", "run time", "gemma", "layer", patched(BlockTable, "grow", swapped_pages),
          "attention", r"model\.layers\.\d\.self_attn", alone=False),
    Fault("a page read one off", "run time, other ways", "gemma", "equivalences",
          patched(BlockTable, "grow", swapped_pages), "attention", r"model\.layers\.\d\.self_attn", alone=False),
    Fault("a page read one off", "run time, windows", "gemma", "layer", patched(BlockTable, "slide", reused_too_early),
          "attention", r"model\.layers\.\d\.self_attn", alone=False),
    Fault("a page read one off", "run time, prefixes", "gemma", "equivalences",
          patched(BlockTable, "adopt", reversed_prefix), "run time: what is found again", ""),
    Fault("a page read one off", "kernel", "gemma", "operator",
          kernel("attention", "model.layers.2.self_attn", 1, page_size=4), "attention", "model.layers.2.self_attn"),
    Fault("a page read one off", "plan", "gemma", "layer",
          buffers("attention", "model.layers.2.self_attn", 1, "pages:full", "pages:window8"), "attention",
          "model.layers.2.self_attn"),

    Fault("a mask shifted", "kernel", "gemma", "operator",
          kernel("attention", "model.layers.0.self_attn", 1, window=7), "attention", "model.layers.0.self_attn"),
    Fault("a mask shifted", "kernel, whole steps", "gemma", "layer",
          kernel("attention", "model.layers.0.self_attn", 1, window=7), "attention", "model.layers.0.self_attn"),
    Fault("a mask shifted", "kernel, sinks", "experts", "operator",
          kernel("attention", "model.layers.0.self_attn", 1, window=9), "attention", "model.layers.0.self_attn"),
    Fault("a mask shifted", "pass", "gemma", "layer", laid_out("window = 8", "window = 7", count=0),
          "state model.layers.0.self_attn.kv", "model.layers.0.self_attn", alone=False),
    Fault("a mask shifted", "plan", "gemma", "layer",
          buffers("attention", ATTENTION, 1, "input:positions", "input:requests"), "attention", ATTENTION),

    Fault("a state not reset", "run time", "gemma", "layer", stale_pages, "attention", r"model\.layers\.\d\.self_attn",
          alone=False),
    Fault("a state not reset", "run time, positions", "gemma", "layer",
          patched(runtime_engine.Engine, "_fill", late_positions), "run time: the step's positions", ".*", alone=False),
    Fault("a state not reset", "plan", "gemma", "layer",
          buffers("attention", ATTENTION, 1, r"state:model\.layers\.1\.self_attn\.kv",
                  "state:model.layers.0.self_attn.kv"), "attention", ATTENTION),

    Fault("a state not reset", "run time, slots", "recurrent", "layer", patched(SlotTable, "__init__", stale_slots),
          "convolve", MIXER, alone=False),
    Fault("a state not reset", "kernel, slots", "recurrent", "operator", edited("recur", MIXER, planted.never_fresh),
          "recur", MIXER),
    Fault("a state not reset", "plan, slots", "recurrent", "layer",
          buffers("recur", MIXER, 0, r"state:backbone\.layers\.0\.mixer\.state", "state:backbone.layers.1.mixer.state"),
          "recur", MIXER),
    Fault("a state left behind", "run time", "recurrent", "layer", patched(SlotTable, "slide", left_slots), "convolve",
          r"backbone\.layers\.\d\.mixer", alone=False),
    Fault("a state left behind", "kernel", "recurrent", "operator", kernel("recur", MIXER, before=True), "recur", MIXER),
    Fault("a state left behind", "kernel, window", "recurrent", "operator",
          edited("convolve", MIXER, planted.never_fresh), "convolve", MIXER),
    Fault("a state left behind", "pass", "recurrent", "layer", laid_out('read = "after"', 'read = "before"'), "recur",
          r"backbone\.layers\.\d\.mixer", alone=False),

    # 1e-5 for 1e-6 is less than rounding at this model's values, but not at small ones, which the operator level has
    Fault("a norm epsilon changed", "kernel", "gemma", "operator", kernel("rms_norm", "model.norm", eps=1e-5),
          "rms_norm", "model.norm"),
    Fault("a norm epsilon changed", "kernel, whole steps", "gemma", "layer",
          kernel("rms_norm", "model.norm", eps=1e-2), "rms_norm", "model.norm"),
    Fault("a norm epsilon changed", "kernel, fused", "experts", "operator",
          kernel("add_rms_norm", "model.layers.0.post_attention_layernorm", eps=1e-4), "add_rms_norm",
          "model.layers.0.post_attention_layernorm"),
    Fault("a norm epsilon changed", "pass", "gemma", "layer", laid_out(
        r'(rms_norm"\(%\w+, %\w+\) \{eps = )9\.99\S+( : f64, source = "post_attention_layernorm")', r"\g<1>1.0e-5\2"),
        "rms_norm", "model.layers.0.post_attention_layernorm"),

    Fault("an expert swapped", "weights", "experts", "", weight(f"{EXPERTS}.gate_up_proj.T", swap_rows),
          f"tensor {EXPERTS}.gate_up_proj", EXPERTS),
    Fault("an expert swapped", "weights, down", "experts", "", weight(f"{MLP}.experts.down_proj.T", swap_rows),
          f"tensor {MLP}.experts.down_proj", f"{MLP}.experts"),
    Fault("an expert swapped", "kernel: a slot reads the other's row", "experts", "operator", lambda p: planted.kernel(
        p.artifact, p.out, planted.find(p.artifact, "expert_linear", EXPERTS, 1), 0, each=False), "expert_linear",
        EXPERTS),
    Fault("an expert swapped", "kernel: the router's k-th choice", "experts", "operator",
          lambda p: planted.kernel(p.artifact, p.out, planted.find(p.artifact, "top_k", "model.layers.0.mlp.router"), 0,
                                   edit=planted.off_by_one), "top_k", "model.layers.0.mlp.router"),
    Fault("an expert swapped", "kernel: the choice, whole steps", "experts", "layer",
          lambda p: planted.kernel(p.artifact, p.out, planted.find(p.artifact, "top_k", "model.layers.0.mlp.router"), 0,
                                   edit=planted.off_by_one), "top_k", r"model\.layers\.\d\.mlp\.router", alone=False),
    Fault("an expert swapped", "pass: the combination in the wrong slot", "experts", "layer", laid_out(*SLOTS_SWAPPED),
          "slice", r"model\.layers\.\d\.mlp\.router"),
    Fault("an expert swapped", "plan: of another layer", "experts", "layer",
          buffers("expert_linear", EXPERTS, 0, rf"weight:{re.escape(EXPERTS)}\.gate_up_proj\.T",
                  f"weight:{MLP}.experts.gate_up_proj.T"), "expert_linear", EXPERTS),

    Fault("rows swapped", "weights: the digest is of the file's order of rows, not the parameter's", "gguf", "",
          weight("model.layers.1.self_attn.k_proj.weight", swap_rows), "tensor blk.1.attn_k.weight",
          "model.layers.1.self_attn.k_proj"),
    Fault("a wrong activation", "kernel", "gguf", "operator",
          kernel("gated_linear", "model.layers.0.mlp", act="gelu_tanh"), "gated_linear", "model.layers.0.mlp"),
    Fault("a wrong activation", "kernel, whole steps", "gguf", "layer",
          kernel("gated_linear", "model.layers.0.mlp", act="gelu_tanh"), "gated_linear", "model.layers.0.mlp"),
    Fault("a wrong activation", "pass", "gemma", "layer", laid_out('act = "gelu_tanh"', 'act = "silu"'),
          "gated_linear", "model.layers.0.mlp"),
    Fault("q and k swapped", "pass: attention", "gemma", "layer",
          laid_out(r'adaptc.attention"\((%\w+), (%\w+),', r'adaptc.attention"(\2, \1,'), "attention",
          "model.layers.0.self_attn"),
    Fault("q and k swapped", "pass: projection", "gemma", "layer",
          laid_out(r'adaptc.linears"\((%\w+), (%\w+), (%\w+),', r'adaptc.linears"(\1, \3, \2,'), "linears",
          "model.layers.0.self_attn.q_proj", alone=False),
    Fault("two weights swapped", "plan", "gemma", "layer", swap_activation, "gated_linear", MLP),
    # where the other request has no page, anything may be read, or nothing may lie there
    Fault("a token in another's table", "run time", "gemma", "equivalences",
          patched(runtime_engine.Engine, "_fill", mixed_requests(-1, 99)), "attention|run time.*", ".*", alone=False),
    Fault("a token in another's table", "run time, a page that is there", "gemma", "equivalences",
          patched(runtime_engine.Engine, "_fill", mixed_requests(0, 1)), "run time: the step's inputs", "",
          alone=False),
]  # fmt: skip


# ---- the models


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def models(folder) -> dict[str, Path]:
    """gemma: as many key heads as query heads, so that q and k can be taken for each other; windows and full
    attention. experts: sinks, biased experts, a clamped gate, windows. recurrent: values of fixed size alone."""
    recurrent = folder / "recurrent"
    families.build("mamba2", RECURRENT, 0).save_pretrained(recurrent)
    return {
        "gemma": tiny_models.write(folder / "gemma", "gemma3_text", num_key_value_heads=4),
        "gguf": tiny_gguf.write(folder / "tiny.gguf", "llama"),
        "experts": families.write(folder / "experts", "gpt_oss"),
        "recurrent": recurrent,
    }


@pytest.fixture(scope="module")
def artifacts(folder, models) -> Callable[[str], Path]:
    def compiled(name: str) -> Path:
        out = folder / f"{name}.adapt"
        if not out.exists():
            adaptc.compile(models[name], "cpu", output=out, **OPTIONS[name])
        return out

    return compiled


@pytest.fixture(scope="module")
def programs(models) -> Callable[[str], str]:
    texts: dict[str, str] = {}

    def program(name: str) -> str:
        if name not in texts:
            texts[name] = stage_text(models[name], "laid_out", **OPTIONS[name])
        return texts[name]

    return program


@pytest.mark.parametrize("name", OPTIONS)
def test_without_a_fault_everything_passes(artifacts, name):
    report = verify(artifacts(name))
    assert report.passed, findings(report)
    assert [level.name for level in report.levels] == ["weights", "operator", "layer", "model", "equivalences"]
    assert any("the model level was not checked" in line for line in report.levels[3].left_out)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kind}-{f.site}")
def test_it_is_found_by_name(fault, artifacts, models, programs, tmp_path, monkeypatch):
    plant = Plant(artifacts(fault.artifact), models[fault.artifact], tmp_path, OPTIONS[fault.artifact],
                  lambda: programs(fault.artifact), monkeypatch)
    report = verify(fault.plant(plant), levels=(fault.level,) if fault.level else ())
    found = findings(report)
    assert found and not report.passed, "the fault was not found"
    first = found[0]
    assert re.search(f"({fault.where})$", first.where) and re.fullmatch(fault.module, first.module), found
    # an error that goes on through the layers is no other operator's
    others = [f for f in found if not re.search(f"({fault.where})$", f.where)]
    assert not fault.alone or all(f.where == "logits" or f.where.startswith("layer ") for f in others), found
    if fault.site == "weights":
        assert re.search(r"read by .*linear", first.what), "the operator that reads it is named too"


def test_every_kind_is_planted_at_several_sites():
    sites = {}
    for fault in FAULTS:
        sites.setdefault(fault.kind, set()).add(re.match("run time|[a-z]+", fault.site)[0])
    for kind in ("a scale swapped", "a tail dropped", "a page read one off", "a mask shifted", "a state not reset",
                 "a norm epsilon changed", "an expert swapped"):
        assert len(sites[kind]) >= 2, kind
    assert set().union(*sites.values()) == {"pass", "weights", "kernel", "plan", "run time"}
