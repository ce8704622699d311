"""Folding: what repeats becomes one private function, called once a place.

The unit isn't named: every module call is a stretch of @step's operators with one path prefix, and those whose
operators, attributes, shapes and wiring are equal up to the values, weights and states that come from outside are one
body. Larger stretches win. A stretch of a topological order is convex, so a call can stand for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator

from torch_mlir import ir
from torch_mlir.dialects import func

from adaptc.ir import dialect
from adaptc.ir.module import Program, source_of
from adaptc.protocol import StateSpec

LEAST_MATRICES = 2
"""Matrices that a body reads at least. Norms and single projections repeat too, but a call around one of them only
keeps it from being fused with its neighbours."""


@dataclass(frozen=True)
class _Region:
    """Operators ``start`` to ``stop`` (exclusive): the call of the module at ``path``.

    shape     what makes two regions one body: each operator with its wiring, and the results used outside
    inputs    the (operator, operand) that first uses each value from outside, relative to ``start``, in the body's
              order: values of the step, then weights, then states
    outputs   (operator, result) indices, relative to ``start``
    """

    path: str
    start: int
    stop: int
    shape: tuple
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    matrices: int

    def given(self, ops: list[ir.Operation]) -> list[ir.Value]:
        """The inputs' present values."""
        return [ops[self.start + i].operands[n] for i, n in self.inputs]


def fold(program: Program) -> None:
    """Replaces repeated stretches of ``program``'s @step by calls, in place."""
    with program.editing():
        block = program.step.entry_block
        ops = [op.operation for op in block.operations if op.operation.name not in ("adaptc.get", "func.return")]
        for number, regions in enumerate(_repeated(_regions(block, ops), len(ops))):
            name = f"body{number}"
            _define(program, name, ops, regions[0])
            for region in regions:
                _call(name, ops, region)


def _repeated(regions: list[_Region], count: int) -> list[list[_Region]]:
    """Disjoint groups of equal regions, the largest first chosen, in order of their first place."""
    groups: dict[tuple, list[_Region]] = {}
    for region in regions:
        groups.setdefault(region.shape, []).append(region)
    order = sorted(groups.values(), key=lambda g: (g[0].start - g[0].stop, g[0].path.count("."), g[0].start))
    taken = [False] * count
    chosen = []
    for group in order:
        free = [r for r in group if not any(taken[r.start : r.stop])]
        if len(free) < 2 or group[0].matrices < LEAST_MATRICES:
            continue
        for region in free:
            taken[region.start : region.stop] = [True] * (region.stop - region.start)
        chosen.append(free)
    return sorted(chosen, key=lambda g: g[0].start)


def _regions(block: ir.Block, ops: list[ir.Operation]) -> list[_Region]:
    sources = [source_of(op) for op in ops]
    users: dict[ir.Value, list[int]] = {}
    for index, op in enumerate([*ops, *(o.operation for o in block.operations if o.operation.name == "func.return")]):
        for operand in op.operands:
            users.setdefault(operand, []).append(index)
    described = [_described(op) for op in ops]
    return [_region(path, start, stop, ops, sources, users, described) for path, start, stop in _stretches(sources)]


def _stretches(sources: list[str]) -> Iterator[tuple[str, int, int]]:
    """(path, start, stop) of every module path whose operators stand together."""
    where: dict[str, list[int]] = {}
    for index, source in enumerate(sources):
        steps = source.split(".") if source else []
        for depth in range(1, len(steps) + 1):
            where.setdefault(".".join(steps[:depth]), []).append(index)
    for path, indices in where.items():
        if indices[-1] - indices[0] + 1 == len(indices):
            yield path, indices[0], indices[-1] + 1


def _described(op: ir.Operation) -> tuple:
    """An operator apart from its operands and its place."""
    attributes = tuple((n, op.attributes[n]) for n in op.attributes if n != "source")
    return op.name, attributes, tuple(r.type for r in op.results)


def _region(path, start, stop, ops, sources, users, described) -> _Region:
    inside: dict[ir.Value, tuple[int, int]] = {}
    outside: dict[ir.Value, tuple[int, int]] = {}
    rows, outputs = [], []
    for index in range(start, stop):
        wiring = []
        for number, value in enumerate(ops[index].operands):
            local = value in inside
            wiring.append((local, inside[value] if local else outside.setdefault(value, (index - start, number))))
        rows.append((*described[index], sources[index][len(path) :], tuple(wiring)))
        for number, result in enumerate(ops[index].results):
            inside[result] = (index - start, number)
            if any(not start <= user < stop for user in users.get(result, ())):
                outputs.append((index - start, number))
    kinds = {value: _kind(value) for value in outside}
    inputs = tuple(outside[v] for v in sorted(outside, key=lambda v: (kinds[v], outside[v])))
    types = tuple(v.type for v in outside)
    matrices = sum(kinds[v] == 1 and len(dialect.to_spec(v.type).shape) == 2 for v in outside)
    return _Region(path, start, stop, (tuple(rows), types, tuple(kinds.values()), tuple(outputs)), inputs,
                   tuple(outputs), matrices)


def _kind(value: ir.Value) -> int:
    """0 a value of the step, 1 a weight, 2 a state: their order among a body's arguments."""
    if isinstance(value.owner, ir.Block) or value.owner.name != "adaptc.get":
        return 0
    return 2 if isinstance(dialect.to_spec(value.type), StateSpec) else 1


def _define(program: Program, name: str, ops: list[ir.Operation], region: _Region) -> None:
    results = [ops[region.start + i].results[n].type for i, n in region.outputs]
    given = region.given(ops)
    body = func.FuncOp(name, ([v.type for v in given], results), visibility="private",
                       ip=ir.InsertionPoint(program.step))
    block = body.add_entry_block()
    values: dict[ir.Value, ir.Value] = dict(zip(given, block.arguments))
    point = ir.InsertionPoint(block)
    copies = []
    for op in ops[region.start : region.stop]:
        copy = op.clone(point).operation
        _relocate(copy, source_of(op)[len(region.path) + 1 :])
        for index, operand in enumerate(op.operands):
            copy.operands[index] = values[operand]
        values.update(zip(op.results, copy.results))
        copies.append(copy)
    func.ReturnOp([copies[i].results[n] for i, n in region.outputs], ip=point)


def _relocate(op: ir.Operation, source: str) -> None:
    if source:
        op.attributes["source"] = dialect.to_attr(source)
    elif "source" in op.attributes:
        del op.attributes["source"]


def _call(name: str, ops: list[ir.Operation], region: _Region) -> None:
    old = ops[region.start : region.stop]
    results = [old[i].results[n] for i, n in region.outputs]
    call: Any = func.CallOp([r.type for r in results], ir.FlatSymbolRefAttr.get(name), region.given(ops),
                            ip=ir.InsertionPoint(old[0]))
    call.operation.attributes["source"] = dialect.to_attr(region.path)
    for result, replacement in zip(results, call.operation.results):
        result.replace_all_uses_with(replacement)
    for op in reversed(old):
        op.erase()
