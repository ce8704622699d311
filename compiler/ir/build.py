"""Building operations: a builder that infers result types from the operator table."""

from __future__ import annotations

from typing import Any, Sequence

from torch_mlir import ir

from adaptc.errors import LegalityError
from adaptc.ir import dialect
from adaptc.ops.dense import split_activation
from adaptc.ops.table import DECLARATIONS, row


class Builder:
    """Creates operators at an insertion point, by name: ``b.add(x, y)``, ``b.reshape(x, shape=("T", 64))``.

    Methods return the result value, or a tuple of them for operators with several results. ``source`` is the module
    path noted on what is built.
    """

    def __init__(self, point: ir.InsertionPoint, source: str = ""):
        self.point = point
        self.source = source

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *operands, **attrs: self.op(name, *operands, **attrs)

    def op(self, name: str, *operands: ir.Value, **attrs: Any):
        operator = row(name)
        specs = [self.spec(v) for v in operands]
        attrs = operator.complete(attrs)
        try:
            results = operator.results(attrs, specs)
        except LegalityError as error:
            raise LegalityError(f"{error.message} (in module {self.source or '<root>'})") from error
        if "body" in operator.attrs:
            created = self._with_region(name, operands, results, attrs)
        else:
            created = self.raw(f"adaptc.{name}", operands, [dialect.to_type(r) for r in results], attrs)
        values = tuple(created.results)
        return values[0] if len(values) == 1 else values

    def raw(self, name: str, operands: Sequence[ir.Value], types: Sequence[ir.Type], attrs: dict[str, Any],
            regions: int = 0) -> ir.Operation:
        """An operation without inference, for declarations, calls and terminators."""
        attributes = {k: dialect.to_attr(v) for k, v in attrs.items()}
        if self.source and "source" not in attributes:
            attributes["source"] = ir.StringAttr.get(self.source)
        return ir.Operation.create(name, results=list(types), operands=list(operands), attributes=attributes,
                                   regions=regions, ip=self.point)

    def _with_region(self, name, operands, results, attrs) -> ir.Operation:
        own = {k: v for k, v in attrs.items() if k not in ("body", "yields")}
        created = self.raw(f"adaptc.{name}", operands, [dialect.to_type(r) for r in results], own, regions=1)
        block = ir.Block.create_at_start(created.regions[0], [v.type for v in operands])
        inner = Builder(ir.InsertionPoint(block))
        values: list[ir.Value] = list(block.arguments)
        for inner_name, indices, inner_attrs in attrs["body"]:
            values.append(inner.op(inner_name, *(values[i] for i in indices), **dict(inner_attrs)))
        inner.raw("adaptc.yield", [values[i] for i in attrs["yields"]], [], {})
        return created

    # ---- what decompositions use besides operators

    def scalar(self, value: float, dtype: str = "f32") -> ir.Value:
        """A rank-0 constant, which broadcasts with anything."""
        return self.op("constant", value=value, shape=(), dtype=dtype)

    @staticmethod
    def spec(value: ir.Value):
        return dialect.to_spec(value.type)

    def dtype(self, value: ir.Value) -> str:
        return self.spec(value).dtype

    def shape(self, value: ir.Value) -> tuple[int | str, ...]:
        return self.spec(value).shape

    def rank(self, value: ir.Value) -> int:
        return len(self.shape(value))

    def activation(self, operands: Sequence[ir.Value]) -> tuple[tuple, tuple]:
        """A linear map's operands as (activation, rest); see ``ops.dense.split_activation``."""
        count = len(split_activation([self.spec(v) for v in operands])[0])
        return tuple(operands[:count]), tuple(operands[count:])


def body_of(op) -> tuple[tuple, tuple]:
    """A region operator's (body, yields) as in ``protocol.OpSpec``."""
    block = op.operation.regions[0].blocks[0]
    index: dict[Any, int] = {argument: i for i, argument in enumerate(block.arguments)}
    body = []
    for inner in block.operations:
        if any(v not in index for v in inner.operation.operands):
            raise LegalityError(f"{op.operation.name}: its region uses a value from outside; pass it as an operand.")
        operands = tuple(index[v] for v in inner.operation.operands)
        if inner.operation.name == "adaptc.yield":
            return tuple(body), operands
        body.append((short_name(inner), operands, tuple(sorted(dialect.attrs(inner).items()))))
        index[inner.operation.results[0]] = len(index)
    raise LegalityError(f"{op.operation.name}: its region doesn't end in adaptc.yield.")


def is_operator(op) -> bool:
    """Whether an operation is one of the operator table's."""
    return op.operation.name.startswith("adaptc.") and short_name(op) not in DECLARATIONS


def short_name(op) -> str:
    """An operation's name in the table: "linear" for adaptc.linear."""
    return op.operation.name.removeprefix("adaptc.")


def attrs_of(op) -> dict[str, Any]:
    """An operator's attributes as its row declares them, the region included."""
    attrs = dialect.attrs(op)
    if len(op.operation.regions):
        attrs["body"], attrs["yields"] = body_of(op)
    return attrs
