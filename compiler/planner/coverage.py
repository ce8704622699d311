"""Operator coverage: which operators the target has kernels for, which are decomposed, which are missing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from adaptc.ir.build import short_name
from adaptc.ir.module import Program, spec_of
from adaptc.ops.table import row
from adaptc.plan import kind_of
from adaptc.planner.cost import PackedBytes, cost_of, evaluate
from adaptc.planner.profile import places
from adaptc.protocol import Codegen, OpSpec, Selection


@dataclass(frozen=True)
class CoverageRow:
    """How one kind of operator is carried out: ``status`` is "mapped", "decomposed into …" or "missing"; ``count``
    places a step. In ``coverage`` a decomposed one has 0 (its parts are counted); in ``survey`` parts have 0, FLOPs and
    bytes are of a step, and ``lines`` are the authors' (file:line)."""

    op: str
    count: int
    status: str
    modules: tuple[str, ...]
    flops: float = 0.0
    bytes: float = 0.0
    lines: tuple[str, ...] = ()

    @property
    def missing(self) -> bool:
        return self.status == "missing"


def coverage(program: Program, codegen: Codegen) -> list[CoverageRow]:
    """Rows by operator name for a program in any stage from "laid_out" on (decompositions are then done)."""
    found: dict[str, tuple[int, bool, set[str]]] = {}
    for path, op, _ in places(program):
        name = short_name(op)
        count, mapped, modules = found.get(name, (0, True, set()))
        found[name] = (count + 1, mapped and _mapped(spec_of(op), codegen), modules | {kind_of(path)})
    rows = [
        CoverageRow(name, count, "mapped" if mapped else "missing", tuple(sorted(modules)))
        for name, (count, mapped, modules) in found.items()
    ]
    rows += [
        CoverageRow(name, 0, f"decomposed into {', '.join(parts)}", ())
        for name, parts in program.fact("decomposed", {}).items()
    ]
    return sorted(rows, key=lambda r: r.op)


def _mapped(spec: OpSpec, codegen: Codegen) -> bool:
    """Whether the backend has kernels for an operator, or it needs none."""
    return bool(row(spec.op).aliases) or codegen.select(spec) is not None


@dataclass(frozen=True)
class Lenient:
    """A backend that has everything it couldn't decompose either, so that passes go on and all gaps are seen."""

    codegen: Codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codegen, name)

    def select(self, spec: OpSpec) -> Selection | None:
        found = self.codegen.select(spec)
        return Selection(()) if found is None and row(spec.op).decompose is None else found


@dataclass
class _Kind:
    """One operator with one status, while places are counted."""

    count: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    modules: set[str] = field(default_factory=set)
    lines: dict[str, None] = field(default_factory=dict)


def survey(captured: Program, whole: Program, decomposed: Program, codegen: Codegen, packed: PackedBytes,
           symbols: Mapping[str, float]) -> list[CoverageRow]:
    """Rows by operator and status, the most FLOPs first.

    captured    says which line of the authors' source an operator comes from
    whole       the program before operators are decomposed: what is counted, and what shares are shares of
    decomposed  the same afterwards, by a ``Lenient`` backend: parts that are missing themselves
    """
    lines, parts = _lines(captured), decomposed.fact("decomposed", {})
    kinds: dict[tuple[str, str], _Kind] = {}

    @cache  # a body's operators stand in many places
    def carried_out(op: Any) -> tuple[str, str, float, float]:
        spec = spec_of(op)
        if _mapped(spec, codegen):
            status = "mapped"
        else:
            status = f"decomposed into {', '.join(parts[spec.op])}" if spec.op in parts else "missing"
        cost = cost_of(spec, packed)
        return spec.op, status, evaluate(cost.flops, symbols), evaluate(cost.traffic, symbols)

    for path, op, _ in places(whole):
        name, status, flops, moved = carried_out(op.operation)
        kind = kinds.setdefault((name, status), _Kind())
        kind.count += 1
        kind.flops += flops
        kind.bytes += moved
        _note(kind, path, name, lines)

    @cache
    def missing(op: Any) -> bool:
        return not _mapped(spec_of(op), codegen)

    for path, op, _ in places(decomposed):
        if missing(op.operation):
            _note(kinds.setdefault((short_name(op), "missing"), _Kind()), path, short_name(op), lines)
    rows = [CoverageRow(op, k.count, status, tuple(sorted(k.modules)), k.flops, k.bytes, tuple(k.lines))
            for (op, status), k in kinds.items()]
    return sorted(rows, key=lambda r: (not r.missing, -r.flops, -r.bytes, r.op))


def _note(kind: _Kind, path: str, op: str, lines: Mapping[tuple[str, str], dict[str, None]]) -> None:
    kind.modules.add(kind_of(path))
    kind.lines |= lines.get((kind_of(path), op)) or lines.get((kind_of(path), ""), {})


_FILE = re.compile(r'"([^"]+)":(\d+):')

_TEXT = "-"
"""The file of a location that MLIR's parser gives: the line of a printed stage."""


def _lines(captured: Program) -> dict[tuple[str, str], dict[str, None]]:
    """Lines of source by kind of module and operator, and by kind of module alone (""). Empty for a program that was
    read from text: locations are no part of a printed stage."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for path, op, _ in places(captured):
        at = _FILE.search(str(op.operation.location))
        if at is not None and at[1] != _TEXT:
            for name in (short_name(op), ""):
                found.setdefault((kind_of(path), name), {})[f"{at[1]}:{at[2]}"] = None
    return found
