"""Compile time: a "kernel" is an operator as JSON. Only the floor and attention are there; all else is decomposed."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Mapping, Sequence

from adaptc.formats import WeightFormat
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection, StateSpec

OPERATORS = ("add", "attention", "broadcast", "cast", "concat", "constant", "cos", "div", "dot_general", "exp",
             "gather_rows", "mul", "neg", "reciprocal", "reduce", "reshape", "rsqrt", "sin", "slice", "sub", "tanh",
             "transpose")


class AcmeCodegen:
    name = "acme"
    symbols = ("T", "R", "S")
    tile = "rows"

    def requirements(self, level: str) -> Mapping[str, str]:
        return {"device": f"acme {level}"}

    def select(self, spec: OpSpec) -> Selection | None:
        if spec.op not in OPERATORS:
            return None
        args: list[str] = []
        for i, operand in enumerate(spec.operands):
            args += [f"state:{i}", f"pages:{i}"] if isinstance(operand, StateSpec) else [f"operand:{i}"]
        args += [f"result:{i}" for i in range(len(spec.results))]
        shapes = tuple((s.dtype, s.shape) for s in (*spec.operands, *spec.results) if not isinstance(s, StateSpec))
        params = (("attrs", json.dumps(spec.attrs, sort_keys=True)), ("shapes", shapes))
        return Selection((KernelUse(KernelSpec(spec.op, params), tuple(args)),))

    def symbol(self, kernel: KernelSpec) -> str:
        return f"{kernel.family}_{hashlib.sha256(repr(kernel.params).encode()).hexdigest()[:12]}"

    def object_of(self, kernel: KernelSpec) -> str:
        return "kernels.json"

    def signature(self, kernel: KernelSpec) -> tuple[str, ...]:
        *operands, result = (f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in dict(kernel.params)["shapes"])
        state = ("state:f32[pages]", "pages:i32[R]") if kernel.family == "attention" else ()
        return (*(f"in:{o}" for o in operands), *state, f"out:{result}")

    def compile(self, kernels: Sequence[KernelSpec], level: str, *, workers: int = 1, progress=None):
        rows = {self.symbol(k): {"op": k.family, **dict(k.params)} for k in kernels}
        return {"kernels.json": json.dumps(rows, sort_keys=True).encode()}

    def packed_bytes(self, format: WeightFormat, shape: tuple[int, int]) -> int:
        return 4 * shape[0] * shape[1]

    def pack(self, format: WeightFormat, shape: tuple[int, int], codes: Mapping[str, Any]) -> bytes:
        assert format.name == "f32", "acme keeps dense rows: compile with weights='f32'"
        return codes["codes"].tobytes()


CODEGEN = AcmeCodegen()
