"""What an operator costs: FLOPs from its row, bytes from its types. Shared by the profile table and the plan."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Callable, Mapping

from adaptc.formats import WeightFormat
from adaptc.ops.table import Form, added, row, scaled, size
from adaptc.plan import DTYPE_BYTES
from adaptc.protocol import OpSpec, StateSpec, TensorSpec

PackedBytes = Callable[[WeightFormat, tuple[int, int]], int]


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes moved, as sums of products of symbols (T tokens, R requests, S sampled rows, C context rows);
    ``dtype`` is what the arithmetic multiplies in."""

    flops: Form
    traffic: Form
    dtype: str


def weight_bytes(spec: TensorSpec, packed: PackedBytes) -> int:
    """Bytes a weight takes in memory."""
    if spec.format is None:
        return prod(spec.shape) * DTYPE_BYTES[spec.dtype]
    return packed(spec.format, spec.shape)


def cost_of(spec: OpSpec, packed: PackedBytes) -> Cost:
    operator = row(spec.op)
    attrs = operator.complete(spec.attrs)
    traffic: Form = {}
    for operand in (*spec.operands, *spec.results):
        traffic = added(traffic, _moved(spec, operand, packed))
    integer = any(isinstance(o, TensorSpec) and o.dtype == "i8" for o in spec.operands)
    return Cost(operator.cost(attrs, spec.operands, spec.results), traffic, "i8" if integer else "f32")


def _moved(spec: OpSpec, operand, packed: PackedBytes) -> Form:
    if isinstance(operand, StateSpec):
        row_bytes = sum(heads * width for _, heads, width in operand.parts) * DTYPE_BYTES[operand.dtype]
        return {"T": row_bytes, "R*C": row_bytes}
    if operand.format is None:
        return scaled(size(operand.shape), DTYPE_BYTES[operand.dtype])
    if row(spec.op).factors.startswith("t,vd"):  # a lookup reads the rows of its tokens, not the table
        return {"T": packed(operand.format, operand.shape) // operand.shape[0]}
    return {"": packed(operand.format, operand.shape)}


def evaluate(form: Form, symbols: Mapping[str, float]) -> float:
    """A Form's value for given symbol values."""
    return sum(n * prod(symbols[s] for s in key.split("*") if s) for key, n in form.items())
