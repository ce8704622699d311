"""What must hold of a program at each stage. Every pass's output goes through ``check``.

Of a module: its operations are functions of one block and declarations; @step takes tokens, positions, requests and
sampled rows and gives logits; only @step calls, and calls fit what they call. Of an operator: its row infers its
results from its operands and attributes; so for every operator of its region. Of a state: one operator a step appends
to it, since a second one would overwrite the rows that the first has just written, and operators that only read it
come after. Of the lowered stage: every operator has kernels, and everything a place.
"""

from __future__ import annotations

import re

from torch_mlir import ir
from torch_mlir.dialects import func

from adaptc.errors import LegalityError
from adaptc.ir import dialect
from adaptc.ir.build import attrs_of, is_operator, short_name
from adaptc.ir.lowered import Place
from adaptc.ir.module import DIMENSIONS, ROLES, STAGES, STEP, Program, callee, source_of
from adaptc.ops.table import row
from adaptc.protocol import StateSpec, TensorSpec

DECLARED = {
    "weight": {"sym_name": ir.StringAttr, "type": ir.TypeAttr, "tensor": ir.StringAttr},
    "state_slot": {"sym_name": ir.StringAttr, "type": ir.TypeAttr},
}
"""Attributes that a declaration must have."""

ARGUMENTS = tuple(TensorSpec("i32", (DIMENSIONS.get(role, "T"),)) for role in ROLES)
"""What @step takes."""


def check(program: Program) -> None:
    """Raises LegalityError naming the first operation that breaks a rule of the program's stage."""
    if program.stage not in STAGES:
        raise LegalityError(f"the module says stage {program.stage!r}; stages are {', '.join(STAGES)}.")
    try:
        program.module.operation.verify()
    except ir.MLIRError as error:
        raise LegalityError(f"stage {program.stage}: {error}") from error
    _module(program)
    _declarations(program)
    _step(program)
    declared, legal = declared_types(program), set()
    for function in program.functions().values():
        for op in function.entry_block.operations:
            _operation(program, function, op, declared, legal)
    _states(program)
    if program.stage == "lowered":
        for function in program.functions().values():
            for op in function.entry_block.operations:
                _lowered(program, function, op)


# ---- the module


def _module(program: Program) -> None:
    known = ("func.func", *(f"adaptc.{kind}" for kind in DECLARED))
    for op in program.module.body.operations:
        if op.operation.name not in known:
            raise LegalityError(f"stage {program.stage}: {op.operation.name} stands in the module; expected "
                                f"{', '.join(known)}.")
        if isinstance(op, func.FuncOp) and len(op.operation.regions[0].blocks) != 1:
            blocks = len(op.operation.regions[0].blocks)
            raise LegalityError(f"stage {program.stage}: @{op.name.value} has {blocks} blocks, expected one.")
        if isinstance(op, func.FuncOp) and [*op.entry_block.operations][-1].operation.name != "func.return":
            raise LegalityError(f"stage {program.stage}: @{op.name.value} doesn't end in func.return.")


def _declarations(program: Program) -> None:
    """That no name is declared twice is MLIR's verifier's: declarations are symbols."""
    for kind, wanted in DECLARED.items():
        for op in program.declared(kind):
            attributes = op.operation.attributes
            for name, attribute in wanted.items():
                if name not in attributes or not isinstance(attributes[name], attribute):
                    raise LegalityError(f"stage {program.stage}: adaptc.{kind} needs {name!r}.\n  {op}")
            symbol = attributes["sym_name"].value
            state = isinstance(dialect.to_spec(ir.TypeAttr(attributes["type"]).value), StateSpec)
            if state != (kind == "state_slot"):
                raise LegalityError(f"symbol {symbol!r} is declared by adaptc.{kind} with type {attributes['type']}.")


def declared_types(program: Program) -> dict[str, ir.Type]:
    """Declared type of every weight and state, by name."""
    found = {}
    for kind in DECLARED:
        for op in program.declared(kind):
            a = op.operation.attributes
            found[a["sym_name"].value] = ir.TypeAttr(a["type"]).value
    return found


