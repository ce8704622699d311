"""The compute profile table: what each kind of operator in each kind of module costs, and what bounds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from torch_mlir import ir

from adaptc.formats import WeightFormat
from adaptc.ir.build import is_operator
from adaptc.ir.module import STEP, Program, callee, joined, source_of, spec_of
from adaptc.ops.table import row
from adaptc.plan import kind_of
from adaptc.planner.cost import PackedBytes, cost_of, evaluate
from adaptc.protocol import OpSpec, TensorSpec
from adaptc.targets import Target


@dataclass(frozen=True)
class ProfileRow:
    """One kind of operator in one kind of module. FLOPs and bytes are of all its places in one step of ``tokens``
    tokens; seconds is the roofline's time on the target, ``bound`` which side of it ("compute", "bandwidth")."""

    module: str
    op: str
    shapes: str
    count: int
    tokens: int
    flops: float
    bytes: float
    seconds: float
    bound: str


def profile(program: Program, target: Target, packed: PackedBytes, *, tokens: int, context: int,
            formats: Mapping[str, WeightFormat] = MappingProxyType({})) -> list[ProfileRow]:
    """Rows in program order for a step of ``tokens`` tokens of one request with ``context`` tokens in the cache.
    ``formats`` says how matrices are stored whose types don't, by the weight's name."""
    symbols = {"T": tokens, "R": 1, "S": 1, "C": context}
    groups: dict[tuple, list] = {}

    @cache  # a body's operators stand in many places
    def costs(op: Any, stored: tuple[WeightFormat | None, ...]) -> tuple[str, str, float, float, str]:
        spec = _stored(spec_of(op), stored)
        cost = cost_of(spec, packed)
        return spec.op, _shapes(spec), evaluate(cost.flops, symbols), evaluate(cost.traffic, symbols), cost.dtype

    for path, op, weights in places(program):
        name, shapes, *cost, dtype = costs(op.operation, tuple(formats.get(weight) for weight in weights))
        key = (kind_of(path), name, shapes)
        count, flops, moved, _ = groups.get(key, (0, 0.0, 0.0, ""))
        groups[key] = (count + 1, flops + cost[0], moved + cost[1], dtype)
    rows = []
    for (module, op, shapes), (count, flops, moved, dtype) in groups.items():
        compute, transfer = flops / target.rate(dtype), moved / target.memory[-1].bandwidth
        rows.append(ProfileRow(module, op, shapes, count, tokens, flops, moved,
                               max(compute, transfer) + count * target.launch_s,
                               "compute" if compute > transfer else "bandwidth"))
    return rows


def places(program: Program) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """(absolute module path, operation, the weight or state that each operand is, "" for other values) of every operator
    as often as it runs, in program order. A view that costs no kernel, as the lowered stage says by an empty list of
    them, isn't run."""
    functions = program.functions()
    for op in functions[STEP].entry_block.operations:
        names = tuple(_symbol(value) for value in op.operation.operands)
        if op.operation.name == "func.call":
            for inner in functions[callee(op)].entry_block.operations:
                if _runs(inner):
                    arguments = (ir.BlockArgument(v).arg_number if isinstance(v.owner, ir.Block) else None
                                 for v in inner.operation.operands)
                    yield (joined(source_of(op), source_of(inner)), inner,
                           tuple("" if n is None else names[n] for n in arguments))
        elif _runs(op):
            yield source_of(op), op, names


def _symbol(value: ir.Value) -> str:
    owner = value.owner
    return owner.attributes["symbol"].value if not isinstance(owner, ir.Block) and owner.name == "adaptc.get" else ""


def _stored(spec: OpSpec, formats: Sequence[WeightFormat | None]) -> OpSpec:
    """With matrices stored as ``formats`` says of each operand, None: as its type says."""
    matrices = row(spec.op).matrix_operands(spec.attrs, spec.operands)
    operands = tuple(replace(o, format=stored) if i in matrices and stored is not None else o
                     for i, (o, stored) in enumerate(zip(spec.operands, formats)))
    return replace(spec, operands=operands)


def _runs(op) -> bool:
    attributes = op.operation.attributes
    return is_operator(op) and ("kernels" not in attributes or len(attributes["kernels"]) > 0)


def _shapes(spec) -> str:
    tensors = [o for o in spec.operands if isinstance(o, TensorSpec)]
    return " · ".join(_shape(t) for t in tensors if t.shape) or "scalar"


def _shape(tensor: TensorSpec) -> str:
    return "×".join(map(str, tensor.shape)) + (f":{tensor.format.name}" if tensor.format else "")
