"""Integer arithmetic for linear maps: their inputs are quantised once and shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir

from adaptc.errors import one_of
from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, nodes, remove_dead, spec
from adaptc.ops.dense import QUANTIZABLE, linear_maps
from adaptc.options import CHOICES

GROUP = 32
"""Columns that share one scale."""


@dataclass(frozen=True)
class QuantizeActivations:
    """With "int8", one ``quantize`` for each input of linear maps whose weights have integer codes. Maps of one input
    that were merged over integer and float weights are parted; float weights keep the float input, as do gate and up
    of which one is float. The fact "format_notes" says where. The choice is kept in the fact "activations"."""

    activations: str = "f32"
    name: ClassVar[str] = "quantize_activations"
    requires: ClassVar[tuple[str, ...]] = ("sharded", "stored")
    ensures: ClassVar[tuple[str, ...]] = ()

    def run(self, program: Program) -> None:
        if self.activations not in CHOICES["activations"]:
            raise one_of("activation format", self.activations, CHOICES["activations"])
        program.set_fact("activations", self.activations)
        if self.activations == "f32":
            return
        notes: list[str] = []
        with program.editing():
            for function in program.functions().values():
                for node in nodes(function):
                    if _quantizable(node) and len(set(map(_integer, _matrices(node)))) == 2:
                        notes.append(_mixed(node, function))
                        if node.name == "linears":
                            _part(node)
                made: dict[ir.Value, tuple] = {}
                for node in nodes(function):
                    if _quantizable(node) and all(map(_integer, _matrices(node))):
                        _quantize(node, made)
                remove_dead(function)
        known = program.fact("format_notes", ())
        if new := tuple(note for note in notes if note not in known):
            program.set_fact("format_notes", known + new)


def _integer(weight: ir.Value) -> bool:
    stored = spec(weight).format
    return stored is not None and not stored.is_float


def _quantizable(node: Node) -> bool:
    """Whether it is a linear map of a float input that divides into groups."""
    if node.name not in QUANTIZABLE:
        return False
    x = spec(node.operands[0])
    return x.dtype == "f32" and x.shape[1] % GROUP == 0


def _matrices(node: Node) -> list[ir.Value]:
    return [v for v in node.operands[1:] if len(spec(v).shape) == 2]


def _part(node: Node) -> None:
    x, *rest = node.operands
    b = node.builder()
    maps = linear_maps(rest, b.rank)
    results: dict[int, ir.Value] = {}
    for kind in (True, False):
        places = [i for i, (weight, *_) in enumerate(maps) if _integer(weight) == kind]
        made = b.op("linears" if len(places) > 1 else "linear", x, *(v for i in places for v in maps[i]))
        results.update(zip(places, made if isinstance(made, tuple) else (made,)))
    node.replace(*(results[i] for i in range(len(maps))))


def _mixed(node: Node, function) -> str:
    """A sentence for the report about maps of one input that integer arithmetic can't take together."""
    formats = ", ".join(stored.name if (stored := spec(w).format) else spec(w).dtype for w in _matrices(node))
    what = "are parted" if node.name == "linears" else "keep a float32 input"
    return (f"the merged maps of module {node.source or '<root>'} in @{function.name.value} {what}: their weights are "
            f"stored as {formats}, and only integer weights take an int8 input.")


def _quantize(node: Node, made: dict[ir.Value, tuple]) -> None:
    x, *rest = node.operands
    b = node.builder()
    if x not in made:
        made[x] = b.quantize(x, group=GROUP)
    found = b.op(node.name, *made[x], *rest, **node.attrs)
    node.replace(*(found if isinstance(found, tuple) else (found,)))
