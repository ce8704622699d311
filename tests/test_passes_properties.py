"""Passes on random programs: whatever they do, they keep the meaning, and a second run finds nothing to do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from arena import Arena
from fake_codegen import FakeCodegen
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_programs import elementwise, meaning, program, values

from adaptc.backends.reference.interpreter import Reference
from adaptc.ir import legality
from adaptc.ir.module import STAGES, Program, spec_of
from adaptc.ops.dense import QUANTIZABLE
from adaptc.ops.table import row
from adaptc.options import CHOICES, CompileOptions
from adaptc.passes.base import run_pass
from adaptc.passes.decompose import Decompose
from adaptc.passes.pipeline import fusion, layout, lower_to, lowering

OPTIONS = CompileOptions(max_step_tokens=8, max_requests=2, max_context=16, page_size=4)
PASSES = list({one.name: one for one in fusion()}.values())
RUN = settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate, Phase.shrink],
               suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example])


LACKED = ("linears", "gated_linear", "add_rms_norm", "add_layer_norm", "rms_norm", "layer_norm", "rope", "group")
"""Operators that a backend may lack, in random programs."""


def close(got: np.ndarray, wanted: np.ndarray, share: float = 0.0) -> None:
    """Equal up to what another order of float32 operations does, or to a larger share of the largest logit."""
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=max(share, 3e-5) * max(1.0, float(np.abs(wanted).max())))


@pytest.mark.parametrize("one", PASSES, ids=lambda one: one.name)
@RUN
@given(data=st.data())
def test_a_pass_keeps_the_meaning(one, data):
    """After the first few of the pipeline's passes before it; after all of them where it requires what they ensure."""
    before = program(data.draw)
    legality.check(before)
    weights = values(before)
    wanted = meaning(before, weights)
    done = before.copy()
    place = [p.name for p in fusion()].index(one.name)
    few = data.draw(st.integers(min(1, place), place))  # the first cleans up, which others count on
    for earlier in fusion()[: few if set(one.requires) <= set(STAGES) else place]:
        run_pass(done, earlier)
    run_pass(done, one)
    close(meaning(done, weights), wanted)
    text = done.text()
    assert Program.parse(text).text() == text
    run_pass(done, one)
    assert done.text() == text


FLOAT_STATES = {"f32": 0.0, "f16": 0.02, "bf16": 0.1}
"""Dtypes that states may be kept in, and how far rounding to them may move logits, of the largest one."""

LATE = [one.name for one in (*layout(OPTIONS, FakeCodegen(), 4), *lowering(OPTIONS, FakeCodegen()))]


@pytest.mark.parametrize("name", LATE)
@RUN
@given(data=st.data())
def test_a_late_pass_keeps_the_meaning(name, data):
    """One of the layout's or lowering's, after those before it, with any formats and whatever a backend lacks."""
    options = replace(OPTIONS, weights=data.draw(st.sampled_from(["f32", "bf16", "int8", "int4"])),
                      kv=data.draw(st.sampled_from(sorted(FLOAT_STATES))),
                      activations=data.draw(st.sampled_from(CHOICES["activations"])))
    backend = FakeCodegen(*data.draw(st.sets(st.sampled_from(LACKED))))
    done = lower_to(program(data.draw), "sharded").last
    weights = values(done)
    for one in (*layout(options, backend, 4), *lowering(options, backend)):
        if one.name == "select_kernels":
            done.set_fact("stage", "laid_out")
        before, text = meaning(done, weights), done.text()
        run_pass(done, one)
        if one.name == name:
            break
    if name == "store_states":
        close(meaning(done, weights), before, FLOAT_STATES[options.kv])
    elif name == "quantize_activations" and options.activations == "int8":
        _are_quantized(done)
        close(meaning(done, weights), before, 0.2)
    elif name == "plan_memory":
        _fits_its_places(done, weights)
    else:
        close(meaning(done, weights), before)
    text = done.text()
    assert Program.parse(text).text() == text
    run_pass(done, one)
    assert done.text() == text


def _are_quantized(done: Program) -> None:
    """Maps of integer weights alone, of an input that divides into groups, read codes; no others do."""
    for _, op in done.operators():
        found = spec_of(op)
        if found.op in QUANTIZABLE:
            weights = [s for s in found.operands if len(s.shape) == 2 and s.format is not None]
            integer = not any(s.format.is_float for s in weights) and weights[0].shape[1] % 32 == 0
            assert (found.operands[0].dtype == "i8") == integer, found


def _fits_its_places(done: Program, weights) -> None:
    step = ([1, 2, 3], [0, 1, 2], [0, 0, 0], [2])
    np.testing.assert_array_equal(Arena(done, weights.__getitem__).step(*step),
                                  Reference(done, weights.__getitem__).step(*step))


@RUN
@given(data=st.data())
def test_the_pipeline_keeps_the_meaning(data):
    """Every stage; the lowered one also with every value at its place in the arena; from text as from the program."""
    before = program(data.draw)
    weights = values(before)
    wanted = meaning(before, weights)
    lacks = data.draw(st.sets(st.sampled_from(LACKED)))
    backend = FakeCodegen(*lacks)
    stages = lower_to(before, "lowered", OPTIONS, backend).programs
    for stage in STAGES:
        close(meaning(stages[stage], weights), wanted)
    _fits_its_places(stages["lowered"], weights)
    again = lower_to(Program.parse(stages["fused"].text()), "lowered", OPTIONS, backend)
    assert again.last.text() == stages["lowered"].text()


@RUN
@given(data=st.data())
def test_any_operator_may_be_decomposed(data):
    fused = lower_to(program(data.draw), "sharded").last
    weights = values(fused)
    wanted = meaning(fused, weights)
    names = sorted({spec_of(op).op for _, op in fused.operators()})
    lacks = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    Decompose(lambda spec: row(spec.op).decompose is None or spec.op not in lacks).run(fused)
    legality.check(fused)
    assert not {spec_of(op).op for _, op in fused.operators()} & {n for n in lacks if row(n).decompose}
    close(meaning(fused, weights), wanted)


def test_random_programs_use_the_tables_operators():
    assert {"silu", "gelu", "tanh", "sin", "neg"} <= set(elementwise(1)) and {"add", "max"} <= set(elementwise(2))
