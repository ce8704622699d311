"""Removes arguments and results of bodies that carry nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir

from adaptc.ir.functions import bodies, refresh_signature, replace_call, returned, set_returned
from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, remove_dead, spec
from adaptc.passes.base import storage


@dataclass(frozen=True)
class TrimSignatures:
    """Unused arguments and results go; so do arguments that are the same value at every call, and results that are
    an argument or another result (under another shape): callers use that one."""

    name: ClassVar[str] = "trim_signatures"
    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code", "results_are_made")

    def run(self, program: Program) -> None:
        with program.editing():
            for name, function, calls in list(bodies(program)):
                if not calls:  # "the same at every call" says nothing then
                    continue
                _trim_results(function, [Node(c.operation) for c in program.calls(name)])
                remove_dead(function)
                _trim_arguments(function, [Node(c.operation) for c in program.calls(name)])
            remove_dead(program.step)


def _trim_results(function, calls: list[Node]) -> None:
    values = returned(function).operands
    roots = [storage(v) for v in values]
    keep = []
    for i, (value, root) in enumerate(zip(values, roots)):
        if root.owner == function.entry_block:
            _use_instead(calls, i, [call.operands[root.arg_number] for call in calls], value)
        elif root in roots[:i]:
            _use_instead(calls, i, [call.results[roots.index(root)] for call in calls], value)
        if any(any(True for _ in call.results[i].uses) for call in calls):
            keep.append(i)
    if len(keep) < len(values):
        set_returned(function, [values[i] for i in keep])
        for call in calls:
            replace_call(call, call.operands, [call.results[i].type for i in keep], keep)


def _use_instead(calls: list[Node], index: int, sources: list[ir.Value], value: ir.Value) -> None:
    """Users of each call's result ``index`` get its source, with the shape of ``value``."""
    for call, found in zip(calls, sources):
        if spec(found) != spec(value):
            found = call.builder_after().reshape(found, shape=spec(value).shape)
        call.results[index].replace_all_uses_with(found)


def _trim_arguments(function, calls: list[Node]) -> None:
    block = function.entry_block
    first: dict[tuple, ir.Value] = {}
    for argument in block.arguments:
        same = tuple(call.operands[argument.arg_number] for call in calls)
        if same in first:
            argument.replace_all_uses_with(first[same])
        first.setdefault(same, argument)
    unused = [a.arg_number for a in block.arguments if not any(True for _ in a.uses)]
    if not unused:
        return
    for number in reversed(unused):
        block.erase_argument(number)
    refresh_signature(function)
    for call in calls:
        operands = [v for i, v in enumerate(call.operands) if i not in unused]
        replace_call(call, operands, [r.type for r in call.results], range(len(call.results)))
