"""Editing functions and their calls: signatures, copies, and types that arrive from declarations."""

from __future__ import annotations

from typing import Iterator, Mapping, Sequence

from torch_mlir import ir

from adaptc.ir.build import Builder
from adaptc.ir.module import STEP, Program, source_of
from adaptc.ir.rewrite import Node, nodes


def bodies(program: Program) -> Iterator[tuple[str, ir.OpView, list[Node]]]:
    """Every function but @step, with the calls of it."""
    for name, function in program.functions().items():
        if name != STEP:
            yield name, function, [Node(call.operation) for call in program.calls(name)]


def matrices(program: Program) -> set[str]:
    """Weights that only operators read which take them in a packed format (the rows' ``matrices``)."""
    found: dict[str, bool] = {}
    weights, functions = program.weights(), program.functions()

    def packed(value: ir.Value) -> bool:
        result = True
        for use in value.uses:
            node, number = Node(use.owner.operation), use.operand_number
            if node.name == "func.call":
                body = functions[ir.FlatSymbolRefAttr(node.op.attributes["callee"]).value]
                result &= packed(body.entry_block.arguments[number])
            elif node.row is None or number not in node.row.matrix_operands(
                    node.attrs, [Builder.spec(v) for v in node.operands]):
                return False
        return result

    for node in nodes(program.step):
        name = node.op.attributes["symbol"].value if node.name == "get" else ""
        if name in weights:
            found[name] = found.get(name, True) and packed(node.results[0])
    return {name for name, good in found.items() if good and len(weights[name].spec.shape) > 1}


def returned(function) -> Node:
    """A function's terminator."""
    return nodes(function)[-1]


def refresh_signature(function) -> None:
    """Makes a function's type say what its arguments and its return say."""
    arguments = [a.type for a in function.entry_block.arguments]
    results = [v.type for v in returned(function).operands]
    function.operation.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(arguments, results))


def replace_call(call: Node, operands: Sequence[ir.Value], types: Sequence[ir.Type], keep: Sequence[int]) -> Node:
    """A new call with other operands and results; old result ``keep[i]`` becomes result i. Other old results must
    be unused."""
    old = {n: call.op.attributes[n] for n in call.op.attributes}
    new = ir.Operation.create("func.call", results=list(types), operands=list(operands), attributes=old,
                              ip=ir.InsertionPoint(call.op))
    for i, result in zip(keep, new.results):
        call.results[i].replace_all_uses_with(result)
    call.op.erase()
    return Node(new)


def set_returned(function, values: Sequence[ir.Value]) -> None:
    """Gives a function another list of returned values, and its type with it."""
    old = returned(function)
    ir.Operation.create("func.return", operands=list(values), ip=ir.InsertionPoint(old.op))
    old.op.erase()
    refresh_signature(function)


def clone(program: Program, name: str) -> str:
    """A copy of function ``name``, placed after it; returns the copy's name."""
    functions = program.functions()
    new = next(f"{name}_{i}" for i in range(2, len(functions) + 3) if f"{name}_{i}" not in functions)
    copy = functions[name].operation.clone(ip=ir.InsertionPoint(functions[name]))
    copy.operation.attributes["sym_name"] = ir.StringAttr.get(new)
    copy.operation.move_after(functions[name].operation)
    return new


def retype(program: Program, types: Mapping[str, ir.Type]) -> tuple[str, ...]:
    """Gives declared weights and states (by name) other types, and follows them through gets, calls and bodies.

    A body whose callers now pass different types is cloned, once a combination. Returns a sentence for each clone,
    and appends it to the module's fact "clones".
    """
    with program.editing():
        for kind in ("weight", "state_slot"):
            for op in program.declared(kind):
                name = op.operation.attributes["sym_name"].value
                if name in types:
                    op.operation.attributes["type"] = ir.TypeAttr.get(types[name])
        for node in nodes(program.step):
            if node.name == "get" and node.op.attributes["symbol"].value in types:
                node.results[0].set_type(types[node.op.attributes["symbol"].value])
        sentences = tuple(s for name, _, calls in list(bodies(program)) for s in _specialise(program, name, calls))
    if sentences:
        program.set_fact("clones", program.fact("clones", ()) + sentences)
    return sentences


def _specialise(program: Program, name: str, calls: list[Node]) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[Node]] = {}
    for call in calls:
        groups.setdefault(tuple(str(v.type) for v in call.operands), []).append(call)
    first: Node | None = None
    for members in groups.values():
        target = name
        if first is None:
            first = members[0]
        else:
            target = clone(program, name)
            for call in members:
                call.op.attributes["callee"] = ir.FlatSymbolRefAttr.get(target)
            yield _sentence(name, target, first, members)
        _set_arguments(program.functions()[target], [v.type for v in members[0].operands])


def _set_arguments(function, types: Sequence[ir.Type]) -> None:
    for argument, kind in zip(function.entry_block.arguments, types):
        if argument.type != kind:
            argument.set_type(kind)
    for node in nodes(function):
        for region in node.op.regions:
            for inner, operand in zip(region.blocks[0].arguments, node.operands):
                inner.set_type(operand.type)
    refresh_signature(function)


def _sentence(name: str, target: str, first: Node, members: list[Node]) -> str:
    differing = [i for i, (a, b) in enumerate(zip(first.operands, members[0].operands)) if a.type != b.type]
    places = ", ".join(source_of(call.op) for call in members)
    what = "; ".join(f"argument {i} is {_brief(members[0].operands[i])} instead of {_brief(first.operands[i])}"
                     for i in differing)
    calls = "1 call" if len(members) == 1 else f"{len(members)} calls"
    return f"@{target} is a copy of @{name} for {calls} ({places}): {what}."


def _brief(value: ir.Value) -> str:
    found = Builder.spec(value)
    stored = getattr(found, "format", None)
    return stored.name if stored is not None else str(found)
