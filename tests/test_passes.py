"""Every pass on its cases (tests/passes/*.mlir): what it does, what it declines, and that meanings stay."""

from __future__ import annotations

import dataclasses
import importlib
import re

import numpy as np
import pytest
from mlir_cases import FOLDER, build, cases, check, pass_class

import adaptc.passes
from adaptc.backends.reference.interpreter import Reference
from adaptc.errors import AdaptcError
from adaptc.ir import legality
from adaptc.ir.module import Program
from adaptc.passes.base import PROPERTIES, run_pass

NAMES = adaptc.passes.names()


def meaning(program: Program) -> np.ndarray:
    """Logits of two requests over a prefill and a decode step, with random weights."""
    rng = np.random.default_rng(3)
    weights = {n: _drawn(rng, w) for n, w in sorted(program.weights().items())}
    reference = Reference(program, weights.__getitem__)
    first = reference.step(rng.integers(0, 8, 6), [0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1], [2, 5])
    return np.concatenate([first, reference.step([1, 2], [3, 3], [0, 1], [0, 1])])


def _drawn(rng, weight) -> np.ndarray:
    """Values of the file's tensor, as the weight's rule says."""
    turned = weight.rows[:1] == ("transpose",)
    shape = weight.spec.shape[:-2] + weight.spec.shape[:-3:-1] if turned else weight.spec.shape
    stored = rng.standard_normal(shape).astype(np.float32)
    return np.ascontiguousarray(stored.swapaxes(-1, -2)) if turned else stored


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_case(case):
    assert case.file == case.get("RUN")
    program = Program.parse(case.text, case.name)
    legality.check(program)
    before, text = meaning(program), program.text()
    if case.get("ERROR"):
        with pytest.raises(AdaptcError) as caught:
            run_pass(program, build(case))
        assert case.get("ERROR") in str(caught.value)
        return
    run_pass(program, build(case))
    after = program.text()
    check(case, after)
    same = after.partition("\n")[2] == text.partition("\n")[2]  # the first line has the facts, where a choice is noted
    assert same == (case.get("DECLINE") is not None), after
    assert Program.parse(after).text() == after
    np.testing.assert_allclose(meaning(program), before, rtol=0, atol=float(case.get("TOLERANCE") or 1e-5))
    run_pass(program, build(case))
    assert program.text() == after, "a second run must find nothing to do"


@pytest.mark.parametrize("name", NAMES)
def test_pass_is_a_frozen_dataclass_in_the_file_of_its_name(name):
    one = pass_class(name)
    assert dataclasses.is_dataclass(one) and one.__dataclass_params__.frozen
    assert re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", one.__name__).lower() == one.name == name
    assert set(one.ensures) <= set(PROPERTIES)
    assert one.__doc__ and importlib.import_module(f"adaptc.passes.{name}").__doc__


def test_every_pass_has_cases():
    """What it does, and what it leaves alone or refuses."""
    of = {name: [case for case in cases() if case.file == name] for name in NAMES}
    assert {path.stem for path in FOLDER.glob("*.mlir")} == set(NAMES)
    for name, found in of.items():
        assert any(not (case.get("DECLINE") or case.get("ERROR")) for case in found), name
        assert any(case.get("DECLINE") or case.get("ERROR") for case in found), name
