"""A program in the IR: its stage, functions, declarations and walks; parsing and printing.

A module has a private function per distinct body and one public function ``@step``:

    func.func @step(%tokens i32[T], %positions i32[T], %requests i32[T], %sampled i32[S]) -> logits f32[S, V]

``%requests`` numbers each token's request within the step. A fifth argument, %lengths i32[R], is there when a result
depends on the tokens that a request may come to have, which it declares before it starts. Weights and states are declared at module level, read
with ``adaptc.get`` and passed to bodies as arguments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Iterator

from torch_mlir import ir
from torch_mlir.dialects import func

from adaptc.errors import ParseError
from adaptc.ir import dialect
from adaptc.ir.build import attrs_of, is_operator, short_name
from adaptc.ops.table import row
from adaptc.protocol import OpSpec, StateSpec, TensorSpec

STAGES = ("captured", "fused", "sharded", "laid_out", "lowered")
STEP = "step"
ROLES = ("tokens", "positions", "requests", "sampled", "lengths")
"""What @step's arguments are, in order. ``lengths`` is there when a result depends on how long a request may become."""

DIMENSIONS = {"sampled": "S", "lengths": "R"}
"""Role → symbol of its one dimension, where that isn't T."""


@dataclass(frozen=True)
class Weight:
    """A module-level weight: the file's tensor, the order of its rows, and how it is stored. A constant that the file
    adds to a parameter (norm weights plus one) is an explicit operator in the graph, never hidden here."""

    name: str
    spec: TensorSpec
    tensor: str
    rows: tuple = ()
    """A row permutation rule such as ("rope_halves", 9), or ()."""
    stored: str = "f32"
    """The format the file keeps the tensor in."""
    tile: str = ""
    """The order a backend packs it in, from the laid-out stage on."""

    @property
    def transposed(self) -> bool:
        """Whether the last two axes are exchanged in the file."""
        return self.rows[:1] == ("transpose",)


@dataclass(frozen=True)
class StateSlot:
    """A module-level state and the module path of the operator that owns it."""

    name: str
    spec: StateSpec
    source: str = ""


