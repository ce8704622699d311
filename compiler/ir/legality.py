"""What must hold of a program at each stage. Every pass's output goes through ``check``."""

from __future__ import annotations

from torch_mlir import ir

from adaptc.errors import LegalityError
from adaptc.ir import dialect
from adaptc.ir.build import attrs_of, short_name
from adaptc.ir.module import ROLES, STAGES, STEP, Program, callee, source_of
from adaptc.ops.table import row


def check(program: Program) -> None:
    """Raises LegalityError naming the first operation that breaks a rule of the program's stage."""
    if program.stage not in STAGES:
        raise LegalityError(f"the module says stage {program.stage!r}; stages are {', '.join(STAGES)}.")
    try:
        program.module.operation.verify()
    except ir.MLIRError as error:
        raise LegalityError(f"stage {program.stage}: {error}") from error
    functions = program.functions()
    if STEP not in functions:
        raise LegalityError(f"stage {program.stage}: the module has no function @{STEP}.")
    arguments = len(functions[STEP].entry_block.arguments)
    if arguments != len(ROLES):
        raise LegalityError(f"@{STEP} has {arguments} arguments, expected {', '.join(ROLES)}.")
    _declarations(program)
    declared = declared_types(program)
    for function in functions.values():
        for op in function.entry_block.operations:
            _operation(program, function, op, declared)
    if program.stage == "lowered":
        for function, op in program.operators():
            if "kernels" not in op.operation.attributes:
                raise _at(program, function, op, "has no kernel")


def _declarations(program: Program) -> None:
    seen = set()
    for kind in ("weight", "state_slot"):
        for op in program.declared(kind):
            name = dialect.attrs(op)["sym_name"]
            if name in seen:
                raise LegalityError(f"symbol {name!r} is declared twice.")
            seen.add(name)


def _operation(program: Program, function, op, declared: dict[str, ir.Type]) -> None:
    name = op.operation.name
    if name == "func.call":
        if callee(op) not in program.functions():
            raise _at(program, function, op, f"calls @{callee(op)}, which doesn't exist")
        if function.name.value != STEP:
            raise _at(program, function, op, "is a call inside a body; only @step calls bodies")
        return
    if name == "func.return":
        return
    if name == "adaptc.get":
        symbol = dialect.attrs(op)["symbol"]
        if symbol not in declared:
            raise _at(program, function, op, f"reads {symbol!r}, which isn't declared")
        if op.operation.results[0].type != declared[symbol]:
            raise _at(program, function, op, f"has type {op.operation.results[0].type}, declared {declared[symbol]}")
        return
    if not name.startswith("adaptc."):
        raise _at(program, function, op, "is of a foreign dialect")
    operator = row(short_name(op))
    specs = [dialect.to_spec(v.type) for v in op.operation.operands]
    try:
        expected = operator.results(attrs_of(op), specs)
    except LegalityError as error:
        raise _at(program, function, op, f"is illegal: {error.message}") from error
    got = tuple(dialect.to_spec(v.type) for v in op.operation.results)
    if got != expected:
        raise _at(program, function, op, f"has results {got}, its row infers {expected}")


def declared_types(program: Program) -> dict[str, ir.Type]:
    """Declared type of every weight and state, by name."""
    found = {}
    for kind in ("weight", "state_slot"):
        for op in program.declared(kind):
            a = op.operation.attributes
            found[a["sym_name"].value] = ir.TypeAttr(a["type"]).value
    return found


def _at(program: Program, function, op, problem: str) -> LegalityError:
    place = f"stage {program.stage}, @{function.name.value}"
    source = f", module {source_of(op)}" if source_of(op) else ""
    return LegalityError(f"{place}{source}: {op.operation.name} {problem}.\n  {op.operation.get_asm()[:400]}")
