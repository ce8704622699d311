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
from adaptc import backends, blocks
from adaptc.backends.reference.interpreter import Reference
from adaptc.formats import FORMATS
from adaptc.ir.module import Program
from adaptc.ops.table import row
from adaptc.plan import Buffer, Call, Operator, Plan
from adaptc.runtime.loader import Artifact, load_artifact
from adaptc.sources import open_source
from adaptc.weights import parameter

MODELS = {
    "llama": lambda folder: tiny_models.write(folder / "model", "llama"),
    "gemma3": lambda folder: tiny_models.write(folder / "model", "gemma3_text"),
    "llama-gguf": lambda folder: tiny_gguf.write(folder / "tiny.gguf", "llama"),
    "gemma3-gguf": lambda folder: tiny_gguf.write(folder / "tiny.gguf", "gemma3"),
}
OPTIONS = {
    "f32": {"page_size": 3}, "int8": {"activations": "int8", "page_size": 5},
    "int8-bf16": {"activations": "int8", "kv": "bf16"}, "int8-f32": {"activations": "int8", "kv": "f32"},
    "f32-f16": {"kv": "f16"},
}
SIZES = {"max_step_tokens": 48, "max_requests": 3, "max_context": 96}
STEPS = (
    {0: 20},  # tokens that each request's next chunk has, in order: a prefill beyond the window,
    {0: 1, 1: 37},  # a decode beside a longer prefill,
    {1: 1, 0: 3, 2: 1},  # requests in another order, and one that starts
    {0: 1, 1: 1, 2: 1},
)
BOUND = 2e-6
"""Largest error of a float result, relative to the operator's largest value."""


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

    shifted   role of an added input → (the input it copies, what is added to it)
    """

    artifact: Artifact
    reference: Reference
    threads: int = 2
    shifted: Mapping[str, tuple[str, int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        plan = self.artifact.plan
        self.pages = {g.name: plan.max_requests * g.max_pages + 2 for g in plan.groups}  # two that stay free
        self.executable = backends.launcher(plan.backend).load(
            plan, self.artifact.kernels(plan.levels[0]), self.artifact.weights, threads=self.threads, pages=self.pages
        )
        rng = np.random.default_rng(3)
        for group in plan.groups:
            ids = rng.permutation(np.arange(1, self.pages[group.name] - 1))
            self.executable.inputs(f"pages:{group.name}")[...] = ids.reshape(plan.max_requests, -1)
            for state in group.states:
                self.executable.state(state)[...] = 0xFF  # NaN
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
                elif wanted.flags.writeable:
                    wanted[...] = got

        self.reference.step(tokens, positions, requests, sampled, observe)
        assert next(left, None) is None, "the plan has operators that the program lacks"


def agree(got: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal, but for a float's rounding, and for a code that lies between two and may go either way."""
    if wanted.dtype.kind != "f":
        difference = np.abs(got.astype(np.int64) - wanted)
        return difference.max(initial=0) <= 1 and (difference > 0).mean() < 1e-3
    return np.allclose(got, wanted, rtol=0, atol=BOUND * np.abs(wanted).max(initial=0))


def reference(model: Path, artifact: Artifact) -> Reference:
    program = Program.parse(artifact.read("ir/laid_out.mlir").decode())
    source, weights = open_source(model), program.weights()
    values = {name: parameter(source, weight) for name, weight in weights.items()}
    return Reference(program, values.__getitem__)


@pytest.mark.parametrize("model, options", [
    *((model, options) for model in MODELS for options in ("f32", "int8")),
    ("llama", "f32-f16"), ("gemma3", "int8-bf16"), ("gemma3", "int8-f32"),
])  # fmt: skip
def test_every_operator_gives_what_it_means(compiled, model, options):
    path, out = compiled(model, options)
    artifact = load_artifact(out)
    assert Walk(artifact, reference(path, artifact)).run() == []
