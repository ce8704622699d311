"""How large a model is: what one token reads of its parameters, and what its caches take."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod

from adaptc.ir.module import Program, spec_of
from adaptc.ops.table import row
from adaptc.planner.profile import places
from adaptc.protocol import TensorSpec


def active(program: Program, elements: Mapping[str, int]) -> int:
    """Of the parameters (``elements`` by the tensor that holds them) those that one token reads: of experts the chosen
    ones, and nothing of tables in which rows are looked up by ids."""
    tensors = {name: weight.tensor for name, weight in program.weights().items()}
    read: dict[str, int] = {}
    for _, op, weights in places(program):
        spec = spec_of(op)
        gathers = row(spec.op).gathers
        for i, (name, operand) in enumerate(zip(weights, spec.operands)):
            if (tensor := tensors.get(name)) in elements and isinstance(operand, TensorSpec):
                read[tensor] = max(read.get(tensor, 0), _read(spec.operands, i, gathers))
    return sum(min(count, elements[name]) for name, count in read.items())


def _read(operands, number: int, gathers: tuple[int, int] | None) -> int:
    """Elements of an operand that one token's share of the operator reads."""
    shape = operands[number].shape
    if gathers is None:
        return prod(shape)
    table, rows = (operands[i].shape for i in gathers)
    if len(table) < 3:
        return 0 if number == gathers[0] else prod(shape)
    return min(prod(rows[1:]), shape[0]) * prod(shape[1:]) if shape[0] == table[0] else prod(shape)


def cache_bytes(program: Program, context: int) -> tuple[int, int]:
    """(bytes of caches that a token takes, those of a request of ``context`` tokens), when states are stored."""
    states = [slot.spec for slot in program.states().values()]
    kept = (min(context, s.window + s.page_size) if s.window else context for s in states)
    whole = sum(s.token_bytes() * tokens + s.request_bytes() for s, tokens in zip(states, kept))
    return ceil(sum(s.token_bytes() for s in states)), ceil(whole)


def window_bytes(program: Program) -> int:
    """Of the bytes of caches that a token takes, those that it takes only while it is in a window."""
    return ceil(sum(slot.spec.token_bytes() for slot in program.states().values() if slot.spec.window))


def fixed_bytes(program: Program) -> dict[str, int]:
    """Bytes that a request takes whatever its length, by what they are: the names of the states' parts."""
    sizes: dict[str, int] = {}
    for slot in program.states().values():
        if slot.spec.kind == "fixed":
            name = "+".join(name for name, _, _ in slot.spec.parts)
            sizes[name] = sizes.get(name, 0) + slot.spec.request_bytes()
    return sizes
