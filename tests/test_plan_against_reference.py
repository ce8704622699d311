"""Every operator of a compiled plan against its meaning, on the inputs that the plan itself computed.

The reference backend walks the laid-out program beside the plan, in the same order; after each operator it goes on
from the plan's own result. So no error of one operator hides or excuses another's, the bounds are those of a single
kernel, and a fault is reported under the name of the operator that has it, and under no other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import adaptc
import tiny_gguf
import tiny_models
from adaptc import backends, driver
from adaptc.backends.cpu import packing
from adaptc.backends.reference.interpreter import Reference
from adaptc.ir.module import Program
from adaptc.ops.table import row
from adaptc.plan import Call, Operator, Plan
from adaptc.runtime.loader import Artifact, load_artifact
from adaptc.sources import open_source
from adaptc.weights import parameter
from cpu_kernel import aligned

pytestmark = pytest.mark.usefixtures("kept_captures")

MODELS = {
    "llama": lambda folder: tiny_models.write(folder / "model", "llama"),
    "gemma3": lambda folder: tiny_models.write(folder / "model", "gemma3_text"),
    "llama-gguf": lambda folder: tiny_gguf.write(folder / "tiny.gguf", "llama"),
    "gemma3-gguf": lambda folder: tiny_gguf.write(folder / "tiny.gguf", "gemma3"),
}
OPTIONS = {
    "f32": {"page_size": 3},
    "f32-f16": {"kv": "f16"},
    "int8": {"activations": "int8", "page_size": 5},  # where weights are integers; their caches are f16
    "int8-f32": {"weights": "int8", "activations": "int8", "kv": "f32"},
    "int4-bf16": {"weights": "int4", "activations": "int8", "kv": "bf16"},
}
SIZES = {"max_step_tokens": 48, "max_requests": 3, "max_context": 96}
STEPS = (
    {0: 20},  # tokens that each request's next chunk has, in order: a prefill beyond the window,
    {0: 1, 1: 37},  # a decode beside a longer prefill,
    {1: 1, 0: 3, 2: 1},  # requests in another order, and one that starts
    {0: 1, 1: 1, 2: 1},
)
BOUND = 1e-6
"""Largest error of a float result, relative to the operator's largest value; measured: 6e-7. Codes are equal."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(model, artifact) of a row of MODELS with a row of OPTIONS, each compiled once."""
    folders: dict[str, Path] = {}
    models: dict[str, Path] = {}

    def get(model: str, options: str) -> tuple[Path, Path]:
        if model not in models:
            folders[model] = tmp_path_factory.mktemp(model)
            models[model] = MODELS[model](folders[model])
        out = folders[model] / f"{options}.adapt"
        if not out.exists():
            adaptc.compile(models[model], "cpu", output=out, **SIZES, **OPTIONS[options])
        return models[model], out

    return get


