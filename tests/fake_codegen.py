"""A backend's compile-time side that generates nothing, for tests of the passes."""

from __future__ import annotations

import hashlib

from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection, TensorSpec


class FakeCodegen:
    """Has every operator but ``lacks``, each as one kernel with scratch of three floats a token."""

    name = "fake"
    symbols = ("T", "R", "S")
    tile = "rows"

    def __init__(self, *lacks: str):
        self.lacks = lacks

    def level(self, name: str) -> str:
        return name

    def select(self, spec: OpSpec) -> Selection | None:
        if spec.op in self.lacks:
            return None
        body = hashlib.sha256(repr((spec.operands, sorted(spec.attrs.items()))).encode()).hexdigest()[:12]
        args = [f"operand:{i}" for i in range(len(spec.operands))] + [f"result:{i}" for i in range(len(spec.results))]
        kernel = KernelSpec(spec.op, (("body", body), ("tile", (6, 16))))
        return Selection((KernelUse(kernel, (*args, "scratch:0")),), (TensorSpec("f32", ("T", 3)),))

    def symbol(self, kernel: KernelSpec) -> str:
        return f"{kernel.family}_{kernel.param('body')}"
