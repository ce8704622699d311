"""Passes on random programs: whatever they do, they keep the meaning, and a second run finds nothing to do."""

from __future__ import annotations

import numpy as np
import pytest
from arena import Arena
from fake_codegen import FakeCodegen
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_programs import elementwise, meaning, program, values

from adaptc.ir import legality
from adaptc.ir.module import STAGES, Program, spec_of
from adaptc.options import CompileOptions
from adaptc.passes.base import run_pass
from adaptc.passes.decompose import Decompose
from adaptc.passes.pipeline import fusion, lower_to

OPTIONS = CompileOptions(max_step_tokens=8, max_requests=2, max_context=16, page_size=4)
PASSES = list({one.name: one for one in fusion()}.values())
RUN = settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate, Phase.shrink],
               suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example])


def close(got: np.ndarray, wanted: np.ndarray) -> None:
    """Equal up to what another order of float32 operations does, relative to the largest logit."""
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-5 * max(1.0, float(np.abs(wanted).max())))


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


@RUN
@given(data=st.data())
def test_the_pipeline_keeps_the_meaning(data):
    """Every stage; the lowered one also with every value at its place in the arena; from text as from the program."""
    before = program(data.draw)
    weights = values(before)
    wanted = meaning(before, weights)
    lacks = data.draw(st.sets(st.sampled_from(["linears", "gated_linear", "add_rms_norm", "add_layer_norm", "rms_norm", "layer_norm", "rope", "group"])))
    backend = FakeCodegen(*lacks)
    stages = lower_to(before, "lowered", OPTIONS, backend).programs
    for stage in STAGES:
        close(meaning(stages[stage], weights), wanted)
    machine = Arena(stages["lowered"], weights.__getitem__)
    plain = machine.step([1, 2, 3], [0, 1, 2], [0, 0, 0], [2])
    np.testing.assert_array_equal(plain, meaning_of(stages["lowered"], weights))
    again = lower_to(Program.parse(stages["fused"].text()), "lowered", OPTIONS, backend)
    assert again.last.text() == stages["lowered"].text()


def meaning_of(lowered: Program, weights) -> np.ndarray:
    from adaptc.backends.reference.interpreter import Reference

    return Reference(lowered, weights.__getitem__).step([1, 2, 3], [0, 1, 2], [0, 0, 0], [2])


@RUN
@given(data=st.data())
def test_any_operator_may_be_decomposed(data):
    fused = lower_to(program(data.draw), "sharded").last
    weights = values(fused)
    wanted = meaning(fused, weights)
    names = sorted({spec_of(op).op for _, op in fused.operators()})
    lacks = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    from adaptc.ops.table import row

    Decompose(lambda spec: row(spec.op).decompose is None or spec.op not in lacks).run(fused)
    legality.check(fused)
    assert not {spec_of(op).op for _, op in fused.operators()} & {n for n in lacks if row(n).decompose}
    close(meaning(fused, weights), wanted)


def test_random_programs_use_the_tables_operators():
    assert {"silu", "gelu", "tanh", "sin", "neg"} <= set(elementwise(1)) and {"add", "max"} <= set(elementwise(2))
