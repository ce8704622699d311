"""The compute profile table: what each kind of operator in each kind of module costs, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from adaptc.ir.build import is_operator
from adaptc.ir.module import STEP, Program, callee, joined, source_of, spec_of
from adaptc.plan import kind_of
from adaptc.planner.cost import PackedBytes, cost_of, evaluate
from adaptc.protocol import TensorSpec
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


def profile(program: Program, target: Target, packed: PackedBytes, *, tokens: int, context: int) -> list[ProfileRow]:
    """Rows in program order for a step of ``tokens`` tokens of one request with ``context`` tokens in the cache."""
    symbols = {"T": tokens, "R": 1, "S": 1, "C": context}
    groups: dict[tuple, list] = {}
    for path, op in places(program):
        spec = spec_of(op)
        cost = cost_of(spec, packed)
        key = (kind_of(path), spec.op, _shapes(spec))
        count, flops, moved, _ = groups.get(key, (0, 0.0, 0.0, ""))
        groups[key] = (count + 1, flops + evaluate(cost.flops, symbols), moved + evaluate(cost.traffic, symbols),
                       cost.dtype)
    rows = []
    for (module, op, shapes), (count, flops, moved, dtype) in groups.items():
        compute, transfer = flops / target.rate(dtype), moved / target.memory[-1].bandwidth
        rows.append(ProfileRow(module, op, shapes, count, tokens, flops, moved,
                               max(compute, transfer) + count * target.launch_s,
                               "compute" if compute > transfer else "bandwidth"))
    return rows


def places(program: Program):
    """(absolute module path, operation) of every operator as often as it runs, in program order. A view that costs no
    kernel, as the lowered stage says by an empty list of them, isn't run."""
    functions = program.functions()
    for op in functions[STEP].entry_block.operations:
        if op.operation.name == "func.call":
            for inner in functions[callee(op)].entry_block.operations:
                if _runs(inner):
                    yield joined(source_of(op), source_of(inner)), inner
        elif _runs(op):
            yield source_of(op), op


def _runs(op) -> bool:
    attributes = op.operation.attributes
    return is_operator(op) and ("kernels" not in attributes or len(attributes["kernels"]) > 0)


def _shapes(spec) -> str:
    tensors = [o for o in spec.operands if isinstance(o, TensorSpec)]
    return " · ".join(_shape(t) for t in tensors if t.shape) or "scalar"


def _shape(tensor: TensorSpec) -> str:
    return "×".join(map(str, tensor.shape)) + (f":{tensor.format.name}" if tensor.format else "")
