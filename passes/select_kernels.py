"""Writes on each operator which kernels carry it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adaptc.errors import MissingOperatorError
from adaptc.ir import dialect
from adaptc.ir.lowered import kernel_note
from adaptc.ir.module import Program, source_of, spec_of
from adaptc.ops.table import row
from adaptc.protocol import Codegen


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
                        raise MissingOperatorError(
                            f"backend {self.codegen.name!r} has no kernel for {spec.op} in module {source_of(op) or '<root>'}.",
                            hint="The laid-out program was made for another backend: start from an earlier stage.",
                        )
                    uses, scratch = selection.uses, selection.scratch
                kernels = [kernel_note(self.codegen.symbol(use.kernel), use) for use in uses]
                op.operation.attributes["kernels"] = dialect.to_attr(kernels)
                op.operation.attributes["scratch"] = dialect.to_attr([(s.dtype, s.shape) for s in scratch])