class Program:
    """An MLIR module of one stage. Passes edit it in place through this view; it keeps nothing beside the module."""

    def __init__(self, module: ir.Module):
        self.module = module

    @staticmethod
    def parse(text: str, where: str = "the IR") -> "Program":
        context = dialect.context()
        with context, ir.Location.unknown():
            try:
                return Program(ir.Module.parse(text))
            except ir.MLIRError as error:
                raise ParseError(f"{where} doesn't parse: {error}{_window(text, error)}") from error

    @staticmethod
    def empty(stage: str, **facts: Any) -> "Program":
        """A new module. ``facts`` are module attributes such as vocabulary=49152."""
        context = dialect.context()
        with context, ir.Location.unknown():
            program = Program(ir.Module.create())
            for name, value in {"stage": stage, **facts}.items():
                program.set_fact(name, value)
        return program

    def text(self) -> str:
        """The printed module; parsing it gives the same program."""
        return self.module.operation.get_asm(use_local_scope=True) + "\n"

    def copy(self) -> "Program":
        return Program.parse(self.text())

    def editing(self):
        """A context manager in which operations may be created: the module's context and an unknown location."""
        return _Editing(self.module.context)

    # ---- facts: module attributes

    def fact(self, name: str, default: Any = None) -> Any:
        attributes = self.module.operation.attributes
        return dialect.from_attr(attributes[f"adaptc.{name}"]) if f"adaptc.{name}" in attributes else default

    def set_fact(self, name: str, value: Any) -> None:
        with self.editing():
            self.module.operation.attributes[f"adaptc.{name}"] = dialect.to_attr(value)

    @property
    def stage(self) -> str:
        return self.fact("stage", "")

    # ---- declarations

    def weights(self) -> dict[str, Weight]:
        result = {}
        for op in self.declared("weight"):
            a = dialect.attrs(op)
            result[a["sym_name"]] = Weight(a["sym_name"], dialect.to_spec(a["type"]), a["tensor"], a.get("rows", ()),
                                           a.get("stored", "f32"), dialect.tile_of(a["type"]))
        return result

    def states(self) -> dict[str, StateSlot]:
        result = {}
        for op in self.declared("state_slot"):
            a = dialect.attrs(op)
            source = op.operation.attributes
            result[a["sym_name"]] = StateSlot(a["sym_name"], dialect.to_spec(a["type"]),
                                              source["source"].value if "source" in source else "")
        return result

    def declared(self, kind: str) -> list:
        return [op for op in self.module.body.operations if op.operation.name == f"adaptc.{kind}"]

    def declare(self, item: Weight | StateSlot) -> None:
        """Adds a declaration after the others, before the functions; same-named ones are replaced in place."""
        kind = "weight" if isinstance(item, Weight) else "state_slot"
        with self.editing():
            attributes = {"sym_name": item.name}
            if isinstance(item, Weight):
                attributes |= {"tensor": item.tensor, "type": ir.TypeAttr.get(dialect.to_type(item.spec, item.tile))}
                attributes |= {"rows": item.rows} if item.rows else {}
                attributes |= {"stored": item.stored}
            else:
                attributes |= {"type": ir.TypeAttr.get(dialect.to_type(item.spec))}
                attributes |= {"source": item.source} if item.source else {}
            old = [op for op in self.declared(kind) if dialect.from_attr(op.attributes["sym_name"]) == item.name]
            functions = [op for op in self.module.body.operations if op.operation.name == "func.func"]
            before = old[0] if old else functions[0] if functions else None
            point = ir.InsertionPoint(before) if before else ir.InsertionPoint(self.module.body)
            ir.Operation.create(f"adaptc.{kind}", attributes={k: dialect.to_attr(v) for k, v in attributes.items()},
                                ip=point)
            for op in old:
                op.operation.erase()

    # ---- functions

    def functions(self) -> dict[str, func.FuncOp]:
        return {op.name.value: op for op in self.module.body.operations if isinstance(op, func.FuncOp)}

    @property
    def step(self) -> func.FuncOp:
        return self.functions()[STEP]

    @property
    def roles(self) -> tuple[str, ...]:
        """What @step's arguments are."""
        return ROLES[: len(self.step.entry_block.arguments)]

    def calls(self, name: str | None = None) -> list:
        """Calls in @step, in program order; of one body if ``name`` is given."""
        found = [op for op in self.step.entry_block.operations if op.operation.name == "func.call"]
        return [op for op in found if name is None or callee(op) == name]

    def operators(self) -> Iterator[tuple[func.FuncOp, Any]]:
        """Every operator of the table, with the function it is in."""
        for function in self.functions().values():
            for op in function.entry_block.operations:
                if is_operator(op):
                    yield function, op

    def operator_names(self) -> frozenset[str]:
        """Names of the table's operators that stand anywhere in the program, in other operators' regions too."""
        found = [op for _, op in self.operators()]
        inner = [op for outer in found for region in outer.operation.regions for op in region.blocks[0].operations]
        return frozenset(short_name(op) for op in (*found, *inner) if is_operator(op))


class _Editing:
    def __init__(self, context: ir.Context):
        self.context, self.location = context, None

    def __enter__(self):
        self.context.__enter__()
        self.location = ir.Location.unknown()
        self.location.__enter__()

    def __exit__(self, *exc):
        self.location.__exit__(*exc)
        self.context.__exit__(*exc)


def callee(call) -> str:
    return ir.FlatSymbolRefAttr(call.operation.attributes["callee"]).value


def source_of(op) -> str:
    attributes = op.operation.attributes
    return attributes["source"].value if "source" in attributes else ""


def joined(around: str, path: str) -> str:
    """The module path ``path`` within the call of the module at ``around``; either may be "", the root."""
    return ".".join(filter(None, (around, path)))


def spec_of(op) -> OpSpec:
    """An operator apart from its place, as backends see it."""
    return OpSpec(
        short_name(op),
        tuple(dialect.to_spec(v.type) for v in op.operation.operands),
        tuple(dialect.to_spec(v.type) for v in op.operation.results),
        row(short_name(op)).complete(attrs_of(op)),
    )


def _window(text: str, error: ir.MLIRError, around: int = 3, width: int = 200) -> str:
    """The lines of ``text`` around the place that the first diagnostic names, that line marked."""
    found = re.search(r'"-":(\d+):(\d+)', str(error))
    if found is None:
        return ""
    at, column, lines = int(found[1]) - 1, int(found[2]) - 1, text.splitlines()
    shown = []
    for i in range(max(0, at - around), min(len(lines), at + around + 1)):
        shown.append(f"{'>' if i == at else ' '} {lines[i][:width]}{'…' if len(lines[i]) > width else ''}")
        if i == at and column < width:
            shown.append(" " * (column + 2) + "^")
    return "\n" + "\n".join(shown)
