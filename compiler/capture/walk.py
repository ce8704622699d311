"""An exported ATen graph, node by node, as one flat ``@step`` of the dialect; ``rules`` says what becomes what."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping

import torch
from torch_mlir import ir
from torch_mlir.dialects import func

from adaptc.capture import constants as numbers
from adaptc.capture.aten import FLATTENED, SKIPPED, Complex, Mask
from adaptc.capture.constants import name_of as key
from adaptc.capture.functional import functional
from adaptc.capture.order import needed, ordered
from adaptc.capture.places import PREFIX, Place, place_of
from adaptc.capture.problems import Problems
from adaptc.capture.pure import check_kept
from adaptc.capture.rules import package_of, rules
from adaptc.capture.trace import TOKENS, VALUE_HINT
from adaptc.errors import CaptureError, DynamicError, LegalityError
from adaptc.ir import dialect
from adaptc.ir.build import Builder
from adaptc.ir.module import DIMENSIONS, ROLES, STEP, Program, StateSlot, Weight
from adaptc.protocol import StateSpec, TensorSpec

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64",
          torch.int64: "i32", torch.int32: "i32", torch.int8: "i8", torch.bool: "i1"}
"""torch dtype → ours. Integers of the graph are token ids, positions and what is computed from them: 32 bits."""

MAX_CONSTANT = 1 << 16
"""Elements of the largest buffer that is written into the program itself."""

MAX_TABLE = 1 << 12
"""The same of float buffers, which operators read, and backends write constants out as instructions. Larger ones are weights
that no file has."""

COMPUTED = "computed:"
"""What the names of such weights' tensors start with; the buffer's name follows."""

IRRELEVANT = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy", "dtype", "generator")
"""Keyword arguments of ATen operators that say where a tensor lies, or repeat what its type says."""

SAMPLED = "S"

_FLATTENED = re.compile(rf"(\d+)\*{TOKENS}")
"""A dimension of that many rows for each token."""

_DIMENSIONS = ("aten.unsqueeze", "aten.mean", "aten.sum", "aten.amax", "aten.amin", "aten.var")
"""Of the operators that may have one, those that are given numbers of dimensions."""

ANEW = ("adaptc.attention", "aten.embedding", "aten.layer_norm", "aten.linear", "aten.rms_norm")
"""Operators that are looked at also where what they are given couldn't be made: it is a tensor like others to them."""


MASKS = ("adaptc.mask", "adaptc.entries")
"""Operators that stand for masks, which are never computed."""


@dataclass(frozen=True)
class Stored:
    """How the files store a parameter: the ``tensor``'s rows, permuted by the rule ``rows``, plus ``add``."""

    parameter: str
    tensor: str
    rows: tuple = ()
    add: float = 0.0
    format: str = "f32"


@dataclass(frozen=True)
class Parameter:
    """A stored tensor as an argument of the graph; each use adds what the file leaves out anew."""

    stored: Stored
    spec: TensorSpec


@dataclass(frozen=True)
class Constant:
    """A buffer that no file stores, or a tensor that the trace holds."""

    name: str
    value: torch.Tensor
    dtype: str


def walk(exported: torch.export.ExportedProgram, stored: Mapping[str, Stored],
         constants: Mapping[str, torch.Tensor], problems: Problems) -> Program:
    """The unfolded program: weights and states declared, logits of the sampled rows returned.

    stored     parameter → how the files keep it; constants: buffer → value
    problems   gets an error for all operators that have no rule, and one for each node whose rule doesn't apply: what
               such a node makes is taken to be zeros, so that the rest can be looked at. It is no program then.
    """
    _check_static(exported.graph)
    exported = _decomposed(functional(exported))
    numbers.compute(exported.graph, _unknown(exported.graph))
    unknown(exported, problems)
    logits = _logits(exported)
    check_kept(exported, logits, problems)
    exported.graph.eliminate_dead_code()
    program = Program.empty("captured")
    with program.editing():
        _Walk(program, exported, stored, constants, problems).run(logits)
    return program


