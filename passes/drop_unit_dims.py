"""Functions pass token tensors as [T, ...]: leading dimensions of 1 that models are written with go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir

from adaptc.ir import dialect
from adaptc.ir.build import Builder
from adaptc.ir.functions import bodies, replace_call, returned, set_returned
from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, spec
from adaptc.protocol import TensorSpec


@dataclass(frozen=True)
class DropUnitDims:
    """Reshapes at the boundaries of bodies and calls; ``push_views`` then makes them cancel."""

    name: ClassVar[str] = "drop_unit_dims"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("no_unit_dims",)

    def run(self, program: Program) -> None:
        with program.editing():
            for name, function, calls in list(bodies(program)):
                _arguments(function, calls)
                _results(function, calls)


def slim(kind) -> tuple[int | str, ...]:
    """A shape without the 1s before its first symbol; shapes without a symbol stay."""
    shape = getattr(kind, "shape", ())
    first = next((i for i, d in enumerate(shape) if d != 1), 0)
    return shape[first:] if any(isinstance(d, str) for d in shape) else shape


def _arguments(function, calls: list[Node]) -> None:
    for argument in function.entry_block.arguments:
        old = spec(argument)
        shape = slim(old)
        if shape == getattr(old, "shape", ()):
            continue
        argument.set_type(dialect.to_type(TensorSpec(old.dtype, shape)))
        wide = Builder(ir.InsertionPoint.at_block_begin(function.entry_block)).reshape(argument, shape=old.shape)
        argument.replace_all_uses_except(wide, wide.owner.operation)
        for call in calls:
            n = argument.arg_number
            call.op.operands[n] = call.builder().reshape(call.operands[n], shape=shape)


def _results(function, calls: list[Node]) -> None:
    end = returned(function)
    shapes = [slim(spec(v)) for v in end.operands]
    b = end.builder()
    values = [v if s == spec(v).shape else b.reshape(v, shape=s) for v, s in zip(end.operands, shapes)]
    set_returned(function, values)
    for call in calls:
        changed = [i for i, r in enumerate(call.results) if spec(r).shape != shapes[i]]
        old = [spec(r) for r in call.results]
        new = replace_call(call, call.operands, [v.type for v in values], range(len(values)))
        for i in changed:
            wide = new.builder_after().reshape(new.results[i], shape=old[i].shape)
            new.results[i].replace_all_uses_except(wide, wide.owner.operation)