@dataclasses.dataclass
class Walk:
    """One plan beside the reference, over the same steps. ``faults`` are the operators whose result is wrong.

    fill      byte that fills cache pages at first: 0xFF makes NaN of what is read but was never written
    shifted   role of an added input → (the input it copies, what is added to it)
    """

    artifact: Artifact
    reference: Reference
    fill: int = 0xFF
    shifted: Mapping[str, tuple[str, int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        plan = self.artifact.plan
        self.pages = {g.name: plan.max_requests * g.max_pages + 2 for g in plan.groups}  # two that stay free
        self.executable = backends.launcher(plan.backend).load(
            plan, self.artifact.kernels(plan.levels[0]), self.artifact.weights, threads=2, pages=self.pages
        )
        rng = np.random.default_rng(3)
        for group in plan.groups:
            ids = rng.permutation(np.arange(1, self.pages[group.name] - 1))
            self.executable.inputs(f"pages:{group.name}")[...] = ids.reshape(plan.max_requests, -1)
            for state in group.states:
                self.executable.state(state)[...] = self.fill
        self.faults: list[Operator] = []
        self.operators = plan.operators()

    def run(self) -> list[Operator]:
        rng = np.random.default_rng(0)
        lengths = dict.fromkeys(range(3), 0)
        try:
            for step in STEPS:
                positions = np.concatenate([lengths[r] + np.arange(n) for r, n in step.items()])
                requests = np.repeat(list(step), list(step.values()))
                tokens = rng.integers(10, self.artifact.plan.vocabulary, len(positions))
                self._step(tokens, positions, requests, np.cumsum(list(step.values())) - 1)
                lengths |= {r: lengths[r] + n for r, n in step.items()}
        finally:
            self.executable.close()
        return self.faults

    def _step(self, tokens, positions, requests, sampled) -> None:
        """One step of both. The reference's results are overwritten with the plan's as it goes."""
        roles = {"tokens": tokens, "positions": positions, "requests": requests, "sampled": sampled}
        for role, values in roles.items():
            self.executable.inputs(role)[: len(values)] = values
        for role, (copied, added) in self.shifted.items():
            self.executable.inputs(role)[...] = self.executable.inputs(copied) + added
        self.symbols = {"T": len(tokens), "R": 3, "S": len(sampled)}
        left = iter(self.operators)

        def observe(source: str, op: str, results: tuple) -> None:
            if row(op).aliases:  # it is its operand's memory
                return
            operator = next(left)
            assert (operator.op, operator.source) == (op, source)
            self.executable.run(self.symbols, stop_after=operator.id)
            for handle, wanted in zip(operator.outputs, results, strict=True):
                got = self.executable.read(handle, self.symbols)
                assert got.shape == wanted.shape and got.dtype == wanted.dtype
                if not agree(got, wanted):
                    self.faults.append(operator)
                if wanted.flags.writeable:  # else a constant
                    wanted[...] = got

        self.reference.step(tokens, positions, requests, sampled, observe)
        assert next(left, None) is None, "the plan has operators that the program lacks"


def agree(got: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal, but for a float's rounding."""
    if wanted.dtype.kind != "f":
        return np.array_equal(got, wanted)
    return np.allclose(got, wanted, rtol=0, atol=BOUND * np.abs(wanted).max(initial=0))


def reference(model: Path, artifact: Artifact) -> Reference:
    program = Program.parse(artifact.read("ir/laid_out.mlir").decode())
    source, weights = open_source(model), program.weights()
    values = {name: parameter(source, weight) for name, weight in weights.items()}
    return Reference(program, values.__getitem__)


@pytest.mark.parametrize("model, options", [
    *((model, "f32") for model in MODELS), ("llama-gguf", "int8"), ("gemma3-gguf", "int8"),
    ("llama", "int4-bf16"), ("gemma3", "int8-f32"), ("llama", "f32-f16"),
])  # fmt: skip
def test_every_operator_gives_what_it_means(compiled, model, options):
    path, out = compiled(model, options)
    artifact = load_artifact(out)
    assert Walk(artifact, reference(path, artifact)).run() == []


# ---- planted faults


def chosen(plan: Plan, name: str) -> Operator:
    """An operator from the middle of the plan."""
    found = [o for o in plan.operators() if o.op == name]
    return found[(len(found) - 1) // 2]


def replaced(plan: Plan, operator: Operator, **changes) -> Plan:
    (segment,) = plan.segments
    changed = dataclasses.replace(operator, **changes)
    operators = tuple(changed if o.id == operator.id else o for o in segment.operators)
    return dataclasses.replace(plan, segments=(dataclasses.replace(segment, operators=operators),))


def misread(artifact: Artifact, operator: Operator, role: str, added: int):
    """The operator's last kernel reads input ``role`` as if ``added`` stood in every entry on top."""
    plan = artifact.plan
    right = next(b for b in plan.buffers if b.handle == plan.inputs[role])
    wrong = dataclasses.replace(right, handle="wrong")
    *calls, last = operator.calls
    last = Call(last.kernel, tuple("wrong" if h == right.handle else h for h in last.buffers))
    plan = replaced(plan, operator, calls=(*calls, last))
    plan = dataclasses.replace(plan, buffers=(*plan.buffers, wrong), inputs=plan.inputs | {"wrong": "wrong"})
    return dataclasses.replace(artifact, plan=plan), {"wrong": (role, added)}


def page_one_off(artifact: Artifact, operator: Operator):
    return misread(artifact, operator, f"pages:{artifact.plan.groups[0].name}", 1)


def mask_shifted(artifact: Artifact, operator: Operator):
    return misread(artifact, operator, "positions", 1)


def repacked(artifact: Artifact, operator: Operator, change):
    """``change`` is applied to the codes of the operator's first weight with scales, on a copy for it alone."""
    specs = {name: w.spec for name, w in Program.parse(artifact.read("ir/laid_out.mlir").decode()).weights().items()}
    held = {b.handle: b for b in artifact.plan.buffers if b.kind == "weight"}
    handles = [h for call in operator.calls for h in call.buffers if h in held]
    right = next(held[h] for h in handles if specs[held[h].source].format.scale)
    format, shape = specs[right.source].format, specs[right.source].shape
    codes = packing.unpack(format, shape, artifact.weights[right.source])
    codes = {name: values.copy() for name, values in codes.items()}
    change(codes)
    data = aligned(np.frombuffer(packing.pack(format, shape, codes), np.uint8))
    wrong = dataclasses.replace(right, handle="wrong", source="wrong")
    calls = tuple(Call(c.kernel, tuple("wrong" if h == right.handle else h for h in c.buffers)) for c in operator.calls)
    plan = replaced(artifact.plan, operator, calls=calls)
    plan = dataclasses.replace(plan, buffers=(*plan.buffers, wrong))
    return dataclasses.replace(artifact, plan=plan, weights={**artifact.weights, "wrong": memoryview(data)}), {}


def scale_swapped(artifact: Artifact, operator: Operator):
    def change(codes):
        codes["scale0"][5, :2] = codes["scale0"][5, 1::-1]

    return repacked(artifact, operator, change)


def tail_dropped(artifact: Artifact, operator: Operator):
    def change(codes):
        codes["codes"][-1, -8:] = 0

    return repacked(artifact, operator, change)


@pytest.mark.parametrize("fault, name", [
    (page_one_off, "attention"), (mask_shifted, "attention"), (scale_swapped, "linear"), (scale_swapped, "gated_linear"),
    (tail_dropped, "linear"), (scale_swapped, "linears"),
])  # fmt: skip
@pytest.mark.parametrize("options", ["f32", "int8"])
def test_a_planted_fault_is_found_where_it_is(compiled, options, fault, name):
    path, out = compiled("gemma3-gguf", options)
    artifact = load_artifact(out)
    operator = chosen(artifact.plan, name)
    faulty, shifted = fault(artifact, operator)
    found = Walk(faulty, reference(path, artifact), fill=0, shifted=shifted).run()
    assert {o.id for o in found} == {operator.id}


def test_another_epsilon_is_found_where_it_is(compiled, tmp_path):
    path, out = compiled("gemma3", "f32")
    text = driver.stage_text(out, "laid_out")
    right, wrong = "eps = 9.9999999999999995E-7", "eps = 1.0E-5"
    assert right in text
    (tmp_path / "laid_out.mlir").write_text(text.replace(right, wrong))
    adaptc.compile(path, "cpu", output=tmp_path / "a.adapt", from_ir=tmp_path / "laid_out.mlir", **SIZES, **OPTIONS["f32"])
    faults = Walk(load_artifact(tmp_path / "a.adapt"), reference(path, load_artifact(out))).run()
    assert faults and all("norm" in o.op for o in faults)