def _step(program: Program) -> None:
    functions = program.functions()
    if STEP not in functions:
        raise LegalityError(f"stage {program.stage}: the module has no function @{STEP}.")
    block = functions[STEP].entry_block
    got = tuple(dialect.to_spec(a.type) for a in block.arguments)
    if got not in (ARGUMENTS[:-1], ARGUMENTS):
        expected = ", ".join(f"{role} {_show(spec)}" for role, spec in zip(ROLES, ARGUMENTS[:-1]))
        raise LegalityError(f"@{STEP} takes ({', '.join(map(_show, got))}), expected ({expected}).")
    results = [dialect.to_spec(v.type) for v in list(block.operations)[-1].operation.operands]
    vocabulary = program.fact("vocabulary")
    logits = TensorSpec("f32", ("S", results[0].shape[-1] if vocabulary is None and results else vocabulary))
    if results != [logits]:
        raise LegalityError(f"@{STEP} returns ({', '.join(map(_show, results))}), expected logits {_show(logits)}.")


def _show(spec) -> str:
    return f"{spec.dtype}{list(spec.shape)}" if isinstance(spec, TensorSpec) else str(spec)


# ---- operations


def _operation(program: Program, function, op, declared: dict[str, ir.Type], legal: set) -> None:
    """``legal``: operators that are known to fit their rows, to which this one is added."""
    name = op.operation.name
    if name == "func.call":  # that operands and results fit the callee's signature is MLIR's verifier's
        if function.name.value != STEP:
            raise _at(program, function, op, "is a call inside a body; only @step calls bodies")
        if callee(op) == STEP:
            raise _at(program, function, op, f"calls @{STEP}")
        return
    if name == "func.return":
        return
    if name == "adaptc.get":
        _get(program, function, op, declared)
        return
    if not name.startswith("adaptc."):
        raise _at(program, function, op, "is of a foreign dialect")
    try:
        if (alike := _signature(op)) is None or alike not in legal:
            _inferred(op)
            legal.add(alike)
    except LegalityError as error:
        raise _at(program, function, op, f"is illegal: {error.message}") from error


def _signature(op) -> tuple | None:
    """All that a row infers from and is compared with; None for an operator with a region."""
    if len(op.operation.regions):
        return None
    attributes = op.operation.attributes
    return (op.operation.name, *(v.type for v in op.operation.operands), None, *(v.type for v in op.operation.results),
            *((n, attributes[n]) for n in attributes if n not in dialect.NOTES))


def _get(program: Program, function, op, declared: dict[str, ir.Type]) -> None:
    a = op.operation.attributes
    unknown = [n for n in a if n not in ("symbol", *dialect.NOTES)]
    if unknown or "symbol" not in a or not isinstance(a["symbol"], ir.StringAttr):
        raise _at(program, function, op, "must have the attribute 'symbol', a string, and no other")
    symbol, types = a["symbol"].value, [r.type for r in op.operation.results]
    if symbol not in declared:
        raise _at(program, function, op, f"reads {symbol!r}, which isn't declared")
    if types != [declared[symbol]]:
        raise _at(program, function, op, f"has type {', '.join(map(str, types))}, declared {declared[symbol]}")


def _inferred(op) -> None:
    """Checks an operator's results, and its region's, against what rows infer; LegalityError without a place."""
    operator = row(short_name(op))
    specs = [dialect.to_spec(v.type) for v in op.operation.operands]
    got = tuple(dialect.to_spec(v.type) for v in op.operation.results)
    if ("body" in operator.attrs) != (len(op.operation.regions) == 1):
        raise LegalityError(f"it has {len(op.operation.regions)} regions.")
    if "body" in operator.attrs:
        _region(op, specs, got)
    expected = operator.results(attrs_of(op), specs)
    if got != expected:
        raise LegalityError(f"its results are ({', '.join(map(_show, got))}), its row infers "
                            f"({', '.join(map(_show, expected))}).")


def _region(op, operands: list, results: tuple) -> None:
    """One block whose arguments are the operands, whose operators are legal, and that yields the results."""
    blocks = list(op.operation.regions[0].blocks)
    if len(blocks) != 1:
        raise LegalityError(f"its region has {len(blocks)} blocks, expected one.")
    arguments = [dialect.to_spec(a.type) for a in blocks[0].arguments]
    if arguments != operands:
        raise LegalityError(f"its region takes ({', '.join(map(_show, arguments))}), its operands are "
                            f"({', '.join(map(_show, operands))}).")
    *body, end = blocks[0].operations
    if end.operation.name != "adaptc.yield":
        raise LegalityError(f"its region ends in {end.operation.name}, expected adaptc.yield.")
    for inner in body:
        if not inner.operation.name.startswith("adaptc."):
            raise LegalityError(f"its region holds {inner.operation.name}, of a foreign dialect.")
        _inferred(inner)
    yielded = tuple(dialect.to_spec(v.type) for v in end.operation.operands)
    if yielded != results:
        raise LegalityError(f"its region yields ({', '.join(map(_show, yielded))}), its results are "
                            f"({', '.join(map(_show, results))}).")


