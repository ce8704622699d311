"""Computes only the rows that are wanted: a row gather moves up through token-local operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch_mlir import ir

from adaptc.errors import LegalityError
from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, defined_before, definer, nodes, remove_dead, spec
from adaptc.ops.axes import axis_map


@dataclass(frozen=True)
class SinkSampledRows:
    """gather_rows(f(x), rows) → f(gather_rows(x, rows)) when f is token-local and stateless, its tokens are on axis
    0, and nobody needs its other rows. Only sampled rows then reach the vocabulary projection."""

    name: ClassVar[str] = "sink_sampled_rows"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        with program.editing():
            for function in program.functions().values():
                while any(_sink(node) for node in reversed(nodes(function)) if node.name == "gather_rows"):
                    remove_dead(function)
                remove_dead(function)


def _sink(gather: Node) -> bool:
    value, rows = gather.operands
    node = definer(value)
    if node is None or not _movable(node, rows):
        return False
    tokens, wanted = spec(value).shape[0], spec(rows).shape[0]
    gathers = {result: [Node(use.owner.operation) for use in result.uses] for result in node.results}
    b = node.builder()
    operands = [b.gather_rows(v, rows) if _has(v, tokens) else v for v in node.operands]
    try:
        made = b.op(node.name, *operands, **_renamed(node.attrs, tokens, wanted))
    except LegalityError:  # its row can't be restated with fewer tokens
        return False
    for result, new in zip(node.results, made if isinstance(made, tuple) else (made,)):
        for user in gathers[result]:
            user.replace(new)
    return True


def _movable(node: Node, rows: ir.Value) -> bool:
    if node.row is None or node.row.state is not None or not node.operands:
        return False
    only_gathered = all(user.name == "gather_rows" and user.operands[1] == rows for user in node.users)
    return only_gathered and defined_before(rows, node) and _local_on_axis_0(node)


def _local_on_axis_0(node: Node) -> bool:
    """Whether tokens are on axis 0 of all results and of all operands that have them, and don't meet."""
    tokens = spec(node.results[0]).shape[:1]
    if not tokens or not isinstance(tokens[0], str) or not all(_leads(v, tokens[0]) for v in node.results):
        return False
    operands, results = [spec(v) for v in node.operands], [spec(v) for v in node.results]
    maps = [axis_map(node.row, node.attrs, operands, results, i) for i in range(len(results))]
    return all(_leads(v, tokens[0]) and all(axes[i][0] == 0 for axes in maps)
               for i, v in enumerate(node.operands) if _has(v, tokens[0]))


def _has(value: ir.Value, symbol: str) -> bool:
    return symbol in getattr(spec(value), "shape", ())


def _leads(value: ir.Value, symbol: str) -> bool:
    """Whether ``symbol`` is the value's first dimension and no other."""
    shape = getattr(spec(value), "shape", ())
    return shape[:1] == (symbol,) and symbol not in shape[1:]


def _renamed(value: Any, old: str, new: str) -> Any:
    """Attributes with one symbol for another (target shapes of reshapes and broadcasts)."""
    if isinstance(value, dict):
        return {k: _renamed(v, old, new) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_renamed(v, old, new) for v in value)
    return new if isinstance(value, str) and value == old else value
