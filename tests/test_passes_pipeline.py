"""Whole pipeline: meaning, what layers become, stages from text, decomposition, kernels and memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from arena import Arena
from captured import GEMMA, LLAMA, captured, logits, values
from fake_codegen import FakeCodegen

from adaptc.errors import LegalityError, OptionError, UnsupportedError
from adaptc.ir.module import STAGES, Program, spec_of
from adaptc.ir.rewrite import nodes
from adaptc.options import CompileOptions
from adaptc.passes.base import run_pass
from adaptc.passes.decompose import Decompose
from adaptc.passes.pipeline import lower_to
from adaptc.passes.plan_memory import Block, PlanMemory, place_blocks
from adaptc.ir.lowered import kernel_uses
from adaptc.protocol import KernelSpec

SHAPES = {"llama": LLAMA, "gemma": GEMMA}
FLOATS = CompileOptions(max_step_tokens=16, max_requests=4, max_context=2048)
INTEGERS = replace(FLOATS, weights="int8", activations="int8", kv="f32")


@cache
def lowered(family: str, options: CompileOptions = FLOATS):
    return lower_to(captured(SHAPES[family]), "lowered", options, FakeCodegen())


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("options, tolerance", [(FLOATS, 1e-5), (INTEGERS, 0.2)], ids=["f32", "int8"])
def test_every_stage_means_the_same(family, options, tolerance):
    stages = lowered(family, options).programs
    weights = values(stages["captured"])
    wanted = logits(stages["captured"], weights)
    for stage in STAGES:
        np.testing.assert_allclose(logits(stages[stage], weights), wanted, rtol=0, atol=tolerance, err_msg=stage)


def layer(program: Program) -> Counter:
    """Operators of the first body, views that cost nothing aside."""
    body = next(f for n, f in program.functions().items() if n != "step")
    return Counter(n.name for n in nodes(body) if n.row is not None and not n.row.aliases)


def test_a_llama_layer_is_ten_operators():
    wanted = {"rms_norm": 1, "linears": 1, "rope": 2, "attention": 1, "linear": 2, "add_rms_norm": 1,
              "gated_linear": 1, "add": 1}
    assert layer(lowered("llama").programs["fused"]) == wanted
    assert layer(lowered("llama", INTEGERS).programs["laid_out"]) == {**wanted, "quantize": 4}


def test_a_gemma_layer_is_fourteen_operators():
    wanted = {"rms_norm": 5, "linears": 1, "rope": 2, "attention": 1, "linear": 2, "add_rms_norm": 1,
              "gated_linear": 1, "add": 1}
    assert layer(lowered("gemma").programs["fused"]) == wanted


def test_norm_weights_that_the_file_keeps_plus_one_are_read_as_they_are():
    step = lowered("gemma").programs["fused"].step
    for call in [n for n in nodes(step) if n.name == "func.call"]:
        assert all(v.owner.operation.name == "adaptc.get" for v in call.operands[5:])
    assert not [n for n in nodes(step) if n.name in ("add", "sub")]


def test_no_transpose_and_only_sampled_rows_reach_the_head():
    for family in SHAPES:
        program = lowered(family).programs["fused"]
        names = Counter(n.name for f in program.functions().values() for n in nodes(f))
        assert names["transpose"] == 0 and names["gather_rows"] == 1
        head = next(n for n in reversed(nodes(program.step)) if n.name == "linear")
        assert spec_of(head.op).results[0].shape[0] == "S"


@pytest.mark.parametrize("stage", STAGES)
def test_a_printed_stage_is_the_whole_truth(stage):
    whole = lowered("gemma", INTEGERS).programs
    text = whole[stage].text()
    again = Program.parse(text)
    assert again.text() == text
    rest = lower_to(again, "lowered", INTEGERS, FakeCodegen()).programs
    assert {s: p.text() for s, p in rest.items()} == {s: whole[s].text() for s in STAGES[STAGES.index(stage):]}


def test_the_given_program_is_left_alone_and_times_are_reported():
    program = captured(LLAMA)
    text = program.text()
    result = lower_to(program, "fused")
    assert program.text() == text and list(result.programs) == ["captured", "fused"]
    assert result.times[0].name == "clean_up" and all(t.seconds > 0 for t in result.times)


def test_stages_that_cannot_be_reached_are_refused():
    with pytest.raises(OptionError, match="unknown stage 'melted'"):
        lower_to(captured(LLAMA), "melted")
    with pytest.raises(OptionError, match=r"without a backend\): 'laid_out'; valid values are: captured, fused, sharded"):
        lower_to(captured(LLAMA), "laid_out")
    with pytest.raises(OptionError, match="valid values are: lowered"):
        lower_to(lowered("llama").last, "fused", FLOATS, FakeCodegen())


def test_a_pass_checks_what_it_requires():
    with pytest.raises(LegalityError, match="plan_memory requires 'selected', but .* has no kernels"):
        run_pass(captured(LLAMA), PlanMemory())


def test_bodies_are_cloned_where_formats_differ():
    def stored(name, shape):
        return "f32" if len(shape) == 1 else "q8_0" if name in ("0.down", "2.down") else "q4_0"

    program = lower_to(captured(GEMMA, stored), "laid_out", FLOATS, FakeCodegen()).last
    (sentence,) = program.fact("clones")  # layers 0 and 1 shared a body; layer 2 has its own
    assert sentence.startswith("@layer_4_2 is a copy of @layer_4 for 1 call (model.layers.1): ")
    assert sentence.endswith("is q4_0 instead of q8_0.")
    assert set(program.functions()) == {"layer_4", "layer_4_2", "layer_0", "step"}


# ---- what a backend lacks


LACKING = ("embedding", "linear", "linears", "gated_linear", "add_rms_norm", "rms_norm", "rope", "group", "gelu_tanh", "silu")


@pytest.mark.parametrize("family", SHAPES)
def test_what_a_backend_lacks_is_decomposed(family):
    program = lower_to(captured(SHAPES[family]), "laid_out", FLOATS, FakeCodegen(*LACKING)).last
    assert not {spec_of(op).op for _, op in program.operators()} & set(LACKING)
    weights = values(program)
    np.testing.assert_allclose(logits(program, weights), logits(captured(SHAPES[family]), weights), rtol=0, atol=2e-5)


LEAVES = ("attention", "gather_rows", "dot_general")


def test_all_that_is_missing_is_listed_with_its_module():
    program = lower_to(captured(LLAMA), "sharded").last
    with pytest.raises(UnsupportedError) as caught:
        run_pass(program, Decompose(lambda spec: spec.op not in LEAVES and spec.op not in ("embedding", "linear", "linears")))
    text = str(caught.value)
    assert "attention(f32['T', 4, 16]" in text and "in module self_attn (in @layer_0)" in text
    assert "gather_rows(f32" in text and "model.embed_tokens" in text
    assert text.count("dot_general(") == 6 and "linear" not in text  # q, k, v, o, down; the head


# ---- kernels and memory


def test_kernels_are_written_and_read_back():
    for _, op in lowered("llama").last.operators():
        if spec_of(op).op == "reshape":
            assert kernel_uses(op) == ()
            continue
        (use,) = kernel_uses(op)
        (wanted,) = FakeCodegen().select(spec_of(op)).uses
        assert use == wanted and use.kernel == KernelSpec(wanted.kernel.family, wanted.kernel.params)


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("options", [FLOATS, INTEGERS], ids=["f32", "int8"])
def test_values_fit_their_places(family, options):
    program = lowered(family, options).last
    weights = values(program)
    np.testing.assert_array_equal(logits(program, weights, machine=Arena), logits(program, weights))


def test_the_arena_is_smaller_than_its_values_together():
    program = lowered("llama").last
    hidden = 16 * 64 * 4
    assert program.fact("arena_bytes") < 10 * hidden
    assert program.fact("max_symbols") == {"T": 16, "R": 4, "S": 4}


def test_blocks_that_live_together_never_overlap():
    rng = np.random.default_rng(0)
    for _ in range(20):
        starts = rng.integers(0, 40, 60)
        blocks = [Block(64 * int(n), int(s), int(s + d)) for n, s, d in
                  zip(rng.integers(1, 30, 60), starts, rng.integers(0, 10, 60))]
        total = place_blocks(blocks)
        peak = max(sum(b.size for b in blocks if b.start <= t <= b.end) for t in range(50))
        assert peak <= total <= 1.5 * peak
        for i, a in enumerate(blocks):
            for b in blocks[:i]:
                if a.start <= b.end and b.start <= a.end:
                    assert a.offset + a.size <= b.offset or b.offset + b.size <= a.offset
