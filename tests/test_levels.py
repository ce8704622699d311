"""Several CPU levels in one artifact: compiled, chosen, forced, and refused."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import numpy as np
import pytest

import adaptc
import planted
import tiny_models
from adaptc.backends.cpu import launch
from adaptc.backends.cpu.codegen import CODEGEN, _rows
from adaptc.backends.cpu.levels import host_flags, level_of
from adaptc.backends.cpu.toolchain import compile_mlir
from adaptc.errors import ArtifactError, OptionError
from adaptc.runtime.loader import load_artifact
from adaptc.verify import verify
from adaptc.verify.subject import Subject

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 hosts generate x86-64 code")

LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4+avx512vnni")
OPTIONS = {"weights": "int8", "activations": "int8", "page_size": 4, "max_step_tokens": 32}
TOKENS = np.random.default_rng(0).integers(10, tiny_models.VOCABULARY, 40).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("levels") / "model", "llama")


@pytest.fixture(scope="module")
def several(model) -> Path:
    out = model.parent / "several.adapt"
    report = adaptc.compile(model, "cpu", output=out, level=LEVELS, **OPTIONS)
    assert report.levels == LEVELS
    return out


def test_kernels_by_level_and_weights_once(model, several, tmp_path):
    """Each level's objects are those that it gets alone; everything else but plan and manifest is the same."""
    alone = tmp_path / "alone.adapt"
    adaptc.compile(model, "cpu", output=alone, **OPTIONS)
    both, one = load_artifact(several), load_artifact(alone)
    assert both.plan.levels == tuple(both.manifest["levels"]) == LEVELS
    assert one.plan.levels == ("x86-64-v3",) and one.manifest["options"]["level"] == "x86-64-v3"
    assert both.kernels("x86-64-v3") == one.kernels("x86-64-v3")
    assert len({frozenset(both.kernels(level)) for level in LEVELS}) == 1
    kept = lambda artifact: {name: entry for name, entry in artifact.manifest["files"].items()  # noqa: E731
                             if not name.startswith(("kernels/", "plan"))}  # fmt: skip
    assert kept(both) == kept(one)


def test_verify_calls_the_kernels_of_every_level_that_runs(several, monkeypatch):
    monkeypatch.setattr(launch, "host_flags", lambda: host_flags() - {"avx512f"})
    (_, operator) = verify(several, levels=("operator",)).levels
    assert operator.passed and "for x86-64-v2, x86-64-v3, " in operator.covered[0]
    (not_run, steps) = operator.left_out
    assert not_run.startswith("kernels for x86-64-v4+avx512vnni: not run") and "avx512f" in not_run
    assert steps.startswith("whole steps with kernels for x86-64-v2: loading takes x86-64-v3")


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_keeps_the_equivalences(several, level):
    missing = level_of(level).missing(platform.machine(), host_flags())
    if missing:
        pytest.skip(f"not run: no {', '.join(missing)}")
    with adaptc.load(several, threads=1, level=level) as session, adaptc.load(several, threads=2, level=level) as two:
        whole = session.score(TOKENS)
        for chunk in (1, 5):
            assert np.array_equal(session.score(TOKENS, chunk=chunk), whole)
        assert np.array_equal(two.score(TOKENS), whole)
    with adaptc.load(several, threads=1, level="x86-64-v2") as session:
        assert np.abs(session.score(TOKENS) - whole).max() < 1e-2 * np.abs(whole).max()


def test_loading_chooses_the_best(several, monkeypatch):
    chosen = []
    load = launch.CpuLauncher.load

    def noted(self, plan, objects, *args, **options):
        chosen.append(objects)
        return load(self, plan, objects, *args, **options)

    monkeypatch.setattr(launch.CpuLauncher, "load", noted)
    runs = [name for name in LEVELS if not level_of(name).missing(platform.machine(), host_flags())]
    adaptc.load(several, threads=1).close()
    monkeypatch.setattr(launch, "host_flags", lambda: frozenset(level_of("x86-64-v2").flags))
    adaptc.load(several, threads=1).close()
    artifact = load_artifact(several)
    assert chosen == [artifact.kernels(runs[-1]), artifact.kernels("x86-64-v2")]
    with pytest.raises(OptionError, match="can't run level x86-64-v3: for x86-64-v3 this CPU lacks avx"):
        adaptc.load(several, level="x86-64-v3")
    monkeypatch.setattr(launch, "host_flags", lambda: frozenset())
    with pytest.raises(ArtifactError, match="for x86-64-v2 this CPU lacks .*; for x86-64-v3 this CPU lacks"):
        adaptc.load(several)


def test_a_fault_at_one_level_is_named_with_it(several, tmp_path):
    """A kernel that is wrong at the level that loading doesn't take."""
    plan = load_artifact(several).plan
    norm = next(o for o in plan.operators() if o.op == "rms_norm")
    object_ = next(k.object for k in plan.kernels if k.symbol == norm.calls[0].kernel)
    params = dict(CODEGEN.select(Subject(several).places[norm.id].spec).uses[0].kernel.params) | {"eps": 1e-2}
    text = _rows("FAMILIES")["rms_norm"].emit(params, norm.calls[0].kernel, level_of("x86-64-v2"))
    bad = planted.copy(several, tmp_path / "bad.adapt", f"kernels/x86-64-v2/{object_}",
                       lambda _: compile_mlir(text, "x86-64-v2"))
    first = verify(bad, levels=("operator",)).first
    assert first.where.endswith(" rms_norm") and "for x86-64-v2 don't give what the operator means" in first.what


def test_native_is_recorded_by_name(model, tmp_path):
    report = adaptc.compile(model, "cpu", output=tmp_path / "n.adapt", level="native", **OPTIONS)
    name = CODEGEN.level("native")
    manifest = json.loads((tmp_path / "n.adapt" / "manifest.json").read_text())
    assert report.levels == (name,) and manifest["options"]["level"] == name and "native" not in json.dumps(manifest)
    with adaptc.load(tmp_path / "n.adapt", threads=1) as session:
        session.score(TOKENS[:3])


def test_another_machine_is_refused_with_the_reason(model, tmp_path):
    with pytest.raises(OptionError, match="armv8-a can't be compiled here: torch-mlir brings a code generator for"):
        adaptc.compile(model, "cpu", output=tmp_path / "a.adapt", level=["x86-64-v3", "armv8-a"])
    assert not list(tmp_path.iterdir())
