"""Operator coverage: which operators the target has kernels for, which are decomposed, which are missing."""

from __future__ import annotations

from dataclasses import dataclass

from adaptc.ir.build import short_name
from adaptc.ir.module import Program, spec_of
from adaptc.ops.table import row
from adaptc.planner.profile import kind_of, places
from adaptc.protocol import Codegen


@dataclass(frozen=True)
class CoverageRow:
    """How one kind of operator is carried out: ``status`` is "mapped", "decomposed into …" or "missing"; ``count``
    places a step (of one that was decomposed, 0: its parts are counted)."""

    op: str
    count: int
    status: str
    modules: tuple[str, ...]


def coverage(program: Program, codegen: Codegen) -> list[CoverageRow]:
    """Rows by operator name for a program in any stage from "laid_out" on (decompositions are then done)."""
    found: dict[str, tuple[int, bool, set[str]]] = {}
    for path, op in places(program):
        name = short_name(op)
        count, mapped, modules = found.get(name, (0, True, set()))
        supported = row(name).aliases or codegen.select(spec_of(op)) is not None
        found[name] = (count + 1, mapped and supported, modules | {kind_of(path)})
    rows = [
        CoverageRow(name, count, "mapped" if mapped else "missing", tuple(sorted(modules)))
        for name, (count, mapped, modules) in found.items()
    ]
    rows += [
        CoverageRow(name, 0, f"decomposed into {', '.join(parts)}", ())
        for name, parts in program.fact("decomposed", {}).items()
    ]
    return sorted(rows, key=lambda r: r.op)
