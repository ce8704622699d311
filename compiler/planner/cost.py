"""What an operator costs: FLOPs from its row, bytes from its types. Shared by the profile table and the plan."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Callable, Mapping

from adaptc.formats import WeightFormat
from adaptc.ops.table import Form, added, context_symbol, row, scaled, size
from adaptc.plan import DTYPE_BYTES, evaluate
from adaptc.protocol import OpSpec, StateSpec, TensorSpec

__all__ = ["Cost", "PackedBytes", "cost_of", "evaluate", "weight_bytes"]

PackedBytes = Callable[[WeightFormat, tuple[int, int]], int]


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes moved, as sums of products of symbols: T tokens, R requests, S sampled rows, C context rows of a
    request, C<512 at most 512 of them, C/4 a quarter. ``dtype`` is what the arithmetic multiplies in."""

    flops: Form
    traffic: Form
    dtype: str


def weight_bytes(spec: TensorSpec, packed: PackedBytes) -> int:
    """Bytes a weight takes in memory: packed when it has a format, else dense."""
    return packed(spec.format, spec.shape) if spec.format else prod(spec.shape) * DTYPE_BYTES[spec.dtype]


def cost_of(spec: OpSpec, packed: PackedBytes) -> Cost:
    operator = row(spec.op)
    attrs = operator.complete(spec.attrs)
    whole = [_bytes(o, packed) for o in (*spec.operands, *spec.results)]
    for i, operand in enumerate(spec.operands):
        if isinstance(operand, StateSpec):
            reads = operator.rows_read(attrs, spec.operands) if operator.rows_read else (
                f"R*{context_symbol(operand.window, operand.rate)}")
            whole[i] = STATE_BYTES[operand.kind](operand, operator.appends, reads)
    if operator.gathers:
        table, rows = operator.gathers
        whole[table] = _row_bytes(spec.operands[table], spec.operands[rows], packed)
    for i, part in operator.reads(attrs, spec.operands).items():
        whole[i] = {key: int(value * part.share) for key, value in whole[i].items()}
    integer = any(o.dtype == "i8" for o in spec.operands if isinstance(o, TensorSpec))
    return Cost(operator.cost(attrs, spec.operands, spec.results), added(*whole), "i8" if integer else "f32")


def _bytes(spec: TensorSpec | StateSpec, packed: PackedBytes) -> Form:
    """All of a tensor, once."""
    if isinstance(spec, StateSpec):
        return {}
    if spec.format is not None:
        return {"": weight_bytes(spec, packed)}
    return scaled(size(spec.shape), DTYPE_BYTES[spec.dtype])


def _row_state_bytes(spec: StateSpec, appends: bool, reads: str) -> Form:
    """The rows that the step's tokens append, and those that it reads."""
    read = {reads: spec.row_bytes()}
    return added({"T": -(-spec.row_bytes() // spec.rate)}, read) if appends else read


def _fixed_state_bytes(spec: StateSpec, appends: bool, reads: str) -> Form:
    """Each request's value is read, and the next one written."""
    return {"R": spec.request_bytes() * (2 if appends else 1)}


STATE_BYTES: Mapping[str, Callable[[StateSpec, bool, str], Form]] = {"rows": _row_state_bytes, "fixed": _fixed_state_bytes}
"""By the state's kind: what (its contract, whether the operator appends to it, which rows it reads) move."""


def _row_bytes(table: TensorSpec, rows: TensorSpec, packed: PackedBytes) -> Form:
    """The rows of a table that a lookup reads."""
    if table.format is not None and len(table.shape) == 3 and isinstance(rows.shape[0], str):  # whole matrices, each at most once
        chosen = prod(rows.shape[1:])
        most = {f"{rows.shape[0]}<{max(1, table.shape[0] // chosen)}": chosen}
        return scaled(most, weight_bytes(table, packed) // table.shape[0])
    if table.format is not None:
        return scaled(size(rows.shape), weight_bytes(table, packed) // table.shape[0])
    return scaled(size((*rows.shape, *table.shape[1:])), DTYPE_BYTES[table.dtype])
