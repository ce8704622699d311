"""Writes on each operator which kernels carry it out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from adaptc.errors import UnsupportedError
from adaptc.ir import dialect
from adaptc.ir.module import Program, source_of, spec_of
from adaptc.ops.table import row
from adaptc.protocol import Codegen, KernelSpec, KernelUse, TensorSpec


@dataclass(frozen=True)
class SelectKernels:
    """Sets ``kernels`` ([{symbol, family, params (JSON), args}]) and ``scratch`` ([[dtype, shape]]). Operators that
    alias their operand have no kernels."""

    codegen: Codegen
    name: ClassVar[str] = "select_kernels"
    requires: ClassVar[tuple[str, ...]] = ("laid_out", "stored", "paged")
    ensures: ClassVar[tuple[str, ...]] = ("selected",)

    def run(self, program: Program) -> None:
        with program.editing():
            for _, op in program.operators():
                spec = spec_of(op)
                uses, scratch = (), ()
                if not row(spec.op).aliases:
                    selection = self.codegen.select(spec)
                    if selection is None:
                        raise UnsupportedError(
                            f"backend {self.codegen.name!r} has no kernel for {spec.op} in module {source_of(op)}.",
                            hint="The laid-out program was made for another backend: start from an earlier stage.",
                        )
                    uses, scratch = selection.uses, selection.scratch
                kernels = [
                    {
                        "symbol": self.codegen.symbol(use.kernel),
                        "family": use.kernel.family,
                        "params": json.dumps(dict(use.kernel.params), sort_keys=True),
                        "args": use.args,
                    }
                    for use in uses
                ]
                op.operation.attributes["kernels"] = dialect.to_attr(kernels)
                op.operation.attributes["scratch"] = dialect.to_attr([(s.dtype, s.shape) for s in scratch])


def kernel_uses(op) -> tuple[KernelUse, ...]:
    """The kernels written on an operator, params sorted by name."""
    rows = dialect.from_attr(op.operation.attributes["kernels"])
    return tuple(
        KernelUse(KernelSpec(r["family"], tuple(sorted(_frozen(json.loads(r["params"])).items()))), r["args"])
        for r in rows
    )


def scratch_of(op) -> tuple[TensorSpec, ...]:
    """The scratch buffers written on an operator."""
    return tuple(TensorSpec(d, s) for d, s in dialect.from_attr(op.operation.attributes["scratch"]))


def _frozen(value: Any) -> Any:
    """JSON with lists as tuples."""
    if isinstance(value, dict):
        return {k: _frozen(v) for k, v in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