def _unknown(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    tensors = (n for n in needed(graph) if n.op == "call_function" and not isinstance(n.meta.get("val"), _NUMBERS))
    return [n for n in tensors if key(n) not in rules() and key(n) not in SKIPPED]


_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def _decomposed(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """With torch's own decompositions of those operators that the table lacks; the rest stay as the authors wrote."""
    known, unknown = torch.export.default_decompositions(), {n.target for n in _unknown(exported.graph)}
    lacking = {target: known[target] for target in unknown if target in known}
    # those that torch itself makes of others it takes apart whatever it is given
    return exported.run_decompositions(lacking) if lacking or any(map(_composite, unknown)) else exported


def _composite(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        target.name(), "CompositeImplicitAutograd")


def _check_static(graph: torch.fx.Graph) -> None:
    """DynamicError where Python or a shape depends on what a tensor holds, checks of it that decide nothing apart."""
    for node in needed(graph):
        if node.meta.get("unbacked_bindings") and _used(node):
            raise DynamicError(f"{node.target} in {place_of(node)} takes a value or a shape out of a tensor's contents, "
                               "which only a run has.", hint=VALUE_HINT)


def _used(node: torch.fx.Node) -> bool:
    """Whether a tensor's value or shape comes of the node."""
    if not isinstance(node.meta.get("val"), _NUMBERS):
        return node.op != "call_function" or key(node) not in SKIPPED
    return any(_used(user) for user in node.users)


def unknown(exported: torch.export.ExportedProgram, problems: Problems) -> None:
    """Adds the error that names the operators without a rule, if there are any."""
    found: dict[str, list[Place]] = {}
    for node in _unknown(exported.graph):
        written = node.meta.get("original_aten") or node.target  # what torch's own decomposition started from
        found.setdefault(str(written), []).append(place_of(node))
    if found:
        listed = "; ".join(
            f"{name} in {places[0]}" + (f" and {len(places) - 1} more places" if len(places) > 1 else "")
            for name, places in sorted(found.items())
        )
        problems.add(CaptureError(f"adaptc has no rule for {len(found)} operator(s) of this model: {listed}.",
                                  hint="A rule is one row in compiler/capture/aten.py, or in a package of yours "
                                       "(docs/adding.md): install the one that brings the model's own operators, if there "
                                       "is one."))


class _Walk:
    """The state of one walk, and what rules are given: the builder ``b``, the result's ``shape`` and ``dtype``."""

    def __init__(self, program, exported, stored, constants, problems):
        self.program, self.exported = program, exported
        self.stored, self.constants = stored, constants
        self.problems, self.spoiled = problems, set()
        self.values: dict[torch.fx.Node, Any] = {}
        self.place = Place("")
        self.shape: tuple = ()
        self.dtype = ""
        self.owned: Counter[str] = Counter()
        self.end = 0
        self.read: dict[str, ir.Value] = {}
        self.shared: dict[tuple, ir.Value] = {}
        """States of attention by the keys, values and window that they were made for."""
        self.tables: dict[str, torch.Tensor] = {}

    def run(self, logits: torch.fx.Node) -> None:
        graph = self.exported.graph
        placeholders = self._placeholders()
        self.symbol, self.needed = _token_symbol(placeholders), set(needed(graph))
        vocabulary = self._dims(logits.meta["val"].shape)[-1]
        kinds = [dialect.to_type(TensorSpec("i32", (d,))) for d in (TOKENS, TOKENS, TOKENS, SAMPLED)]
        result = dialect.to_type(TensorSpec("f32", (SAMPLED, vocabulary)))
        self.step = step = func.FuncOp(STEP, (kinds, [result]), ip=ir.InsertionPoint(self.program.module.body))
        block = step.add_entry_block()
        self.point = ir.InsertionPoint(block)
        self.tokens, self.positions, self.requests, sampled = block.arguments
        self.b = Builder(self.point)
        self.ids = self.b.reshape(self.tokens, shape=(1, TOKENS))
        self.first = Builder(ir.InsertionPoint(self.ids.owner))
        for kind, name, node in placeholders:
            self.values[node] = self._argument(kind, name, node)
        for node, module in ordered(graph):
            self._node(node, module)
        self.b = Builder(self.point)
        flat = self.b.reshape(self.values[logits], shape=(TOKENS, vocabulary))
        func.ReturnOp([self.b.gather_rows(flat, sampled)], ip=self.point)
        self.program.set_fact("vocabulary", vocabulary)
        self.program.set_fact("context", self.end)
        if brought := {package_of(key(node)) for node in graph.nodes if node.op == "call_function"} - {None}:
            self.program.set_fact("rules_of", sorted(brought))

    # ---- arguments of the graph

    def _placeholders(self) -> list[tuple[Any, str, torch.fx.Node]]:
        """The graph's arguments: what kind each is, and its name in what was traced."""
        nodes = {n.name: n for n in self.exported.graph.nodes if n.op == "placeholder"}
        return [
            (spec.kind, spec.target or "", nodes[spec.arg.name])
            for spec in self.exported.graph_signature.input_specs
        ]

    def _argument(self, kind: Any, target: str, node: torch.fx.Node) -> Any:
        name = target.removeprefix(PREFIX + ".")
        kinds = torch.export.graph_signature.InputKind
        if kind is kinds.USER_INPUT:
            return self.ids
        spec = TensorSpec(self._kind(node.meta["val"].dtype), self._dims(node.meta["val"].shape))
        if name in self.stored:
            return Parameter(self.stored[name], self._viewed(node, spec))
        value = self.constants[name] if kind is kinds.BUFFER else self.exported.constants[target]
        return Constant(name, value, spec.dtype)

    def _viewed(self, node: torch.fx.Node, spec: TensorSpec) -> TensorSpec:
        """The shape in which all that read a parameter view it, if that is a stack of matrices with its columns: experts
        that are stored one below the other."""
        views = [user for user in node.users if user in self.needed]
        shapes = {self._dims(user.meta["val"].shape) for user in views if key(user) in ("aten.view", "aten.reshape")}
        if len(shapes) != 1 or not all(key(user) in ("aten.view", "aten.reshape") for user in views):
            return spec
        (shape,) = shapes
        return replace(spec, shape=shape) if len(spec.shape) == 2 and shape[2:] == spec.shape[1:] else spec

    def _read(self, parameter: Parameter) -> ir.Value:
        """The parameter's value: the file's, plus what the file leaves out."""
        stored = parameter.stored
        if stored.parameter not in self.read:
            spec = replace(parameter.spec, dtype="f32")  # weights of whole numbers are kept so
            self.program.declare(Weight(stored.parameter, spec, stored.tensor, stored.rows, stored.format))
            self.read[stored.parameter] = self._get(stored.parameter, spec)
        value = self.read[stored.parameter]
        if parameter.spec.dtype != "f32":
            value = self.b.cast(value, dtype=parameter.spec.dtype)
        return self.b.add(value, self.b.scalar(stored.add)) if stored.add else value

    def _get(self, symbol: str, spec: TensorSpec | StateSpec) -> ir.Value:
        return self.first.raw("adaptc.get", [], [dialect.to_type(spec)], {"symbol": symbol}).results[0]

    def _constant(self, constant: Constant) -> ir.Value:
        value = constant.value
        if value.numel() > MAX_TABLE and constant.dtype == "f32" and constant.name in self.constants:
            return self._table(constant)
        if value.is_meta or value.numel() > MAX_CONSTANT:
            size = "has no values on the meta device" if value.is_meta else f"has {value.numel()} elements"
            raise CaptureError(f"the buffer {constant.name!r} {size}; adaptc keeps up to {MAX_CONSTANT} in a program.")
        return self.b.constant(value=value.tolist(), shape=tuple(value.shape), dtype=constant.dtype)

    def _table(self, constant: Constant) -> ir.Value:
        """A large buffer as a weight; equal ones, of every layer say, are one."""
        name = next((name for name, value in self.tables.items() if torch.equal(value, constant.value)), constant.name)
        if name not in self.tables:
            spec = TensorSpec("f32", tuple(constant.value.shape))
            self.program.declare(Weight(name, spec, f"{COMPUTED}{name}"))
            self.tables[name], self.read[name] = constant.value, self._get(name, spec)
        return self.read[name]

    # ---- nodes

    def _node(self, node: torch.fx.Node, module: str) -> None:
        name, value = key(node), node.meta.get("val")
        if name in SKIPPED or isinstance(value, _NUMBERS):
            return
        self.place = place_of(node, module)
        location = ir.Location.file(self.place.file, self.place.line, 0) if self.place.file else ir.Location.unknown()
        with location:
            self.b = Builder(self.point, self.place.module)
            try:
                if isinstance(value, torch.Tensor) and name not in MASKS:
                    # a complex tensor is walked as two real ones: see aten.Complex
                    real = torch.float32 if value.is_complex() else value.dtype
                    self.shape, self.dtype = self._dims(value.shape), self._kind(real)
                    self._check_flattened(node)
                if name not in rules() or self.spoiled.intersection(node.all_input_nodes) and name not in ANEW:
                    return self._stand_in(node)
                self.values[node] = self._apply(rules()[name], node)
            except (LegalityError, CaptureError) as error:
                self.problems.add(CaptureError(f"{node.target} in {self.place}: {error.message}", hint=error.hint))
                return self._stand_in(node)
        result = self.values[node]
        if isinstance(result, ir.Value):
            got = self.b.spec(result)
            wanted = TensorSpec(self.dtype, self.shape)
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), f"{node.target}: {got}, expected {wanted}"

    def _stand_in(self, node: torch.fx.Node) -> None:
        """Zeros for what no rule makes, and for what is made of them, up to where an operator can be looked at apart from
        the values that it is given."""
        self.spoiled.add(node)
        values = node.meta.get("val")
        try:
            made = tuple(self._zeros(v) for v in (values if isinstance(values, (tuple, list)) else (values,)))
        except CaptureError:
            made = (None,)
        self.values[node] = made if isinstance(values, (tuple, list)) else made[0]

    def _zeros(self, value: torch.Tensor) -> ir.Value:
        kind, shape = self._kind(value.dtype), self._dims(value.shape)
        return self.b.broadcast(self.b.scalar(0, kind), *([self.positions] if TOKENS in shape else []), shape=shape, dims=())

    def _apply(self, rule: Callable, node: torch.fx.Node) -> Any:
        args = torch.fx.node.map_arg(node.args, self._operand)
        kwargs = {k: torch.fx.node.map_arg(v, self._operand) for k, v in node.kwargs.items() if k not in IRRELEVANT}
        try:
            inspect.signature(rule).bind(self, *args, **kwargs)
        except TypeError as error:
            raise CaptureError(f"its rule doesn't take these arguments ({error}).") from error
        return rule(self, *args, **kwargs)

    def _operand(self, node: torch.fx.Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, _NUMBERS):
            return self.number(value)
        value = self.values[node]
        if isinstance(value, Parameter):
            return self._read(value)
        return self._constant(value) if isinstance(value, Constant) else value

    # ---- what rules ask for

    def number(self, value: Any) -> Any:
        """A traced number as a plain one, or an expression of the number of tokens T as text: "T", "T + 2"."""
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        expression = value.node.expr
        if expression.is_number:
            return int(expression) if expression.is_integer else float(expression)
        return str(expression).replace(str(self.symbol), TOKENS)

    def _dims(self, shape) -> tuple[int | str, ...]:
        """A traced shape; a dimension of c·T rows as the two that it is made of (see ``aten.FLATTENED``)."""
        dims = [self.number(d) for d in shape]
        if dims and (rows := _FLATTENED.fullmatch(str(dims[0]))):
            dims[:1] = [TOKENS, int(rows[1])]
        for dim in dims:
            if isinstance(dim, str) and dim != TOKENS:
                raise CaptureError(f"a dimension is {dim}; the only one that may vary is {TOKENS} itself, the step's "
                                   "tokens.")
        return tuple(dims)

    def _check_flattened(self, node: torch.fx.Node) -> None:
        """CaptureError where a dimension of c·T rows meets an operator that would take its two parts for dimensions."""
        tensors = [n.meta["val"] for n in (node, *node.all_input_nodes) if isinstance(n.meta.get("val"), torch.Tensor)]
        flat = next((t for t in tensors if t.ndim and _FLATTENED.fullmatch(str(self.number(t.shape[0])))), None)
        numbers = [d for a in node.args[1:] for d in (a if isinstance(a, list) else [a])]
        counted = key(node) in _DIMENSIONS and any(type(d) is int and d >= 0 for d in numbers)
        if flat is not None and (key(node) not in FLATTENED or counted):
            raise CaptureError(f"a dimension is {self.number(flat.shape[0])}; the only one that may vary is {TOKENS} itself, "
                               "the step's tokens.")

    def _kind(self, dtype: torch.dtype) -> str:
        if dtype not in DTYPES:
            raise CaptureError(f"has dtype {dtype}; adaptc captures {', '.join(map(str, DTYPES))}.")
        return DTYPES[dtype]

    def value(self, x: Any, dtype: str | None = None) -> ir.Value:
        """A tensor or a number as a value of ``dtype`` (the result's by default)."""
        dtype = dtype or self.dtype
        if isinstance(x, (bool, int, float)):
            return self.b.scalar(int(x) if dtype.startswith("i") else float(x), dtype)
        if not isinstance(x, ir.Value):
            what = (f"a {x.kind} mask, which only attention may take" if isinstance(x, Mask) else
                    "a complex tensor" if isinstance(x, Complex) else f"the number {x}")
            raise CaptureError(f"its operand is {what}.")
        return x if self.b.spec(x).dtype == dtype else self.b.cast(x, dtype=dtype)

    def flat(self, x: ir.Value) -> ir.Value | None:
        """x[..., K] as [rows, K], or None when the rows aren't one dimension's."""
        *rows, width = self.b.shape(x)
        wide = [d for d in rows if d != 1]
        if len(rows) == 1:
            return x
        return self.b.reshape(x, shape=(wide[0] if wide else 1, width)) if len(wide) <= 1 else None

    def is_table(self, x: ir.Value) -> bool:
        """Whether it is a large buffer, whose values are exact: nothing may choose a coarser format for it."""
        return any(self.read[name] == x for name in self.tables)

    def end_at(self, positions: int) -> None:
        """Notes that a table has rows for this many positions."""
        self.end = min(self.end or positions, positions)

    def lengths(self) -> ir.Value:
        """@step's argument for the tokens that each request may come to have; made when first asked for."""
        block = self.step.entry_block
        if len(block.arguments) < len(ROLES):
            block.add_argument(dialect.to_type(TensorSpec("i32", (DIMENSIONS["lengths"],))), ir.Location.unknown())
            results = list(self.step.type.results)
            kind = ir.FunctionType.get([a.type for a in block.arguments], results)
            self.step.operation.attributes["function_type"] = ir.TypeAttr.get(kind)
        return block.arguments[ROLES.index("lengths")]

    def state(self, spec: StateSpec) -> ir.Value:
        """A new state owned by the current node."""
        owner = f"{self.place.module}.{'kv' if spec.kind == 'rows' else spec.parts[0][0]}"
        name = f"{owner}{self.owned[owner] or ''}"
        self.owned[owner] += 1
        self.program.declare(StateSlot(name, spec, self.place.module))
        return self._get(name, spec)


def _logits(exported: torch.export.ExportedProgram) -> torch.fx.Node:
    """What the forward returns, made the graph's only output: what code writes into tensors of its own isn't kept."""
    kinds = torch.export.graph_signature.OutputKind
    output = next(n for n in exported.graph.nodes if n.op == "output")
    ((found, _),) = [pair for pair in zip(output.args[0], exported.graph_signature.output_specs)
                     if pair[1].kind is kinds.USER_OUTPUT]
    output.args = ((found,),)
    return found


def _token_symbol(placeholders) -> Any:
    kinds = torch.export.graph_signature.InputKind
    ids = next(node for kind, _, node in placeholders if kind is kinds.USER_INPUT)
    length = ids.meta["val"].shape[1]
    if not isinstance(length, torch.SymInt):
        raise CaptureError(f"the module's graph holds for {length} tokens only; expected any number.")
    return length.node.expr
