"""The artifact under test, opened once: its programs, its operators by place, and its weights as values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from adaptc import backends, blocks, packages
from adaptc.errors import OptionError, UnsupportedError
from adaptc.formats import FORMATS
from adaptc.ir import dialect
from adaptc.ir.build import short_name
from adaptc.ir.module import STEP, Program, Weight, callee, source_of, spec_of
from adaptc.ops.table import row
from adaptc.protocol import OpSpec, TensorSpec
from adaptc.runtime.loader import Artifact, load_artifact
from adaptc.verify.guard import Note

DENSE = FORMATS["f32"]


@dataclass(frozen=True)
class Place:
    """An operator of the laid-out program at one place. ``symbols`` are the weights and states among its operands,
    None for the others."""

    spec: OpSpec
    source: str
    symbols: tuple[str | None, ...]


class Subject:
    """An artifact and what the oracle reads of it.

    Values of weights come from the artifact's packed bytes; ``weights.check`` holds them against the digests of the
    model's own tensors. ``level`` is the CPU level that loading takes, ``levels`` are those of the artifact that this
    machine runs, ``not_run`` has the reason for each of the others.
    """

    def __init__(self, path, seed: int = 0):
        self.seed = seed
        self.artifact: Artifact = load_artifact(path)
        packages.require(self.artifact.manifest["provenance"], str(path))
        self.plan = self.artifact.plan
        self.backend = backends.launcher(self.plan.backend)
        self.level = self.backend.choose_level(self.plan)
        self.levels, self.not_run = self._levels()
        self.codegen = backends.codegen(self.plan.backend)
        if not hasattr(self.codegen, "unpack"):
            raise UnsupportedError(f"the backend {self.plan.backend!r} can't unpack the weights that it packed, so "
                                   "nothing says what they are.",
                                   hint="Its codegen needs `unpack` (adaptc.protocol.Codegen).")
        self.captured = Program.parse(self.artifact.read("ir/captured.mlir").decode(), "ir/captured.mlir")
        self.laid_out = Program.parse(self.artifact.read("ir/laid_out.mlir").decode(), "ir/laid_out.mlir")
        read = {dialect.attrs(op)["symbol"] for op in self.laid_out.step.entry_block.operations
                if op.operation.name == "adaptc.get"}
        self.stored: dict[str, Weight] = {n: w for n, w in self.laid_out.weights().items() if n in read}
        self._values: dict[str, np.ndarray] = {}
        self.trying = Note()
        """The operator that native code is about to run, for when it crashes."""

    def _levels(self) -> tuple[list[str], dict[str, str]]:
        runs, not_run = [], {}
        for level in self.plan.levels:
            try:
                runs.append(self.backend.choose_level(self.plan, level))
            except OptionError as error:
                not_run[level] = error.message
        return runs, not_run

    def random(self, *what: object) -> np.random.Generator:
        """The random numbers of one purpose: the same for the same seed, whatever else was drawn."""
        return np.random.default_rng([self.seed, *repr(what).encode()])

    def values(self, name: str) -> np.ndarray:
        """A weight's float32 values in its parameter's shape, unpacked from the artifact."""
        if name not in self.stored:  # read with its last two axes exchanged: see passes.bind_transposes
            tensor = self.captured.weights()[name].tensor
            return self.values(next(n for n, w in self.stored.items() if w.tensor == tensor)).swapaxes(-1, -2)
        if name not in self._values:
            weight = self.stored[name]
            shape, data = weight.spec.shape, np.frombuffer(self.artifact.weights[name], np.uint8)
            if weight.spec.format is None:
                made = data[: 4 * math.prod(shape)].view("<f4").reshape(shape)
            else:
                size = self.codegen.packed_bytes(weight.spec.format, shape)
                codes = self.codegen.unpack(weight.spec.format, shape, data[:size])
                made = blocks.dequantize(weight.spec.format, codes)
            self._values[name] = made.reshape(shape)
        return self._values[name]

    @cached_property
    def places(self) -> list[Place]:
        """The laid-out program's operators in program order, every place of every body; views that alias are none."""
        return list(_places(self.laid_out, self.laid_out.functions()[STEP], [None] * 4, ""))

    @cached_property
    def chooses(self) -> bool:
        """Whether some operator makes integers of float values, as routers do: a step, not a slope."""
        dtypes = lambda specs: {s.dtype for s in specs if isinstance(s, TensorSpec)}  # noqa: E731
        return any("i32" in dtypes(p.spec.results) and "f32" in dtypes(p.spec.operands) for p in self.places)

    def users(self, weight: str) -> list[int]:
        """Ids of the operators that read a weight."""
        return [i for i, place in enumerate(self.places) if weight in place.symbols]

    def describe(self, index: int) -> tuple[str, str]:
        """("14 linears", its module) of the plan's operator ``index``."""
        operator = self.plan.operators()[index]
        return f"{operator.id} {operator.op}", operator.source

    def load(self, threads: int, pages: dict[str, int]):
        objects = self.artifact.kernels(self.level)
        return self.backend.load(self.plan, objects, self.artifact.weights, threads=threads, pages=pages)

    def library(self, level: str):
        """The kernels of one of ``levels``, to be called one at a time."""
        return self.backend.library(self.artifact.kernels(level))


def _places(program: Program, function, arguments: list, path: str):
    names = dict(zip(function.entry_block.arguments, arguments))
    for op in function.entry_block.operations:
        operation = op.operation
        source = ".".join(filter(None, (path, source_of(op))))
        symbols = [names.get(v) for v in operation.operands]
        if operation.name == "adaptc.get":
            names[operation.results[0]] = dialect.attrs(op)["symbol"]
        elif operation.name == "func.call":
            yield from _places(program, program.functions()[callee(op)], symbols, source)
        elif operation.name != "func.return" and not row(short_name(op)).aliases:
            yield Place(spec_of(op), source, tuple(symbols))
