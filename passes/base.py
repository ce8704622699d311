"""What a pass is, and how its contract is checked.

A pass is a frozen dataclass: its fields are its options. ``requires`` and ``ensures`` name properties of programs
(the table below) that hold before and after ``run``; a stage's name as a requirement means "in this stage".
"""

from __future__ import annotations

from typing import Callable, ClassVar, Protocol

from adaptc.errors import LegalityError
from adaptc.ir import legality
from adaptc.ir.functions import bodies, matrices
from adaptc.ir.module import STAGES, Program
from adaptc.ir.rewrite import dead_nodes, definer, nodes, spec


class Pass(Protocol):
    """One transformation. ``run`` edits the program in place and leaves its meaning as it was."""

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]]
    ensures: ClassVar[tuple[str, ...]]

    def run(self, program: Program) -> None: ...


def run_pass(program: Program, one: Pass) -> None:
    """requires → run → legality of the stage → ensures; LegalityError names the pass that broke what."""
    for wanted in one.requires:
        _expect(program, one, wanted, "requires")
    one.run(program)
    try:
        legality.check(program)
    except LegalityError as error:
        raise LegalityError(f"after pass {one.name}: {error.message}") from error
    for promised in one.ensures:
        _expect(program, one, promised, "ensures")


def _expect(program: Program, one: Pass, wanted: str, verb: str) -> None:
    if wanted in STAGES:
        problem = "" if program.stage == wanted else f"the program is in stage {program.stage!r}"
    else:
        problem = PROPERTIES[wanted](program)
    if problem:
        raise LegalityError(f"pass {one.name} {verb} {wanted!r}, but {problem}.")


# ---- properties: program → "" or what is wrong


def _no_dead_code(program: Program) -> str:
    for name, function in program.functions().items():
        for node in dead_nodes(function):
            return f"nobody uses {node.name} (module {node.source or '<root>'}) in @{name}"
    return ""


def _no_unit_dims(program: Program) -> str:
    for name, function, _ in bodies(program):
        for value in (*function.entry_block.arguments, *nodes(function)[-1].operands):
            shape = getattr(spec(value), "shape", ())
            if shape[:1] == (1,) and any(isinstance(d, str) for d in shape):
                return f"@{name} passes a tensor {shape}"
    return ""


def _paged(program: Program) -> str:
    for slot in program.states().values():
        if not slot.spec.page_size:
            return f"state {slot.name!r} has no page size"
    return ""


def _stored(program: Program) -> str:
    packed = matrices(program)
    for weight in program.weights().values():
        if weight.name in packed and weight.spec.format is None:
            return f"weight {weight.name!r} has no storage format"
    return ""


def _selected(program: Program) -> str:
    missing = [op for _, op in program.operators() if "kernels" not in op.operation.attributes]
    return f"{missing[0].operation.name} has no kernels" if missing else ""


def _placed(program: Program) -> str:
    for function in program.functions().values():
        for node in nodes(function):
            if (node.row or node.name == "func.call") and "buffers" not in node.op.attributes:
                return f"{node.name} in @{function.name.value} has no buffers"
    return ""


def _results_are_made(program: Program) -> str:
    """Destination passing needs every returned value to be made by the body, once."""
    for name, function, _ in bodies(program):
        roots = [storage(v) for v in nodes(function)[-1].operands]
        for i, root in enumerate(roots):
            if root.owner == function.entry_block:
                return f"@{name} returns its argument {root.arg_number}"
            if root in roots[:i]:
                return f"@{name} returns one value twice"
    return ""


def storage(value):
    """The value whose memory ``value`` is: itself, or what it aliases."""
    while (node := definer(value)) is not None and node.row is not None and node.row.aliases:
        value = node.operands[0]
    return value


PROPERTIES: dict[str, Callable[[Program], str]] = {
    "no_dead_code": _no_dead_code,
    "no_unit_dims": _no_unit_dims,
    "results_are_made": _results_are_made,
    "stored": _stored,
    "paged": _paged,
    "selected": _selected,
    "placed": _placed,
}
