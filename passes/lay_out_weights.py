"""Names the order that a backend packs matrices in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adaptc.ir import dialect
from adaptc.ir.functions import retype
from adaptc.ir.module import Program


@dataclass(frozen=True)
class LayOutWeights:
    """Sets ``tile`` on the type of every weight that has a storage format."""

    tile: str = ""
    name: ClassVar[str] = "lay_out_weights"
    requires: ClassVar[tuple[str, ...]] = ("stored",)
    ensures: ClassVar[tuple[str, ...]] = ()

    def run(self, program: Program) -> None:
        with program.editing():
            types = {
                w.name: dialect.to_type(w.spec, self.tile)
                for w in program.weights().values()
                if w.spec.format is not None
            }
        retype(program, types)
