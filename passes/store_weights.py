"""Decides the format each weight is stored in, and types it so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from adaptc.errors import one_of
from adaptc.formats import CHOICES, FORMATS, WeightFormat
from adaptc.ir import dialect
from adaptc.ir.functions import matrices, retype
from adaptc.ir.module import Program, Weight


@dataclass(frozen=True)
class StoreWeights:
    """Matrices take the format of ``weights``: "auto" (each as its file stores it) or a key of formats.CHOICES.

    The choice is kept in the fact "weights". Bodies whose calls now pass different formats are cloned (fact "clones"
    says which and why); weights that can't have the chosen format are noted with the reason in the fact
    "format_notes".
    """

    weights: str = "auto"
    name: ClassVar[str] = "store_weights"
    requires: ClassVar[tuple[str, ...]] = ("sharded",)
    ensures: ClassVar[tuple[str, ...]] = ("stored",)

    def run(self, program: Program) -> None:
        if self.weights not in ("auto", *CHOICES):
            raise one_of("weight format", self.weights, ("auto", *CHOICES))
        types, notes = {}, []
        with program.editing():
            packed = matrices(program)
            for weight in program.weights().values():
                stored, reason = storage_format(weight, self.weights) if weight.name in packed else (None, "")
                types[weight.name] = dialect.to_type(replace(weight.spec, format=stored))
                notes += [f"weight {weight.name!r} is stored as {stored.name}: {reason}."] if reason else []
        retype(program, types)
        program.set_fact("weights", self.weights)
        if notes:
            program.set_fact("format_notes", tuple(notes))


def storage_format(weight: Weight, choice: str) -> tuple[WeightFormat | None, str]:
    """The format for a matrix, and why it isn't the chosen one ("" when it is). Other weights have none: they are dense
    float32, which is nothing beside the matrices and keeps norms exact."""
    shape = weight.spec.shape
    wanted = FORMATS[weight.stored if choice == "auto" else CHOICES[choice]]
    if choice == "auto" and weight.transposed and not wanted.is_float:
        return FORMATS["f32"], f"its columns are the file's rows, along which the groups of {wanted.name} lie"
    block = wanted.superblock
    if block and shape[-1] % block:
        return FORMATS["f32"], f"its {shape[-1]} columns don't divide into blocks of {block}, as {wanted.name} needs"
    return wanted, ""