# ---- states


def _states(program: Program) -> None:
    """Walks a step's operators in the order they run, bodies expanded."""
    functions, slots = program.functions(), set(program.states())
    appended: set[str] = set()
    for op in functions[STEP].entry_block.operations:
        if op.operation.name != "func.call":
            _stateful(program, functions[STEP], op, slots, [], appended)
            continue
        passed = [_symbol(v, []) for v in op.operation.operands]
        for inner in functions[callee(op)].entry_block.operations:
            _stateful(program, functions[callee(op)], inner, slots, passed, appended)


def _stateful(program: Program, function, op, slots: set[str], passed: list, appended: set[str]) -> None:
    if not is_operator(op):
        return
    operator = row(short_name(op))
    if operator.state is None:
        return
    state = _symbol(op.operation.operands[operator.state], passed)
    if state not in slots:
        raise _at(program, function, op, "has a state that isn't a declared one's")
    if operator.appends and state in appended:
        raise _at(program, function, op, f"appends to state {state!r}, to which an operator before it has appended in "
                                         "this step; it would overwrite the rows")
    if not operator.appends and state not in appended:
        raise _at(program, function, op, f"reads state {state!r} before the step's rows are appended to it")
    appended.add(state)


def _symbol(value: ir.Value, passed: list) -> str | None:
    """The weight or state that a value is: read here, or passed by the caller as argument i (``passed[i]``)."""
    if isinstance(value.owner, ir.Block):
        number = ir.BlockArgument(value).arg_number
        return passed[number] if number < len(passed) else None
    owner = value.owner.operation
    return owner.attributes["symbol"].value if owner.name == "adaptc.get" else None


# ---- the lowered stage


def _lowered(program: Program, function, op) -> None:
    name, attributes = op.operation.name, op.operation.attributes
    if name in ("func.return", "adaptc.get"):
        return
    needed = ("buffers", "frame") if name == "func.call" else ("kernels", "scratch", "buffers")
    for note in needed:
        if note not in attributes:
            raise _at(program, function, op, f"has no {note}")
    places = dialect.from_attr(attributes["buffers"])
    scratch = len(attributes["scratch"]) if "scratch" in needed else 0
    count = len(op.operation.operands) + len(op.operation.results) + scratch
    if len(places) != count:
        raise _at(program, function, op, f"has {len(places)} buffers for {count} operands, results and scratch")
    foreign = "frame" if function.name.value == STEP else "arena"
    for text in places:
        place = Place.parse(text)
        if place is None or place.memory == foreign:
            raise _at(program, function, op, f"has a buffer at {text!r}, which is no place in @{function.name.value}")


def _at(program: Program, function, op, problem: str) -> LegalityError:
    place = f"stage {program.stage}, @{function.name.value}"
    source = f", module {source_of(op)}" if source_of(op) else ""
    sentence = f"{place}{source}: {op.operation.name} {problem}".rstrip(".")
    return LegalityError(f"{sentence}.\n{window(function, op)}")


def window(function, op, around: int = 3, width: int = 200) -> str:
    """The lines around an operation as its function prints them, the operation's own marked; long lines are cut."""
    with op.operation.context, ir.Location.unknown():
        op.operation.attributes[_HERE] = ir.UnitAttr.get()
    try:
        # values have the names that they have in the whole function; an illegal one prints in generic form
        lines = function.operation.get_asm(use_local_scope=True).splitlines()
    finally:
        del op.operation.attributes[_HERE]
    at = next((i for i, line in enumerate(lines) if _HERE in line), 0)
    shown = []
    for i in range(max(0, at - around), min(len(lines), at + around + 1)):
        line = re.sub(rf"{_HERE}, |, {_HERE}\b| \{{{_HERE}\}}|<\{{{_HERE}\}}>|{_HERE}", "", lines[i])
        shown.append(f"{'>' if i == at else ' '} {line[:width]}{'…' if len(line) > width else ''}")
    return "\n".join(shown)


_HERE = "adaptc.here"
